"""The memory of a block: its estimate, the size that is chosen by it, and traces in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import braintrace
from braintrace._online import _blocks
from braintrace._online._blocks import StepBytes, calls_per_block, calls_per_segment, step_bytes
from braintrace.rules import _block as rules_block

N, B, T = 24, 8, 48
CELL, LOSS = jnp.zeros((B, N)), lambda out, y: jnp.mean((out - y) ** 2)


def draw(*shape):
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.normal(size=shape)) / np.sqrt(shape[0])


def gated(p, h, x):
    both = jnp.concatenate([x, h], -1)
    z, c = jax.nn.sigmoid(both @ p["z"]), jnp.tanh(both @ p["c"])
    h = (1 - z) * h + z * c
    return h, h @ p["o"]


def adaptive(p, state, x):
    v, a = state
    z = jax.nn.sigmoid(4 * (v - 0.5 - a))
    v = 0.9 * v + x @ p["w"] + z @ p["u"] - z
    return (v, 0.95 * a + 0.05 * z), v @ p["o"]


SYNAPSES = scipy.sparse.random(N, N, density=1.0, rng=np.random.default_rng(0)).tocoo()


def feed_forward(p, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.sparse_matmul(x, p["s"], sparse_mat=SYNAPSES))
    return h, h @ p["o"]


def recurrent(p, h, x):
    return (new := jnp.tanh(x + braintrace.sparse_matmul(h, p["s"], sparse_mat=SYNAPSES))), new


CELLS = {
    "gated": (gated, {"z": draw(2 * N, N), "c": draw(2 * N, N), "o": draw(N, N)}, CELL),
    "adaptive": (adaptive, {k: draw(N, N) for k in "wuo"}, (CELL, CELL)),
    "feed-forward": (feed_forward, {"s": draw(N * N), "o": draw(N, N)}, CELL),
    "recurrent": (recurrent, {"s": draw(N * N)}, CELL),
}


def learner(cell, rule="d_rtrl", **options):
    step, params, state = CELLS[cell]
    net = braintrace.online(step, rule, **options)
    return net, params, net.init(params, state, CELL)


def compiled(net, params, carry, size, xs, **options):
    grad = jax.jit(net.grad(LOSS, block_size=size, **options))
    return grad.lower(params, carry, xs, xs).compile()


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


def plan_of(net):
    (plan,) = net._plans.values()
    return plan


ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU stores a twelfth of it")


@pytest.mark.parametrize(
    "cell, rule",
    [
        ("gated", "d_rtrl"),
        ("adaptive", "d_rtrl"),
        pytest.param("feed-forward", "pp_prop", marks=ON_CPU),
    ],
)
def test_estimate_of_a_step_is_what_it_takes(cell, rule):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    net, params, carry = learner(cell, rule, **options)
    xs = jnp.zeros((T, B, N))
    short, long = (temporaries(compiled(net, params, carry, size, xs)) for size in (8, 24))
    ratio = step_bytes(plan_of(net).graph).stored / ((long - short) / 16)
    assert 1 / 1.6 < ratio < 1.6, ratio


def test_operator_in_a_loop_computes_inside_for_one_step_at_a_time():
    inside = {}
    for cell in ("feed-forward", "recurrent"):
        net, _, _ = learner(cell, "pp_prop", decay_or_rank=0.9)
        inside[cell] = step_bytes(plan_of(net).graph)
    products = 8 * N * N * B
    assert inside["feed-forward"].stored > products > inside["recurrent"].stored
    assert inside["recurrent"].moved > products


def test_blocks_fit_and_pay(monkeypatch):
    def sizes(step, traces=1 << 30, budget=None, **options):
        held = [jax.ShapeDtypeStruct((traces,), jnp.int8)]
        return calls_per_block(step, 1, 1 << 14, held, None, budget, **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(_blocks, "_budget", lambda: _blocks.BUDGET)
    small = StepBytes(1 << 10, 1 << 10)
    assert sizes(small) == 256 and sizes(small, 1 << 10) == 32
    assert sizes(StepBytes(1 << 28), 1 << 32) == 16  # at least
    assert sizes(StepBytes(1 << 20), budget=1 << 23) == 8  # unless the user says
    assert sizes(StepBytes(1 << 24), 1 << 28) == 32  # 48 fit
    assert sizes(StepBytes(1 << 24), 1 << 28, shards=4) == 128
    assert sizes(small, keep=False) == 1 << 14 and sizes(small, 1 << 10, keep=False) == 32
    back = partial(sizes, backward=True, keep=False)  # by the values of a step alone
    assert back(small) == back(small, 1 << 10) == 1 << 14  # all that stays in the caches
    assert back(StepBytes(1 << 12)) == back(StepBytes(1 << 18)) == 128
    assert back(StepBytes(1 << 19)) == 64 and back(StepBytes(1 << 22)) == 16
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_blocks, "_budget", lambda: 1 << 34)
    assert sizes(small) == 1 << 14 and sizes(StepBytes(1 << 23, 1 << 23)) == 256
    assert sizes(StepBytes(1 << 23, 1 << 29), traces=0) == 16  # a step is as long as all else


@pytest.mark.parametrize("segment", [1, 1 << 16], ids=["blocks", "segments of two"])
def test_traces_are_advanced_in_their_own_memory(segment, monkeypatch):
    n = 32  # arrays of a block are small beside a trace
    xs = jnp.asarray(np.random.default_rng(2).normal(size=(8, B, n)))
    params, cell = {k: draw(n, n) for k in "wuo"}, jnp.zeros((B, n))
    net = braintrace.online(adaptive, "d_rtrl")
    carry = net.init(params, (cell, cell), cell)
    outs, memory = [], []
    for most in (1 << 25, 0):  # of a trace that is not advanced in parts
        monkeypatch.setattr(rules_block, "PART_BYTES", most)
        program = compiled(net, params, carry, 2, xs, memory_budget=segment)
        outs.append(program(params, carry, xs, xs))
        memory.append(temporaries(program))
    close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
    jax.tree.map(close, *outs)
    largest = max(a.nbytes for a in jax.tree.leaves(carry.traces))
    assert memory[1] < memory[0] - largest, (memory, largest)


def test_segments_store_what_fits():
    one = [jax.ShapeDtypeStruct((1 << 20,), jnp.int8)]
    cut = partial(calls_per_segment, traces=one, budget=None)
    sizes = dict(kept=1 << 16, states=1 << 12, size=16)
    assert cut(**sizes, count=1 << 12, keep=False) == (1 << 12, True)
    assert cut(**sizes, count=1 << 16, keep=False) == (1 << 16, False)  # the states before blocks
    assert cut(**sizes, count=500, keep=True) == (500, True)
    calls, stored = cut(**sizes, count=1000, keep=True)
    assert stored and calls % 16 == 0 and 1000 / 2 <= calls < 1000 / 2 + 16
    assert calls << 16 <= _blocks.SEGMENT
    large = [jax.ShapeDtypeStruct((1 << 27,), jnp.int8)]
    assert cut(**sizes, count=1000, keep=True, traces=large) == (1000, True)
