/* What runs before main on the board, and a terminal through the debugger (semihosting). */
#include <stdint.h>
#include <string.h>

extern uint32_t top_of_stack[];
extern char start_of_data[], end_of_data[], copy_of_data[], start_of_bss[], end_of_bss[];
int main(void);

static int call(int what, const void *with) {
    register int r0 __asm__("r0") = what;
    register const void *r1 __asm__("r1") = with;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

void say(const char *text) { call(4, text); }

void start(void) {
    *(volatile uint32_t *)0xe000ed88 |= 0xfu << 20; /* the floating point unit */
    __asm__ volatile("dsb; isb");
    memcpy(start_of_data, copy_of_data, (size_t)(end_of_data - start_of_data));
    memset(start_of_bss, 0, (size_t)(end_of_bss - start_of_bss));
    main();
    call(0x18, (const void *)0x20026); /* the program is over */
    for (;;) {}
}

static void stop(void) {
    say("fault\n");
    call(0x18, (const void *)0x20023);
    for (;;) {}
}

__attribute__((section(".vectors"), used)) static const void *const vectors[] = {
    top_of_stack, (void *)start, (void *)stop, (void *)stop, (void *)stop, (void *)stop, (void *)stop};
