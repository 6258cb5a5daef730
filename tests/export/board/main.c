/* Updates on the board; what it learns is written as the bits of numbers. */
#include "learner.h"

#include "told.h"

void say(const char *text);
static learner l;
static float out[OUTPUTS];

static void number(float value) {
    char text[10];
    union { float f; uint32_t u; } both = {value};
    for (int i = 0; i < 8; i++) text[i] = "0123456789abcdef"[both.u >> (28 - 4 * i) & 15];
    text[8] = '\n';
    text[9] = 0;
    say(text);
}

int main(void) {
    learner_init(&l);
    for (int t = 0; t < STEPS; t++) {
        learner_step(&l, xs[t], out);
        for (int i = 0; i < OUTPUTS; i++) number(out[i]);
        number(learner_learn(&l, ys[t]));
    }
    return 0;
}
