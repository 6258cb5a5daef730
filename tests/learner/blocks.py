"""Gradients in blocks: models, step functions, and the comparison with single steps."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import braintrace as bt
from interpret import program

from .block_models import CASES
from .reference import Recurrent, assert_close, normal, squares
from .reference import values as values_of

XS = normal(7, 7, 2)
YS = normal(8, 7, 2)
KINDS = {"d_rtrl": bt.D_RTRL, "pp_prop": bt.pp_prop, "snap": bt.SnAp, "rtrl": bt.RTRL}
SINGLE = {
    "d_rtrl": ("d_rtrl", {}),
    "pp_prop": ("pp_prop", {"decay_or_rank": 0.9}),
    "snap1": ("snap", {"n": 1}),
    "snap2": ("snap", {"n": 2}),
    "rtrl": ("rtrl", {}),
}
WINDOWS = {
    f"{name}, windows of {chunk}": (rule, {**options, "vjp_method": "multi-step", "chunk": chunk})
    for name, (rule, options) in SINGLE.items()
    for chunk in {"d_rtrl": (1, 2, 3), "pp_prop": (2, 3), "snap2": (2,), "rtrl": (3,)}.get(name, ())
}
RULES = SINGLE | WINDOWS


def learner(rule="d_rtrl", model=Recurrent, x=XS[0], batch=None, **options):
    """A learner of a model with states that are not zero."""
    kind, given = RULES[rule]
    given = {k: v for k, v in (given | options).items() if k != "chunk"}
    model = model()
    brainstate.nn.init_all_states(model, batch_size=batch)
    if hasattr(model, "h"):
        model.h.value = model.h.value + 0.3 * normal(5, *model.h.value.shape)
    found = KINDS[kind](model, **given)
    found.compile_graph(x)
    return found


def plain(algo):
    """The step function of most tests."""
    return lambda x, y: jnp.sum((algo(x) - y) ** 2)


def in_blocks(algo):
    """Whether a sequence was run in blocks."""
    return algo.last_run.in_blocks


def outcome(algo, step, sequences, eager=False, mask=None, **options):
    """All that a gradient of a sequence returns and leaves behind."""
    loss = step(algo)

    def run(sequences, mask):
        return algo.etrace_grad(*sequences, step_fn=loss, mask=mask, return_value=True, **options)

    brainstate.random.seed(1)
    run = run if eager else program(run)
    found = run(sequences, mask)
    random = jax.random.key_data(brainstate.random.DEFAULT.value)
    return {"found": found, "states": values_of(algo), "random": random}


def assert_same(got, want, tolerance=1e-9):
    """Equal up to rounding, NaN where the other has one."""
    number = lambda a: jnp.where(jnp.isnan(a), 0, a) if jnp.issubdtype(a.dtype, jnp.inexact) else a
    is_nan = lambda a: jnp.isnan(a).astype(int) if jnp.issubdtype(a.dtype, jnp.inexact) else 0 * a
    got, want = jax.tree.map(jnp.asarray, (got, want))
    assert_close(jax.tree.map(is_nan, got), jax.tree.map(is_nan, want), 0)
    assert_close(jax.tree.map(number, got), jax.tree.map(number, want), tolerance)


def check(make, step=plain, sequences=(XS, YS), sizes=(2, 3, None), blocks=True, **options):
    """Blocks of several sizes do what one step after another does."""
    want = outcome(make(), step, sequences, block_size=1, **options)
    for size in sizes:
        algo = make()
        got = outcome(algo, step, sequences, block_size=size, **options)
        assert in_blocks(algo) == blocks, f"blocks of {size}"
        assert_same(got, want)
    return want


def case_check(name, rule, sizes):
    kind, options = RULES[rule]
    chunk = options.get("chunk", 1)

    def make():
        brainstate.random.seed(0)
        case = CASES[name]()
        given = {k: v for k, v in options.items() if k != "chunk"}
        algo = KINDS[kind](case.model, **given)
        algo.compile_graph(case.x0)
        return algo

    def step(algo):
        def loss(x, y):
            out = algo(bt.MultiStepData(x) if chunk > 1 else x)
            axes = tuple(range(chunk > 1, out.ndim))
            return 0.5 * jnp.sum((out - y) ** 2, axes), {"out": out}

        return loss

    sequences = CASES[name]().sequences
    want = check(make, step, sequences, sizes, has_aux=True, chunk_size=chunk)
    assert any(np.abs(np.asarray(g)).max() > 1e-6 for g in jax.tree.leaves(want["found"][0]))


OTHERS = [name for name in RULES if name != "d_rtrl"]


class Clocked(Recurrent):
    """Time comes from the surroundings."""

    def update(self, x):
        return super().update(x * jnp.cos(brainstate.environ.get("t")))


class Noisy(Recurrent):
    def update(self, x):
        return super().update(x + 0.3 * brainstate.random.randn(*x.shape))


def readout_outside(algo):
    algo.out = brainstate.ParamState(normal(1, 2, 2))
    return lambda x, y: jnp.sum((algo(x) @ algo.out.value - y) ** 2)


def encoder_before(algo):
    algo.encoder = brainstate.ParamState(normal(1, 2, 2))
    return lambda x, y: jnp.sum((algo(jnp.tanh(x @ algo.encoder.value)) - y) ** 2)


def encoder_with_memory(algo):
    algo.encoder = brainstate.ParamState(normal(1, 2, 2))
    algo.trace = brainstate.ShortTermState(normal(2, 2))

    def step(x, y):
        algo.trace.value = 0.7 * algo.trace.value + jnp.tanh(x @ algo.encoder.value)
        return jnp.sum((algo(algo.trace.value) - y) ** 2)

    return step


def noise_in_the_loss(algo):
    def step(x, y):
        return jnp.sum((algo(x + 0.2 * brainstate.random.randn(2)) - y) ** 2)

    return step


def noise_after_the_call(algo):
    return lambda x, y: jnp.sum((algo(x) - y - brainstate.random.rand(2)) ** 2)


def counter(algo):
    algo.count = brainstate.ShortTermState(jnp.zeros((), int))

    def step(x, y):
        algo.count.value = algo.count.value + 1
        return jnp.sum((algo(x / algo.count.value) - y) ** 2) * algo.count.value

    return step


def clock(algo):
    def step(x, y):
        with brainstate.environ.context(t=0.3 * y[0]):
            return jnp.sum((algo(x) - y) ** 2)

    return step


def compiled(algo):
    return brainstate.transform.jit(plain(algo))


def rematerialised(algo):
    return brainstate.transform.checkpoint(plain(algo))


def states_before_and_after(algo):
    h = algo.model4compile.h

    def step(x, y):
        old = h.value
        return jnp.sum((algo(x) - y) ** 2) + jnp.sum((h.value - old) ** 2 * old)

    return step


def branch_in_the_loss(algo):
    def step(x, y):
        out = algo(x)
        return lax.cond(y[0] > 0, lambda: jnp.sum((out - y) ** 2), lambda: jnp.sum(jnp.abs(out)))

    return step


def ignored_output(algo):
    def step(x, y):
        algo(x)
        return jnp.sum(algo.model4compile.v.value * y)

    return step


def another_learner_before(algo):
    algo.other = learner(model=Recurrent)
    return lambda x, y: jnp.sum((algo(algo.other(x)) - y) ** 2)


AROUND = {
    "readout_outside": (readout_outside, ("out", "model4compile.w")),
    "encoder_before": (encoder_before, ("encoder", "model4compile.r")),
    "encoder_with_memory": (encoder_with_memory, ("encoder", "model4compile.w")),
    "noise_in_the_loss": (noise_in_the_loss, None),
    "noise_after_the_call": (noise_after_the_call, None),
    "counter": (counter, None),
    "clock": (clock, None),
    "compiled": (compiled, None),
    "rematerialised": (rematerialised, None),
    "states_before_and_after": (states_before_and_after, None),
    "branch_in_the_loss": (branch_in_the_loss, None),
    "ignored_output": (ignored_output, None),
    "another_learner_before": (another_learner_before, ("other.model4compile.w",)),
}


def attribute(algo, path):
    return functools.reduce(getattr, path.split("."), algo)


def around(step, chosen=None, model=Recurrent, blocks=True, sequences=(XS, YS), **options):
    """Compare blocks with steps for a step function and weights given by their names."""

    def prepared(size):
        brainstate.random.seed(0)
        with brainstate.environ.context(t=0.0):
            algo = learner(model=model)
        loss = step(algo)
        weights = None if chosen is None else [attribute(algo, path) for path in chosen]
        found = outcome(
            algo, lambda _: loss, sequences, block_size=size, weights=weights, **options
        )
        assert size == 1 or in_blocks(algo) == blocks
        return found

    want = prepared(1)
    assert_same(prepared(3), want)
    assert any(np.abs(np.asarray(g)).max() > 1e-6 for g in jax.tree.leaves(want["found"][0]))


def closed_loop(algo):
    h = algo.model4compile.h
    return lambda x, y: jnp.sum((algo(x + 0.3 * h.value[:2]) - y) ** 2)


def loop_through_an_own_state(algo):
    algo.last = brainstate.ShortTermState(jnp.zeros(2))

    def step(x, y):
        out = algo(x + 0.3 * algo.last.value)
        algo.last.value = lax.stop_gradient(out)
        return jnp.sum((out - y) ** 2)

    return step


def running_loss(algo):
    algo.mean = brainstate.ShortTermState(jnp.zeros(()))

    def step(x, y):
        loss = jnp.sum((algo(x) - y) ** 2)
        algo.mean.value = 0.9 * algo.mean.value + lax.stop_gradient(loss)
        return loss * algo.mean.value

    return step


def called_twice(algo):
    return lambda x, y: jnp.sum((algo(x) - algo(y)) ** 2)


def called_in_a_branch(algo):
    def step(x, y):
        run = lambda: jnp.sum((algo(x) - y) ** 2)
        return brainstate.transform.cond(x[0] > 0, run, lambda: jnp.sum(algo.model4compile.v.value))

    return step


def episodes(algo):
    h = algo.model4compile.h

    def step(x, y):
        h.value = jnp.where(y[0] > 0, jnp.zeros(3), h.value)
        return jnp.sum((algo(x) - y) ** 2)

    return step


def reset_after(algo):
    h = algo.model4compile.h

    def step(x, y):
        loss = jnp.sum((algo(x) - y) ** 2)
        h.value = jnp.where(y[0] > 0, jnp.zeros(3), h.value)
        return loss

    return step


def another_learner_after(algo):
    algo.other = learner(model=Recurrent)
    return lambda x, y: jnp.sum((algo.other(algo(x)) - y) ** 2)


IN_A_LOOP = {
    "closed_loop": (closed_loop, None),
    "loop_through_an_own_state": (loop_through_an_own_state, None),
    "running_loss": (running_loss, None),
    "called_twice": (called_twice, None),
    "called_in_a_branch": (called_in_a_branch, None),
    "episodes": (episodes, None),
    "reset_after": (reset_after, None),
    "another_learner_after": (another_learner_after, ("other.model4compile.w",)),
}


def said(kind, chunk, size):
    heard = []

    class Talking(Recurrent):
        def update(self, x):
            if kind == "io":
                io_callback(lambda v: heard.append(float(v)), None, x[0], ordered=True)
            else:
                jax.debug.callback(lambda v: heard.append(float(v)), x[0])
            return super().update(x)

    rule = "d_rtrl" if chunk is None else f"d_rtrl, windows of {chunk}"
    algo = learner(rule, Talking)
    jax.effects_barrier()
    heard.clear()
    wrap = (lambda x: x) if chunk is None else bt.MultiStepData
    loss = lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)
    algo.etrace_grad(XS, YS, step_fn=loss, chunk_size=chunk, block_size=size)
    jax.effects_barrier()
    return heard


def traces_of(algo):
    return {k: t.value for k, t in algo.etraces.items()}


def program_of(length, rule="d_rtrl", **options):
    algo = learner(rule)
    run = lambda xs: algo.etrace_grad(
        xs, step_fn=lambda x: squares(algo(x)), return_value=True, **options
    )
    stateful = brainstate.transform.StatefulFunction(run)
    xs = jnp.zeros((length, 2))
    stateful.make_jaxpr(xs)
    return stateful, xs


def temporaries(length, **options):
    """Bytes the compiled gradient needs besides its inputs and outputs."""
    stateful, xs = program_of(length, **options)
    state = [s.value for s in stateful.get_states(xs)]
    compiled = jax.jit(stateful.jaxpr_call).lower(state, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def designed(error, *parts):
    """What, why and what to do are there."""
    text = str(error.value)
    for part in ("why:", "do:", *parts):
        assert part in text, f"{part!r} is missing in:\n{text}"
