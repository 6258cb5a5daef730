"""Gradients in blocks: compilations, size and memory of programs, precision, progress."""

import contextlib
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace._online import _blocks

from .blocks import (
    XS,
    YS,
    Recurrent,
    assert_same,
    designed,
    learner,
    outcome,
    plain,
    program_of,
    temporaries,
    traces_of,
)
from .reference import assert_close, compiles, normal, squares
from .reference import values as values_of


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
    known = len(algo._known.plans)
    assert compiles(lambda: run(YS)) == 0
    assert len(algo._known.plans) == known


def test_second_call_compiles_nothing_whatever_is_read_first():
    class Delayed(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones((2, 2)))

        def init_state(self, batch_size=None, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros(2))
            self.past = brainstate.ShortTermState(jnp.zeros(2, jnp.int8))

        def update(self, x):
            before, self.past.value = self.past.value, (x > 0).astype(jnp.int8)
            self.h.value = 0.9 * self.h.value + bt.matmul(x + before, self.w.value)
            return self.h.value

    algo = bt.compile(Delayed(), "d_rtrl", XS[0])
    run = lambda xs: algo.etrace_grad(xs, step_fn=lambda x: jnp.sum(algo(x)), block_size=3)
    run(XS)
    run(YS)
    assert len(algo._known.plans) == 2  # the model's own step, and the one around it


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


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_program_grows_neither_with_the_sequence_nor_with_the_block(rule):
    sizes = []
    for length, size in ((64, 16), (256, 16), (64, 32), (256, 64)):
        stateful, xs = program_of(length, rule, block_size=size)
        sizes.append(deep_size(stateful.get_jaxpr(xs).jaxpr))
    assert min(sizes) > 50
    assert len(set(sizes)) == 1, sizes


def test_memory_is_that_of_one_block_and_a_segment(monkeypatch):
    monkeypatch.setattr(_blocks, "SEGMENT", 64 * 136)  # what 64 steps leave behind
    sizes = ((64, 16), (512, 16), (512, 128))
    short, long, wide = (temporaries(n, block_size=size) for n, size in sizes)
    assert long <= 1.5 * short, (short, long)
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
    designed(error, "tqdm", "pip install 'braintrace-online[progress]'")


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
