"""Loops over time as kernels, interpreted on the CPU: the same numbers as `lax.scan`."""

import re
from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace.engine import Engine, _loops, _recurrence, recorded, scan_time
from braintrace.kernel import _chunks, _steps

T, B, N = 7, 2, 3
RNG = np.random.RandomState(0)
draw = lambda *shape: jnp.asarray(RNG.randn(*shape))
A, C = draw(N), draw(N) + 1j * draw(N)
ON_GPU = jax.default_backend() == "gpu"
COPIES = 2 if ON_GPU else 1  # one compiled for the GPU, one interpreted for other platforms


@pytest.fixture(autouse=True)
def few_written_out(monkeypatch):
    """Steps in groups of three and a rest of one, units in tiles of four and a rest of two."""
    monkeypatch.setattr(_chunks, "_AHEAD", 3)
    monkeypatch.setattr(_steps, "_TILE", 4)


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return spike(v), t / (1 + jnp.abs(v)) ** 2


def gated(h, x):
    return (1 - jax.nn.sigmoid(x)) * h + A * jnp.tanh(x), h


def adaptive(state, x):
    v, a, refractory = state
    z = spike(v - 1 - a)
    v = jnp.where(refractory, 0.0, 0.9 * v + x - z)
    return (v, 0.98 * a + 0.1 * z, z > 0.5), (z, state[0])


def slots(q, now):
    D, lam = now
    moved = sum(D[..., j] * q[..., j : j + 1] for j in range(2))
    return lam + jnp.where((q == 0).all(-1, keepdims=True), 0, moved), q


def rotating(h, x):
    h = jnp.conj(C) * h**2 / (1 + jnp.abs(h)) + jnp.exp(1j * x.real) * x
    return jnp.where(h.real > 2, 0, h), h.imag


def turning(h, x):
    return C / (1 + jnp.abs(C)) * h + x, (h * jnp.conj(h)).real


def substeps(h, x):
    return lax.fori_loop(0, 3, lambda i, h: h + 0.1 * i * (jnp.sin(x) - h), h), ()


def layers(state, x):
    (a, b), count = state
    return ((0.5 * a + x[0], 0.9 * b * x[1]), count + 1), (a, b, count)


BODIES = {
    "gates": (gated, draw(B, N), draw(T, B, N)),
    "shared slices": (gated, draw(B, N), draw(T, 1, N)),
    "resets": (adaptive, (draw(B, N), draw(B, N), draw(B, N) > 1), draw(T, B, N)),
    "slots": (slots, draw(B, N, 2), (draw(T, B, N, 2, 2), draw(T, B, N, 2))),
    "complex": (rotating, draw(B, N) + 0j, draw(T, B, N) + 1j * draw(T, B, N)),
    "sub-steps": (substeps, draw(B, N), draw(T, B, N)),
    "shapes": (
        layers,
        ((draw(B, N), draw(5)), jnp.zeros((), jnp.int32)),
        (draw(T, B, N), draw(T)),
    ),
}


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), a, b)


@pytest.mark.parametrize("name", BODIES)
def test_a_kernel_equals_a_scan(name):
    body, carry, xs = BODIES[name]
    reverse = name in ("slots", "gates")
    run = recorded(lambda *a: scan_time(body, *a, T, reverse=reverse), Engine.KERNEL)
    assert_close(run(carry, xs), lax.scan(body, carry, xs, T, reverse=reverse))
    assert [(loop.steps, loop.reason) for loop in run.loops] == [(T, None)]


def test_affine_loops_of_few_units_are_split_over_time(monkeypatch):
    length = 24
    x, D = draw(length, B, N), draw(length, B, N, 2, 2)
    moved = lambda q, now: (now[1] + (now[0] * q[..., None, :]).sum(-1), q)
    products = lambda p, d: ((d[..., None] * p[..., None, :, :]).sum(-2), p)
    bodies = [  # chunks, whether from behind, the loop
        (6, False, gated, draw(B, N), x),
        (6, True, moved, draw(B, N, 2), (D, D[..., 0])),
        (6, False, turning, draw(B, N) + 0j, x + 1j * x[::-1]),
        (6, False, lambda h, x: (x * h, h), jnp.zeros((B, N)), 1e160 + x),  # overflows in a chunk
        (1, True, lambda h, x: (jnp.where(h == 0, 0, x * h), h), draw(B, N), x),
        # Four values per unit: what a chunk makes of each is a kernel that compiles for a minute.
        (1, False, products, draw(B, N, 2, 2), D),
    ]
    count, chunks = _chunks.TiledStep._chunks, []
    monkeypatch.setattr(
        _chunks.TiledStep, "_chunks", lambda plan, n: chunks.append(count(plan, n)) or chunks[-1]
    )
    for name, value in (("_CHUNK", 4), ("_FILLED", 64), ("_FEWEST_CHUNKS", 2)):
        monkeypatch.setattr(_chunks, name, value)
    for _, reverse, *loop in bodies:
        run = recorded(partial(scan_time, length=length, reverse=reverse), Engine.KERNEL)
        assert_close(run(*loop), lax.scan(*loop, length, reverse=reverse))
    assert chunks == [b[0] for b in bodies]


REFUSED = {
    "dot_general is not element-wise": lambda h, x: (h @ jnp.ones((20, 20)), x),
    "slice moves units": lambda h, x: (jnp.roll(h, 1, -1), x),
    "reduce_sum moves units": lambda h, x: (h - h.mean(0), x),
    "erf is not in the language of kernels": lambda h, x: (lax.erf(h), x),
    "a result is constant": lambda h, x: (h + x, A),
    "has a side effect": lambda h, x: (jax.debug.callback(lambda: None) or h, x),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_bodies_stay_scans_and_say_why(reason):
    run = recorded(lambda *a: scan_time(REFUSED[reason], *a, T), Engine.KERNEL)
    xs, h = draw(T, B, 20), draw(B, 20)
    assert_close(run(h, xs), lax.scan(REFUSED[reason], h, xs))
    assert reason in run.loops[0].reason
    if "constant" not in reason:
        assert re.search(r"test_kernel.py:\d+", run.loops[0].reason)


def test_half_precision_stays_a_scan():
    run = recorded(lambda *a: scan_time(lambda h, x: (h * x, h), *a, T), Engine.KERNEL)
    run(jnp.zeros((B, N), jnp.bfloat16), jnp.zeros((T, B, N), jnp.bfloat16))
    assert run.loops[0].reason == "a value is bfloat16"


# ------------------------------------------------------------------------------------ whole models

I = 2
XS, YS = draw(9, B, I), draw(9, B, N)
PARAMS = {"w": draw(I, N), "g": draw(I, N), "decay": draw(N)}
START = (jnp.zeros((B, N)), jnp.zeros((B, N)))


def step(params, state, x):
    v, a = state
    z = jnp.tanh(v - a)
    keep = jax.nn.sigmoid(params["decay"] + x @ params["g"])
    v = keep * v + x @ params["w"] - 0.3 * z
    return (v, 0.8 * a + 0.2 * z), v


def loss(out, y):
    return ((out - y) ** 2).sum()


def bptt(params):
    def body(state, now):
        state, out = step(params, state, now[0])
        return state, loss(out, now[1])

    return lax.scan(body, START, (XS, YS))[1].sum()


def test_gradient_of_a_model_with_kernels_is_that_of_bptt():
    net = braintrace.online(step, "d_rtrl", engine="kernel")
    carry = net.init(PARAMS, START, XS[0])
    grads, (carry, _) = net.grad(loss, block_size=4)(PARAMS, carry, XS, YS)
    assert_close(grads, jax.grad(bptt)(PARAMS))
    loops = {(loop.steps, loop.reason) for loop in net.last_run.loops}
    assert loops == {(4, None)}  # the rest of one step is written out
    # Another engine goes on from there, and says that it is another.
    plain = braintrace.online(step, "d_rtrl", engine="scan")
    plain.init(PARAMS, START, XS[0])
    more = [n.grad(loss, block_size=4)(PARAMS, carry, XS, YS)[0] for n in (net, plain)]
    assert_close(*more)
    assert {loop.reason for loop in plain.last_run.loops} == {"engine='scan'"}


def turned(params, state, x):
    """Two slots per unit; D, and f of the products, repeat along steps and samples."""
    a = params["a"]
    u = x @ params["w"], x @ params["g"]
    re, im = (a[0] * state[0] - a[1] * state[1], a[1] * state[0] + a[0] * state[1])
    re, im = re + params["decay"] * u[0], im + params["decay"] * u[1]
    return (re, im), re * im


def test_what_repeats_is_not_stored_for_every_step_and_sample():
    params = {**PARAMS, "a": 0.5 * draw(2, N)}

    def bptt(params):
        out = lax.scan(lambda h, x: turned(params, h, x), START, XS)[1]
        return jax.vmap(loss)(out, YS).sum()

    net = braintrace.online(turned, "d_rtrl", engine="kernel")
    carry = net.init(params, START, XS[0])
    gradient = lambda params: net.grad(loss, block_size=len(XS))(params, carry, XS, YS)[0]
    assert_close(gradient(params), jax.grad(bptt)(params))
    assert {loop.reason for loop in net.last_run.loops} == {None}
    program = str(jax.make_jaxpr(gradient)(params))
    # The states, q, and what traces grow by: one kernel of the units alone, one of all samples.
    assert program.count("pallas_call[") == 4 * COPIES


def test_a_kernel_does_cheap_arithmetic_itself_and_stores_the_new_states(monkeypatch):
    """It reads x @ w and x @ g, two real arrays, and results read the states that it stores."""
    params = {**PARAMS, "a": 0.5 * draw(2, N)}
    scan, shapes = _recurrence.scan_time, []

    def seen(body, carry, xs, length):
        out = scan(body, carry, xs, length)
        shapes.append([[(a.shape, a.dtype.kind) for a in jax.tree.leaves(t)] for t in (xs, out[1])])
        return out

    monkeypatch.setattr(_recurrence, "scan_time", seen)

    def bptt(params):
        out = lax.scan(lambda h, x: turned_complex(params, h, x), START, XS)[1]
        return jax.vmap(loss)(out, YS).sum()

    net = braintrace.online(turned_complex, "d_rtrl", engine="kernel")
    carry = net.init(params, START, XS[0])
    mask = jnp.asarray(RNG.rand(9) > 0.4)
    assert_close(net.grad(loss, block_size=9)(params, carry, XS, YS)[0], jax.grad(bptt)(params))
    real = ((9, B, N), "f")
    assert shapes == [[[real] * 2, [real] * 4]]  # the states before and after every step
    plain = braintrace.online(turned_complex, "d_rtrl", engine="scan")
    plain.init(params, START, XS[0])
    masked = plain.grad(loss, block_size=9)(params, carry, XS, YS, mask=mask)[0]
    assert_close(net.grad(loss, block_size=9)(params, carry, XS, YS, mask=mask)[0], masked)


def turned_complex(params, state, x):
    """`turned`, with complex numbers, and the new state taken apart twice."""
    a, u = lax.complex(*params["a"]), lax.complex(x @ params["w"], x @ params["g"])
    h = a * lax.complex(*state) + params["decay"] * u
    return (h.real, h.imag), h.real * h.imag


def test_reverse_passes_of_the_user_run_by_the_same_engine():
    net = braintrace.online(step, "d_rtrl", engine="kernel")
    carry = net.init(PARAMS, START, XS[0])

    def total(params):
        return jax.vmap(loss)(net.scan(params, carry, XS)[1], YS).sum()

    program = str(jax.make_jaxpr(jax.grad(total))(PARAMS))
    # The states, q, and what the traces grow by.
    assert program.count("pallas_call[") == 3 * COPIES


def test_kernels_can_be_mapped():
    net = braintrace.online(step, "pp_prop", decay_or_rank=0.9, engine="kernel")
    plain = braintrace.online(step, "pp_prop", decay_or_rank=0.9)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), PARAMS)

    def grads(net):
        one = lambda p: net.grad(loss)(p, net.init(p, START, XS[0]), XS[:4], YS[:4])[0]
        return jax.vmap(one)(stacked)

    assert_close(grads(net), grads(plain))
    assert all(loop.reason is None for loop in net.last_run.loops)
    reason = None if ON_GPU else "the device is a CPU"
    assert all(loop.reason == reason for loop in plain.last_run.loops)


def test_learner_of_a_module_says_which_loops_were_kernels():
    def gradient(engine):
        cell = braintrace.nn.MinGRUCell(I, N)
        learner = braintrace.compile(cell, "d_rtrl", XS[0], batch_size=B, seed=0, engine=engine)
        for i, state in enumerate(cell.states(brainstate.ParamState).values()):
            state.value = jax.tree.map(
                lambda a, i=i: jnp.sin(i + jnp.arange(a.size)).reshape(a.shape), state.value
            )
        grads = learner.etrace_grad(XS, YS, step_fn=lambda x, y: loss(learner(x), y), block_size=3)
        return grads, {loop.reason for loop in learner.last_run.loops}

    (ours, kernels), (plain, scans) = gradient("kernel"), gradient("scan")
    assert_close(ours, plain)
    assert (kernels, scans) == ({None}, {"engine='scan'"})


def test_several_gpus_keep_their_scans_unless_each_runs_its_own(monkeypatch):
    reason = lambda engine: _loops._refusal(engine, "gpu")
    assert reason(Engine.AUTO) is None
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert reason(Engine.AUTO) == "there are several devices, and no shard_map"
    assert reason(Engine.KERNEL) is None
    seen = []
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("samples",))
    spec = jax.sharding.PartitionSpec()
    one = lambda x: seen.append(reason(Engine.AUTO)) or x
    jax.make_jaxpr(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(2))
    assert seen == [None]


def test_an_unknown_engine_is_refused():
    for make in (
        lambda: braintrace.online(step, engine="gpu"),
        lambda: braintrace.compile(braintrace.nn.GRUCell(2, 3), "d_rtrl", XS[0], engine="gpu"),
    ):
        with pytest.raises(ValueError, match=r"'gpu'(.|\n)*'auto', 'scan'"):
            make()
