"""What training records: the same as calls of training, one after another, would have left."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import Record

RNG = np.random.default_rng(0)
T, I, N = 22, 2, 3
XS, YS = (jnp.asarray(RNG.normal(size=(T, n))) for n in (I, N))
W = {"w": jnp.asarray(RNG.normal(size=(I, N))), "b": jnp.asarray(RNG.normal(size=N))}
OPTIMIZER = optax.adam(0.05)


def step(p, s, x):
    h = jnp.tanh(0.7 * s["h"] + x @ p["w"] + p["b"])
    return {"h": h, "count": s["count"] + 1}, h


def loss(h, y):
    return jnp.sum((h - y) ** 2)


def begin(net):
    state = {"h": jnp.zeros(N), "count": jnp.zeros((), int)}
    return W, OPTIMIZER.init(W), net.init(W, state, XS[0])


def by_hand(net, update_every, every):
    """Training in calls of one update each: states and traces after each of them."""
    train = net.train(loss, OPTIMIZER, update_every)
    at, seen = begin(net), []
    for start in range(0, T, update_every):
        *at, _ = train(*at, XS[start : start + update_every], YS[start : start + update_every])
        if (start + update_every) % every == 0 and start + update_every <= T:
            seen.append((at[2].state["h"], at[2].traces))
    return at, seen


@pytest.mark.parametrize(("update_every", "every"), [(3, 6), (1, 1), (5, 30)])
def test_records_are_what_updates_have_left(update_every, every):
    net = braintrace.online(step, "d_rtrl")
    (params, *_), seen = by_hand(net, update_every, every)
    record = Record(states=("h", "count"), traces=("w", "b"), every=every, entries=5)
    run = net.train(loss, OPTIMIZER, update_every, record=record)
    new, _, _, losses, found = run(*begin(net), XS, YS)
    np.testing.assert_allclose(new["w"], params["w"], rtol=1e-9)
    assert losses.shape == (T,) and found.length == len(seen) == T // every
    assert found.steps.tolist() == list(range(every, T + 1, every))[: len(seen)]
    if seen:
        np.testing.assert_array_equal(found.states["count",], found.steps)
        np.testing.assert_allclose(found.states["h",], [h for h, _ in seen], rtol=1e-9)
        lengths = [jnp.linalg.norm(jax.tree.leaves(traces)[0]) for _, traces in seen]
        shapes = [a.shape for a in jax.tree.leaves(seen[0][1])]
        assert found.traces["w",].entries.shape == (len(seen), 5) and len(shapes) == 2
        of = "b" if shapes[0] == (N, 1) else "w"
        np.testing.assert_allclose(found.traces[of,].norm, lengths, rtol=1e-9)


@pytest.mark.parametrize("every", [1, 3])
def test_states_within_updates_are_the_outputs_of_these_steps(every):
    net = braintrace.online(step, "d_rtrl")
    with_aux = lambda h, y: (loss(h, y), h)
    record = Record(states=("h",), every=every)
    run = net.train(with_aux, OPTIMIZER, 6, has_aux=True, block_size=2, record=record)
    *_, outputs, found = run(*begin(net), XS, YS)
    np.testing.assert_array_equal(found.states["h",], outputs[every - 1 :: every])
    inside = jax.jit(lambda *at: run(*at, XS, YS)[-1].states["h",])(*begin(net))
    np.testing.assert_allclose(inside, found.states["h",], rtol=1e-9)


def test_records_go_on_between_the_loops_that_report():
    net, told = braintrace.online(step, "d_rtrl"), []
    xs, ys = (jnp.tile(a, (30, 1)) for a in (XS, YS))  # 660 updates, in three loops
    record = Record(states=("count",), every=100)
    how = {"on_update": lambda i, m: told.append(i), "record": record}
    *_, found = net.train(loss, OPTIMIZER, **how)(*begin(net), xs, ys)
    assert told == list(range(1, 661))
    assert found.states["count",].tolist() == found.steps.tolist() == [100 * k for k in range(1, 7)]


def test_windows_record_every_step():
    net = braintrace.online(step, "d_rtrl", window=3)
    run = net.train(lambda h, y: (loss(h, y), h), OPTIMIZER, 6, has_aux=True,
                    record=Record(states=("h",), every=2))  # fmt: skip
    *_, outputs, found = run(*begin(net), XS, YS)
    np.testing.assert_array_equal(found.states["h",], outputs[1::2])


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = braintrace.nn.Linear(I, N)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(N if batch_size is None else (batch_size, N)))

    def update(self, x):
        self.h.value = jnp.tanh(0.7 * self.h.value + self.layer(x))
        return self.h.value


def test_a_learner_of_modules_records_the_same():
    def learner():
        brainstate.random.seed(0)
        made = braintrace.compile(Net(), "d_rtrl", jnp.zeros((2, I)), batch_size=2)
        return made, lambda x, y: jnp.sum((made(x) - y) ** 2)

    xs, ys = (jnp.stack([a, -a], 1) for a in (XS, YS))
    optimizer, seen = optax.adam(0.05), []
    one, of_one = learner()
    for k in range(0, T, 2):
        how = {"step_fn": of_one, "optimizer": optimizer, "update_every": 2}
        one.etrace_train(xs[k : k + 2], ys[k : k + 2], **how)
        (trace,) = one.get_etrace_of(("layer", "weight")).values()
        both = jax.tree.leaves(trace)
        seen.append((one.model4compile.h.value, jnp.sqrt(sum(jnp.sum(a**2) for a in both))))
    many, of_many = learner()
    record = Record(states=("h",), traces=("layer.weight",), every=4, entries=3)
    how = {"step_fn": of_many, "optimizer": optimizer, "update_every": 2}
    losses, found = many.etrace_train(xs, ys, record=record, **how)
    assert losses.shape == (T,) and found.length == 5
    np.testing.assert_allclose(found.states["h",], [h for h, _ in seen[1::2]], rtol=1e-9)
    trace = found.traces["layer", "weight"]
    np.testing.assert_allclose(trace.norm, [n for _, n in seen[1::2]], rtol=1e-9)
    assert trace.entries.shape == (5, 3) and len(trace.labels) == 3
    assert all("[0, " in label for label in trace.labels)  # of the first sample


REFUSED = {
    "no record": ("states", TypeError, "record has type str"),
    "no multiple": (Record(states=("h",), every=3), ValueError, "every=3 with update_every=2"),
    "traces within": (Record(traces=("w",), every=1), ValueError, "traces every 1 steps"),
    "another state": (Record(states=("g",)), ValueError, "no state 'g'"),
    "another weight": (Record(traces=("v",), every=2), ValueError, "trace 'v'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name):
    record, kind, text = REFUSED[name]
    net = braintrace.online(step, "d_rtrl")
    with pytest.raises(kind, match=text) as refusal:
        net.train(loss, OPTIMIZER, 2, record=record)(*begin(net), XS, YS)
    assert "why:" in str(refusal.value) and "do:" in str(refusal.value)


def test_a_learner_of_nnx_modules_records_too():
    nnx = pytest.importorskip("flax.nnx")

    class Cell(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(I, N, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            self.h = nnx.Variable(jnp.zeros(N))

        def __call__(self, x):
            self.h[...] = jnp.tanh(0.7 * self.h[...] + self.layer(x))
            return self.h[...]

    cell = Cell()
    learner = braintrace.compile(cell, "d_rtrl", XS[0])
    optimizer = nnx.Optimizer(cell, optax.sgd(0.05), wrt=nnx.Param)
    record = Record(states=("h",), traces=("layer.kernel",), every=T // 2)
    losses, found = learner.train(loss, optimizer, 1, record=record)(XS, YS)
    assert losses.shape == (T,) and found.length == 2
    (states,) = found.states.values()
    np.testing.assert_array_equal(states[-1], cell.h[...])
