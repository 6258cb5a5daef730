"""`rolling`: the last inputs again with the weights of now, against a loop that is written out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace import rules

N, B, T, I, K = 3, 2, 11, 2, 4


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def drawn(seed, *shape):
    return jnp.asarray(0.6 * np.random.default_rng(seed).normal(size=shape))


def step(p, state, x):
    h, count = state
    h = jnp.tanh(0.5 * h + x @ p["w"] + h @ p["r"]) + 0.01 * count
    return (h, count + 1), h @ p["out"] / jnp.sqrt((x**2).sum())


PARAMS = {"w": drawn(0, I, N), "r": drawn(1, N, N), "out": drawn(2, N, 1)}
STATE = (drawn(3, B, N), jnp.zeros((), int))
XS, YS = drawn(4, T, B, I), drawn(5, T, B, 1)


def loss(out, y):
    return jnp.mean((out - y) ** 2)


def start(net):
    return net.init(PARAMS, STATE, XS[0])


class Written:
    """The definition: the stored inputs again, from the state that the network had before them."""

    def __init__(self, window):
        self.window, self.past, self.state = window, [], STATE

    def gradient(self, params, xs, ys, mask):
        """The gradient of the losses of a call, and what it stores after that."""
        steps, first = list(self.past), len(self.past)
        for x in xs:
            steps.append((self.state, x))
            self.state, _ = step(params, self.state, x)

        def total(params):
            at, value = steps[0][0], 0.0
            for i, (_, x) in enumerate(steps):
                at, out = step(params, at, x)
                j = i - first
                value += mask[j] * loss(out, ys[j]) if j >= 0 and mask[j] else 0.0
            return value

        self.past = steps[max(0, len(steps) - self.window + 1) :]
        return jax.grad(total)(params)


def written(window, every, mask, rate):
    """Parameters after training, and the sum of the gradients."""
    params, rule, sums = PARAMS, Written(window), jax.tree.map(jnp.zeros_like, PARAMS)
    for a in range(0, T, every):
        update = jax.tree.map(jnp.zeros_like, PARAMS)
        for b in range(a, min(a + every, T), window):
            c = min(b + window, a + every, T)
            more = rule.gradient(params, XS[b:c], YS[b:c], mask[b:c])
            update = jax.tree.map(jnp.add, update, more)
        params = jax.tree.map(lambda p, g: p - rate * g, params, update)
        sums = jax.tree.map(jnp.add, sums, update)
    return params, sums


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


MASK = np.where(np.arange(T) % 5 == 2, 0.0, 1.0)


@pytest.mark.parametrize("every, masked", [(1, False), (3, True), (6, False)])
def test_training_is_the_definition(every, masked):
    mask = MASK if masked else np.ones(T)
    net, sgd = bt.online(step, "rolling", window=K), optax.sgd(0.3)
    train = net.train(loss, sgd, every)
    given = {"mask": mask} if masked else {}
    params, *_ = train(PARAMS, sgd.init(PARAMS), start(net), XS, YS, **given)
    close(params, written(K, every, mask, 0.3)[0])


@pytest.mark.parametrize("block", [K, 2 * K, None])
def test_windows_while_the_weights_are_constant(block):
    net = bt.online(step, rules.rolling(K))
    grads, (carry, losses) = net.grad(loss, block_size=block)(PARAMS, start(net), XS, YS)
    close(grads, written(K, T, np.ones(T), 0.0)[1])
    again, _ = net.grad(loss)(PARAMS, carry, XS, YS)
    plain = bt.online(step, "no_trace")
    close(losses, plain.grad(loss)(PARAMS, start(plain), XS, YS)[1][1])
    assert np.isfinite(np.concatenate([np.ravel(a) for a in jax.tree.leaves(again)])).all()


def test_a_window_over_the_whole_past_is_bptt_and_one_step_is_no_trace():
    def bptt(params):
        _, losses = jax.lax.scan(lambda s, a: _scored(params, s, a), STATE, (XS, YS))
        return losses.sum()

    net = bt.online(step, rules.rolling(T))
    close(net.grad(loss)(PARAMS, start(net), XS, YS)[0], jax.grad(bptt)(PARAMS))
    net, plain = bt.online(step, rules.rolling(1)), bt.online(step, "no_trace", window=1)
    close(*(n.grad(loss)(PARAMS, start(n), XS, YS)[0] for n in (net, plain)))


def _scored(params, state, slices):
    state, out = step(params, state, slices[0])
    return state, loss(out, slices[1])


def test_outputs_are_those_of_the_state_that_goes_on_and_have_the_gradient():
    net = bt.online(step, rules.rolling(K))
    total = lambda p: jax.vmap(loss)(net.scan(p, start(net), XS)[1], YS).sum()
    close(jax.grad(total)(PARAMS), written(K, T, np.ones(T), 0.0)[1])
    carry = start(net)
    for x in XS:
        carry, out = net(PARAMS, carry, x)
    plain = bt.online(step, "no_trace")
    close(out, plain.scan(PARAMS, start(plain), XS)[1][-1])


def test_inputs_have_the_derivative_within_their_step():
    net, plain = (bt.online(step, rule) for rule in (rules.rolling(1), "no_trace"))
    f = lambda net, xs: net.grad(loss)(PARAMS, start(net), xs, YS)[1][1].sum()
    g = lambda net, xs: jax.vmap(loss)(net.scan(PARAMS, start(net), xs)[1], YS).sum()
    with pytest.warns(UserWarning, match="within the step"):
        found = [jax.grad(lambda xs, n=n: g(n, xs))(XS) for n in (net, plain)]
    close(*found)
    assert f(net, XS) == pytest.approx(float(f(plain, XS)))


def test_random_draws_are_the_same_when_steps_are_evaluated_again():
    def noisy(p, state, x):
        h, key = state
        key, own = jax.random.split(key)
        h = jnp.tanh(0.5 * h + x @ p["w"]) * jax.random.bernoulli(own, 0.5, h.shape)
        return (h, key), h

    state, params = (jnp.zeros((B, N)), jax.random.key(0)), {"w": PARAMS["w"]}

    def bptt(params):
        outs = jax.lax.scan(lambda s, x: noisy(params, s, x), state, XS)[1]
        return (outs**3).sum()

    net = bt.online(noisy, rules.rolling(T))
    carry = net.init(params, state, XS[0])
    f = net.grad(lambda out: (out**3).sum(), block_size=3)
    close(f(params, carry, XS)[0], jax.grad(bptt)(params))


def test_certificate_says_how_far_it_goes_back():
    net = bt.online(step, rules.rolling(K))
    carry = start(net)
    reports = net.report.parameters
    assert "exact for those at most 4 steps back" in str(reports["w",])
    assert reports["out",].exact and not reports["w",].exact
    stored = (K - 1) * (XS[0].nbytes + STATE[0].nbytes + 8) + 4
    assert net.memory == sum(a.nbytes for a in jax.tree.leaves(carry.traces)) == stored


def test_a_compiled_module_rolls(tmp_path):
    cell = bt.nn.GRUCell(I, N)
    made = lambda rule, **o: bt.compile(cell, rule, XS[0], batch_size=B, seed=0, **o)
    square = lambda h: (h**2).sum()
    grads = [made(rule, window=T).grad(square)(XS)[0] for rule in ("rolling", "no_trace")]
    for path in grads[0]:
        close(grads[0][path], grads[1][path])
    learner = made("rolling", window=K)
    learner.train(square, optax.sgd(0.1))(XS[:3])
    learner.save(tmp_path / "run")
    seen = jax.tree.map(np.asarray, {k: t.value for k, t in learner.etraces.items()})
    other = made("rolling", window=K)
    other.load(tmp_path / "run")
    close(seen, {k: t.value for k, t in other.etraces.items()})
    assert any(np.asarray(t["count"]) == 3 for t in seen.values())
    with pytest.raises(ValueError, match="rule"):
        made("rolling", window=K + 1).load(tmp_path / "run")


def test_what_rolling_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"rolling\(window=4\) with window=8"):
        bt.online(step, rules.rolling(4), window=8)
    with pytest.raises(ValueError, match=r"rolling\(window=4\) for w in a mixture"):
        bt.online(step, {"w": rules.rolling(4), "*": "d_rtrl"})

    def noisy(p, state, x):
        jax.debug.print("{}", x.sum())
        return step(p, state, x)

    with pytest.raises(bt.NotSupportedError, match="side effects, with rolling"):
        bt.online(noisy, "rolling").init(PARAMS, STATE, XS[0])
