"""Gradients in blocks: the result of one step after another, whatever the model and the loss."""

import contextlib
import functools
import sys
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import braintrace as bt

from .reference import Leaky, assert_alive, assert_close, normal, restore, squares
from .reference import values as values_of

sys.path.insert(0, str(Path(__file__).parents[1] / "truth"))  # as its own conftest.py does
import models

from interpret import program
from thinned import some

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


class Recurrent(Leaky):
    """A recurrent operator besides the leak."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.r = brainstate.ParamState(0.5 * normal(4, self.n, self.n))

    def update(self, x):
        h = self.h.value
        y = bt.matmul(x, self.w.value, self.b.value) + bt.matmul(h, self.r.value)
        self.h.value = 0.9 * jnp.tanh(h) + y
        return self.h.value @ self.v.value


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


# --------------------------------------------------------------------------------------- models

EXTRA = {}
case, net = functools.partial(models.case, EXTRA), models.net
matmul, element_wise = bt.matmul, bt.element_wise


def adaptive(draw, reset):
    @net({"w": draw(3, 4, scale=1.5), "r": draw(4, 4)}, {"v": draw(4), "a": abs(draw(4))})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = models.spike(v - 0.3 - 0.5 * m.a.value)
        m.a.value = 0.8 * m.a.value + z
        fired = lax.stop_gradient(z)
        m.v.value = v * (1 - reset * fired) - 0.1 * matmul(z, m.r.value)
        return z + 0.1 * m.v.value

    return model, (3,)


@case()
def spikes_with_hard_reset(draw):
    return adaptive(draw, 1.0)


@case()
def spikes_with_reset_beyond_zero(draw):
    return adaptive(draw, 2.0)


@case()
def operator_in_a_branch(draw):
    @net({"w": draw(3, 4), "u": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        far = lambda x: matmul(jnp.log(x[0]) + x, m.w.value)  # not a number where not taken
        y = lax.cond(x[0] > 0, far, lambda x: 0.3 * matmul(x, m.u.value), x)
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    return model, (3,)


@case()
def while_loop_of_dynamics(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        go_on = lambda c: (c[0] < 4) & (jnp.abs(c[1]).max() < 5)
        turn = lambda c: (c[0] + 1, c[1] + 0.2 * (y - jnp.tanh(c[1])))
        m.h.value = lax.while_loop(go_on, turn, (0, m.h.value))[1]
        return m.h.value

    return model, (3,)


@case()
def ring_buffer(draw):
    states = {
        "line": draw(3, 4),
        "at": brainstate.ShortTermState(jnp.zeros((), int)),
        "v": draw(4),
    }

    @net({"w": draw(3, 4)}, states)
    def model(m, x):
        oldest = lax.dynamic_index_in_dim(m.line.value, m.at.value, keepdims=False)
        y = jnp.tanh(matmul(x, m.w.value))
        m.v.value = 0.9 * m.v.value + jnp.sin(oldest)
        m.line.value = lax.dynamic_update_index_in_dim(m.line.value, y, m.at.value, 0)
        m.at.value = (m.at.value + 1) % 3
        return m.v.value

    return model, (3,)


@case()
def branch_in_the_turns_of_a_scan(draw):
    @net({"w": draw(3, 4), "g": draw(4)}, {"h": draw(2, 4)})
    def model(m, x):
        def turn(h, scale):
            y = lax.cond(scale > 1, lambda: matmul(scale * x, m.w.value), lambda: 0.1 * h)
            return 0.8 * h + y * element_wise(m.g.value), h.sum()

        m.h.value, sums = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0))
        return m.h.value + sums.mean()

    return model, (2, 3)


CASES = {
    name: (models.EXACT | models.RECURRENT | models.OPERATORS | EXTRA)[name]
    for name in (
        *("gru_batched", "lstm", "stacked_layers", "spikes_with_hard_reset"),
        *("spikes_with_reset_beyond_zero", "learnable_decay", "element_wise_batched", "conv"),
        *("sparse_batched", "grouped_batched", "lora_batched", "embedding_batched"),
        *("einsum_shared", "custom", "operators_inside_bodies", "branch_in_the_turns_of_a_scan"),
        *("operator_in_a_branch", "while_loop_of_dynamics", "delay_line", "ring_buffer"),
        *("complex_state", "plain_recurrent_weight", "plain_readout", "noise"),
        *("layer_norm", "lif_with_units"),
    )
}


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


@pytest.mark.parametrize("name", some(CASES, 3))
def test_blocks_equal_steps_for_every_model(name):
    case_check(name, "d_rtrl", (2 if len(name) % 2 else None,))


OTHERS = [name for name in RULES if name != "d_rtrl"]


@pytest.mark.parametrize("i", range(len(OTHERS)), ids=OTHERS)
def test_blocks_equal_steps_for_every_rule(i):
    name = list(CASES)[i * 7 % len(CASES)]  # a model each, from all over the list
    chunk = RULES[OTHERS[i]][1].get("chunk", 1)
    case_check(name, OTHERS[i], (3 if chunk == 1 else 2 * chunk,))


# -------------------------------------------------------------------------------- step functions


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


@pytest.mark.parametrize("name", some(AROUND, 2))
def test_what_is_around_the_learner_runs_in_blocks(name):
    step, chosen = AROUND[name]
    around(step, chosen, Clocked if name == "clock" else Recurrent)


def test_noise_of_the_model_and_of_the_loss_are_the_draws_of_single_steps():
    around(plain, model=Noisy)
    around(noise_after_the_call, model=Noisy, blocks=False)  # one source, used on both sides


def test_noise_is_different_at_every_step():
    algo = learner(model=Noisy)
    still = jnp.ones((5, 2))
    _, aux = algo.etrace_grad(
        still, step_fn=lambda x: (squares(algo(x)), brainstate.random.DEFAULT.value), has_aux=True
    )
    assert len(np.unique(jax.random.key_data(aux), axis=0)) == 5


# ---------------------------------------------------------------- what is evaluated step by step


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


def weight_written_before(algo):
    v = algo.model4compile.v

    def step(x, y):
        v.value = 0.8 * v.value
        return jnp.sum((algo(x) - y) ** 2)

    return step


def weight_written_after(algo):
    v = algo.model4compile.v

    def step(x, y):
        loss = jnp.sum((algo(x) - y) ** 2)
        v.value = 0.8 * v.value
        return loss

    return step


def counted_by_the_learner(algo):
    return lambda x, y: jnp.sum((algo(x) - y) ** 2) * (1 + algo.running_index.value)


def traces_read(algo):
    def step(x, y):
        loss = jnp.sum((algo(x) - y) ** 2)
        leaves = jax.tree.leaves([t.value for t in algo.etraces.values()])
        return loss + lax.stop_gradient(sum(jnp.sum(a**2) for a in leaves))

    return step


def traces_reset(algo):
    def step(x, y):
        for t in algo.etraces.values():
            t.value = jax.tree.map(lambda a: jnp.where(y[0] > 0, 0.0, a), t.value)
        return jnp.sum((algo(x) - y) ** 2)

    return step


STEP_BY_STEP = {
    "closed_loop": (closed_loop, None),
    "loop_through_an_own_state": (loop_through_an_own_state, None),
    "running_loss": (running_loss, None),
    "called_twice": (called_twice, None),
    "called_in_a_branch": (called_in_a_branch, None),
    "episodes": (episodes, None),
    "reset_after": (reset_after, None),
    "another_learner_after": (another_learner_after, ("other.model4compile.w",)),
    "weight_written_before": (weight_written_before, ("model4compile.w",)),
    "weight_written_after": (weight_written_after, ("model4compile.w",)),
    "counted_by_the_learner": (counted_by_the_learner, None),
    "traces_read": (traces_read, None),
    "traces_reset": (traces_reset, None),
}


@pytest.mark.parametrize("name", some(STEP_BY_STEP, 2))
def test_what_cannot_run_in_blocks_runs_step_by_step(name):
    step, chosen = STEP_BY_STEP[name]
    around(step, chosen, blocks=False)


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


@pytest.mark.parametrize("kind, chunk", [("debug", None), ("io", None), ("debug", 2)])
def test_side_effects_happen_once_per_step_and_in_order(kind, chunk):
    assert said(kind, chunk, None) == [float(x[0]) for x in XS]


# ------------------------------------------------------------------- batches, windows, sequences


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_batched_model_in_blocks(rule):
    xs, ys = normal(1, 7, 3, 2), normal(2, 7, 3, 2)
    check(lambda: learner(rule, x=xs[0], batch=3), plain, (xs, ys), (3,))


def test_mapped_learner_takes_the_options_of_blocks():
    xs, ys = normal(1, 7, 3, 2), normal(2, 7, 3, 2)
    plain_batch = learner(x=xs[0], batch=3)
    brainstate.nn.init_all_states(plain_batch.model4compile, batch_size=3)
    want = plain_batch.etrace_grad(xs, ys, step_fn=plain(plain_batch), block_size=1)
    for options in ({}, {"block_size": 3}, {"memory_budget": 100}, {"keep_traces": False}):
        algo = bt.compile(Recurrent(), "d_rtrl", xs[0], batch_size=3, vmap=True)
        assert_close(algo.etrace_grad(xs, ys, step_fn=plain(algo), **options), want)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo.module)))


class Gained(Recurrent):
    def update(self, x, gain):
        return super().update(gain * x)


@pytest.mark.parametrize("method", ["single-step", "multi-step"])
def test_windows_made_by_the_step_function(method):
    windows, gains = normal(1, 5, 3, 2), normal(2, 5, 2)

    def make():
        algo = bt.D_RTRL(models_state(Gained()), vjp_method=method)
        algo.compile_graph(XS[0], XS[0])
        return algo

    def step(algo):
        return lambda x, g: squares(algo(bt.MultiStepData(x), bt.SingleStepData(g)))

    check(make, step, (windows, gains), (6,), mask=jnp.asarray([1, 0, 2.0, 1, 0]))


def models_state(model):
    brainstate.nn.init_all_states(model)
    return model


@pytest.mark.parametrize("rule, length", [("d_rtrl", 1), ("pp_prop", 2), ("snap2", 1), ("rtrl", 2)])
def test_sequence_shorter_than_a_block(rule, length):
    sequences = (XS[:length], YS[:length])
    check(lambda: learner(rule), plain, sequences, (3,))


@pytest.mark.parametrize("lengths", [(3, 7), (7, 5)])
def test_sequences_of_another_length_with_the_same_learner(lengths):
    found = []
    for size in (1, 3):
        algo = learner()
        run = lambda n, algo=algo, size=size: algo.etrace_grad(
            XS[:n], YS[:n], step_fn=plain(algo), block_size=size, return_value=True
        )
        run(lengths[0])
        found.append((run(lengths[1]), values_of(algo)))
    assert_same(*found[::-1])


def test_two_halves_continue_each_other():
    want = outcome(learner(), plain, (XS, YS), block_size=1, reduction="sum")
    algo, total = learner(), None
    for part in (slice(0, 4), slice(4, 7)):
        grads = algo.etrace_grad(XS[part], YS[part], step_fn=plain(algo), reduction="sum")
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert_same((total, values_of(algo)), (want["found"][0], want["states"]))


def test_small_budget_of_memory_gives_small_blocks():
    algo, want = learner(), outcome(learner(), plain, (XS, YS), block_size=1)
    assert_same(outcome(algo, plain, (XS, YS), memory_budget=1), want)
    assert in_blocks(algo)
    assert 2 * temporaries(64, memory_budget=1) < temporaries(64, memory_budget=1 << 20)


CHOSEN = {
    "state": lambda m: m.w,
    "list": lambda m: [m.v, m.w],
    "tuple": lambda m: (m.r,),
    "dict": lambda m: {"z": m.w, "a": m.v},
}


@pytest.mark.parametrize("kind", some(CHOSEN, 2))
def test_chosen_weights_in_blocks(kind):
    def gradient(size):
        algo = learner()
        weights = CHOSEN[kind](algo.model4compile)
        return outcome(algo, plain, (XS, YS), weights=weights, block_size=size)["found"][0]

    want, got = gradient(1), gradient(3)
    assert type(got) is type(want)
    assert_alive(got)
    assert_close(got, want)


# ---------------------------------------------------------------------------------------- masks

NAN_LATE = YS.at[5:].set(jnp.nan)
MASKS = {
    "bool": (np.array([1, 0, 1, 1, 0, 1, 1], bool), XS, YS),
    "float": (np.array([0.5, 0, 2.0, 1, 0, 1, 3]), XS, YS),
    "a whole block": (np.array([1.0, 1, 0, 0, 0, 0, 1]), XS, YS),
    "nothing counts": (np.zeros(7), XS, YS),
    "NaN targets": (np.array([1.0, 0, 1, 0, 1, 0, 0]), XS, NAN_LATE.at[1].set(jnp.nan)),
    "NaN inputs at the end": (np.array([1.0, 1, 1, 1, 1, 0, 0]), XS.at[5:].set(jnp.nan), NAN_LATE),
}


@pytest.mark.parametrize("name", some(MASKS, 2))
def test_masks_in_blocks(name):
    mask, xs, ys = MASKS[name]
    want = check(learner, plain, (xs, ys), (2,), mask=mask)
    grads = jax.tree.leaves(want["found"][0])
    assert all(np.isfinite(g).all() for g in grads)
    assert any(np.any(g) for g in grads) == bool(mask.any())


@pytest.mark.parametrize("rule", ["pp_prop", "snap2", "rtrl", "d_rtrl, windows of 2"])
def test_nan_of_uncounted_steps_reaches_no_gradient(rule):
    mask, xs, ys = MASKS["NaN inputs at the end"]
    chunk = RULES[rule][1].get("chunk", 1)
    wrap = bt.MultiStepData if chunk > 1 else lambda x: x
    mask = mask if chunk == 1 else np.array([1.0, 1, 1, 1, 0, 0, 0])  # a window counts or does not
    xs = xs if chunk == 1 else xs.at[4:].set(jnp.nan)
    step = lambda algo: lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)
    blocks = rule != "rtrl"  # its reverse mode passes all steps of a block
    make = lambda: learner(rule)
    want = check(make, step, (xs, ys), (4,), blocks, mask=mask, chunk_size=chunk)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(want["found"][0]))


# ----------------------------------------------------------------------- traces that are not kept


def traces_of(algo):
    return {k: t.value for k, t in algo.etraces.items()}


@pytest.mark.parametrize(
    "rule, size", [("d_rtrl", 3), ("pp_prop", None), ("rtrl", 3), ("d_rtrl, windows of 2", None)]
)
def test_traces_that_are_not_kept_are_zero(rule, size):
    chunk = RULES[rule][1].get("chunk", 1)
    wrap = bt.MultiStepData if chunk > 1 else lambda x: x
    step = lambda algo: lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)
    options = {"chunk_size": chunk, "reduction": "sum"}
    want = outcome(learner(rule), step, (XS, YS), block_size=1, **options)
    algo = learner(rule)
    got = outcome(algo, step, (XS, YS), block_size=size, keep_traces=False, **options)
    assert_close(got["found"], want["found"])
    assert_close(algo.model4compile.h.value, want["states"][("model4compile", "h")])
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo)))
    assert int(algo.running_index.value) == 0
    other = learner(rule)
    other.etrace_grad(XS, YS, step_fn=step(other), block_size=1, chunk_size=chunk)
    other.reset_state()
    again = [outcome(a, step, (XS[:4], YS[:4]), **options) for a in (algo, other)]
    assert_same(*again)


def test_states_saved_before_a_sequence_can_be_put_back():
    algo = learner()
    algo.etrace_evolve(XS[:2])
    saved = values_of(algo)
    first = outcome(algo, plain, (XS, YS), eager=True)
    restore(algo, saved)
    assert_same(outcome(algo, plain, (XS, YS), eager=True), first)


# ------------------------------------------------------------------------------- cost of a call


def compiles(action):
    """Programs XLA compiled during the action."""
    seen = []

    def listen(event, *args, **kwargs):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    action()
    return len(seen)  # older JAX cannot take a listener back; this one only counts


@pytest.mark.parametrize("size", [3, None])
def test_second_call_compiles_nothing(size):
    algo = learner()

    def run(xs):
        algo.reset()
        target = jnp.zeros(2)
        return algo.etrace_grad(
            xs, step_fn=lambda x: jnp.sum((algo(x) - target) ** 2), block_size=size
        )

    run(XS)
    known = len(algo.executor._runs)
    assert compiles(lambda: run(YS)) == 0
    assert len(algo.executor._runs) == known


def test_second_call_under_jit_neither_traces_nor_compiles():
    class Counted(Recurrent):
        traced = 0

        def update(self, x):
            type(self).traced += 1
            return super().update(x)

    algo = learner(model=Counted)
    fast = brainstate.transform.jit(lambda x, y: algo.etrace_grad(x, y, step_fn=plain(algo)))
    fast(XS, YS)
    before = Counted.traced
    assert compiles(lambda: fast(YS, XS)) == 0
    assert Counted.traced == before


@pytest.mark.parametrize("way", ["eager", "no jit", "for_loop"])
def test_blocks_under_transformations(way):
    xs, ys = XS[:2], YS[:2]
    want = outcome(learner(), plain, (xs, ys), block_size=1)
    algo = learner()

    def run(x, y):
        return algo.etrace_grad(x, y, step_fn=plain(algo), block_size=2, return_value=True)

    if way == "for_loop":
        found = brainstate.transform.for_loop(run, xs[None], ys[None])
        found = jax.tree.map(lambda a: a[0], found)
    else:
        with jax.disable_jit() if way == "no jit" else contextlib.nullcontext():
            found = run(xs, ys)
    assert_same((found, values_of(algo)), (want["found"], want["states"]))


def test_reset_within_a_compiled_function_starts_anew():
    algo, other = learner(), learner()
    other.reset()
    want = outcome(other, plain, (XS, YS), block_size=1)["found"][0]

    @brainstate.transform.jit
    def run(x, y):
        algo.reset()
        return algo.etrace_grad(x, y, step_fn=plain(algo), keep_traces=False)

    for _ in range(2):
        assert_close(run(XS, YS), want)


def test_values_taken_from_the_surroundings_are_those_of_the_call():
    algo, other = learner(), learner()
    for scale in (1.0, 3.0, np.array([3.0, 1.0]), jnp.asarray([2.0, 5.0]), 2):
        got, want = (
            a.etrace_grad(
                XS,
                step_fn=lambda x, a=a, scale=scale: jnp.sum(scale * a(x) ** 2),
                block_size=size,
            )
            for a, size in ((algo, 3), (other, 1))
        )
        assert_close(got, want)


def deep_size(jaxpr):
    """How many equations there are, in bodies too."""
    inner = lambda p: p if hasattr(p, "eqns") else getattr(p, "jaxpr", None)
    total = 0
    for eqn in jaxpr.eqns:
        params = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
        total += 1 + sum(deep_size(inner(p)) for p in params if hasattr(inner(p), "eqns"))
    return total


def program_of(length, rule="d_rtrl", **options):
    algo = learner(rule)
    run = lambda xs: algo.etrace_grad(
        xs, step_fn=lambda x: squares(algo(x)), return_value=True, **options
    )
    stateful = brainstate.transform.StatefulFunction(run)
    xs = jnp.zeros((length, 2))
    stateful.make_jaxpr(xs)
    return stateful, xs


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_program_grows_neither_with_the_sequence_nor_with_the_block(rule):
    sizes = []
    for length, size in ((64, 16), (256, 16), (64, 32), (256, 64)):
        stateful, xs = program_of(length, rule, block_size=size)
        sizes.append(deep_size(stateful.get_jaxpr(xs).jaxpr))
    assert min(sizes) > 50
    assert len(set(sizes)) == 1, sizes


def temporaries(length, **options):
    """Bytes the compiled gradient needs besides its inputs and outputs."""
    stateful, xs = program_of(length, **options)
    state = [s.value for s in stateful.get_states(xs)]
    compiled = jax.jit(stateful.jaxpr_call).lower(state, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_one_block():
    sizes = ((64, 16), (512, 16), (512, 128))
    short, long, wide = (temporaries(n, block_size=size) for n, size in sizes)
    assert long <= short + 512, (short, long)
    assert wide > 2 * short, (short, wide)  # the control: a block does take memory


# ------------------------------------------------------------------------------ stored precision


@pytest.mark.parametrize("dtype, bound", [(jnp.bfloat16, 6e-3), (jnp.float16, 8e-4)])
def test_small_traces_are_closer_in_larger_blocks(dtype, bound):
    xs = normal(3, 24, 2).astype(jnp.float32)

    def gradient(size, **options):
        model = Recurrent()
        brainstate.nn.init_all_states(model)
        for state in model.states().values():
            state.value = state.value.astype(jnp.float32)
        algo = bt.D_RTRL(model, **options)
        algo.compile_graph(xs[0])
        step = lambda algo: lambda x: jnp.sum(jnp.tanh(algo(x)) ** 2)
        grads = outcome(algo, step, (xs,), block_size=size)["found"][0]
        kinds = {a.dtype for a in jax.tree.leaves(traces_of(algo))}
        assert kinds == {jnp.dtype(options.get("trace_dtype", jnp.float32))}
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])

    want = gradient(1)
    norm = jnp.linalg.norm
    errors = [norm(gradient(n, trace_dtype=dtype) - want) / norm(want) for n in (1, 6, 24)]
    assert 1e-6 < errors[0] < bound, errors
    assert errors[2] < 1e-5, errors  # one block never rounds a trace
    assert errors[1] < errors[0], errors


# ------------------------------------------------------------------------------ errors, progress


def designed(error, *parts):
    """What, why and what to do are there."""
    text = str(error.value)
    for part in ("why:", "do:", *parts):
        assert part in text, f"{part!r} is missing in:\n{text}"


@pytest.mark.parametrize("name", ["block_size", "memory_budget"])
def test_wrong_counts_are_refused(name):
    algo = learner()
    for bad in (0, -1, 1.5, True, "all"):
        kind = ValueError if isinstance(bad, int) and bad is not True else TypeError
        with pytest.raises(kind) as error:
            algo.etrace_grad(XS, YS, step_fn=plain(algo), **{name: bad})
        designed(error, name)
    assert int(algo.running_index.value) == 0


def test_progress_without_tqdm_says_how_to_get_it(monkeypatch):
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, None)
    algo = learner()
    with pytest.raises(ImportError) as error:
        algo.etrace_grad(XS, YS, step_fn=plain(algo), progress=True)
    designed(error, "tqdm", "pip install 'braintrace[progress]'")


@pytest.mark.parametrize("size", [1, 3, None])
def test_progress_bar_reaches_its_end(size, capsys):
    algo = learner()
    want = outcome(learner(), plain, (XS, YS), block_size=size)
    shown = outcome(algo, plain, (XS, YS), eager=True, block_size=size, progress=True)
    assert_same(shown, want)
    assert "7/7" in capsys.readouterr().err
    algo.etrace_grad(XS, YS, step_fn=plain(algo), block_size=size)
    assert capsys.readouterr().err == ""


def test_products_have_the_precision_that_is_asked_for():
    algo = learner()
    run = lambda xs: algo.etrace_grad(xs, step_fn=lambda x: squares(algo(x)))

    def products():
        jaxpr = brainstate.transform.make_jaxpr(run)(XS)
        text = str(jaxpr)
        return text.count("dot_general["), text.count("precision=(Precision.HIGHEST")

    with jax.default_matmul_precision("default"):
        count, highest = products()
    assert count and not highest
    with jax.default_matmul_precision("highest"):
        count, highest = products()
    assert count == highest
