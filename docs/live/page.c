/* What the page calls: the learner, and arrays that it shares with it. */
#include <string.h>

#include "learner.h"

#include "forget.h"

#define CALLED(name) __attribute__((export_name(name)))

static learner l;
static float x[INPUTS], target[OUTPUTS], out[OUTPUTS];

CALLED("x") float *page_x(void) { return x; }
CALLED("target") float *page_target(void) { return target; }
CALLED("out") float *page_out(void) { return out; }
CALLED("traces") float *page_traces(void) { return l.FIRST_TRACE; }
CALLED("begin") void page_begin(void) { learner_init(&l); }
CALLED("step") void page_step(void) { learner_step(&l, x, out); }
CALLED("learn") float page_learn(void) { return learner_learn(&l, target); }
/* Without the past the gradient is that of the rule no_trace. */
CALLED("forget") void page_forget(void) { forget(&l); }
