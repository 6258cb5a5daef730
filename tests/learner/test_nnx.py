"""Modules of nnx that keep their states as variables learn online."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import braintrace as bt
from braintrace._errors import dotted
from interpret import interpreted

T, B, I, N = 8, 2, 3, 4
FLOAT = {"param_dtype": jnp.float64}
XS = np.random.default_rng(0).normal(size=(T, B, I))


class Memory(nnx.Variable):
    """What goes from step to step."""


class Net(nnx.Module):
    """A leaky recurrent layer, dropout on its way to a read-out, and what nobody learns through."""

    def __init__(self, rngs, rate=0.3):
        self.up = nnx.Linear(I, N, rngs=rngs, **FLOAT)
        self.back = nnx.Linear(N, N, use_bias=False, rngs=rngs, **FLOAT)
        self.out = nnx.Linear(N, 2, rngs=rngs, **FLOAT)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.v = Memory(jnp.zeros((B, N)))
        self.last = Memory(jnp.zeros((B, 2)))  # written, never read
        self.leak = nnx.Variable(jnp.full(N, 0.7))  # read, never written
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        v = self.v[...]
        self.v[...] = jnp.tanh(self.leak[...] * v + self.up(x) + self.back(v))
        self.steps[...] += 1
        self.last[...] = self.out(self.drop(self.v[...]))
        return self.last[...]


def loss(out):
    return jnp.sum((out - 0.5) ** 2)


def bptt(net, xs):
    """The gradient of the summed losses, by a scan over the module's own call."""
    structure, params, rest = nnx.split(net, nnx.Param, ...)

    def total(params):
        def body(rest, x):
            module = nnx.merge(structure, params, rest)
            out = module(x)
            return nnx.state(module, nnx.Not(nnx.Param)), loss(out)

        return lax.scan(body, rest, xs)[1].sum()

    return interpreted(lambda: jax.grad(total)(params), lower=False)


def close(got, want):
    leaf = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        leaf(a, b)


def test_gradients_of_a_sequence_are_those_of_the_module():
    net, xs = Net(nnx.Rngs(0)), jnp.asarray(XS)
    want = bptt(net, xs)
    learner = bt.compile(net, "rtrl", xs[0], strict=True)
    gradient = learner.grad(loss, block_size=3)
    grads, losses = gradient(xs)
    close(grads, want)
    assert losses.shape == (T,) and int(net.steps[...]) == T
    # The step before gave random keys to all masks; now the state and the count start again.
    assert net.v[...].any() and int(net.drop.rngs.count[...]) == T
    learner.reset()
    assert not net.v[...].any() and int(net.steps[...]) == 0
    assert int(net.drop.rngs.count[...]) == T
    again, _ = gradient(xs)
    assert np.abs(again.up.kernel[...] - grads.up.kernel[...]).max() > 1e-3  # other masks
    learner.reset()
    assert not net.v[...].any()


def test_what_d_rtrl_does_with_it():
    net, xs = Net(nnx.Rngs(0), rate=0.0), jnp.asarray(XS)
    want = bptt(net, xs)
    learner = bt.compile(net, "d_rtrl", jax.ShapeDtypeStruct((B, I), float))
    grads, _ = learner.grad(loss, block_size=3)(xs)
    report = learner.report.parameters
    assert {dotted(k): p.how for k, p in report.items()} == {
        "back.kernel": "trace",
        "out.bias": "within-step",
        "out.kernel": "within-step",
        "up.bias": "trace",
        "up.kernel": "trace",
    }
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(want), report.values(), strict=True)
    for a, b, p in pairs:
        assert p.exact != (np.abs(a - b).max() > 1e-9)
    assert learner.memory == 8 * B * (I * N + N + N * N)
    assert "d_rtrl of Net" in repr(learner)


def test_steps_and_sequences_write_to_the_module():
    net, twin, xs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0)), jnp.asarray(XS)
    learner = bt.compile(net, "d_rtrl", xs[0])
    np.testing.assert_allclose(learner(xs[0]), twin(xs[0]), rtol=1e-12)
    rest = jnp.stack([twin(x) for x in xs[1:]])
    np.testing.assert_allclose(learner.scan(xs[1:]), rest, rtol=1e-12)
    close(nnx.state(net, Memory), nnx.state(twin, Memory))
    net.eval()  # another structure: no dropout, and the traces go on
    assert learner.report.parameters and learner.memory
    np.testing.assert_allclose(learner(xs[0]), (twin.eval(), twin(xs[0]))[1], rtol=1e-12)
    before, carry = learner.online, learner.carry
    grads, losses = learner.grad(loss)(xs)
    learner.carry = carry  # back to where it was, traces and all
    again, same = learner.grad(loss)(xs)
    close((again, same), (grads, losses))
    learner.forget_past()
    assert learner.online is before and net.v[...].any()


def test_gradients_and_training_with_the_optimizer_of_nnx():
    xs, ys = jnp.asarray(XS), jnp.asarray(XS[..., :2])
    target = lambda out, y: jnp.mean((out - y) ** 2)

    def once(train):
        net = Net(nnx.Rngs(0), rate=0.0)
        optimizer = nnx.Optimizer(net, optax.adam(0.05), wrt=nnx.Param)
        learner = bt.compile(net, "d_rtrl", xs[0])
        losses = train(learner, net, optimizer)
        return losses, nnx.state(net, nnx.Param), nnx.state(optimizer)

    def by_hand(learner, net, optimizer):
        gradient, found = learner.grad(target), []
        for t in range(0, T, 2):
            grads, losses = gradient(xs[t : t + 2], ys[t : t + 2])
            optimizer.update(net, grads)
            found.append(losses)
        return jnp.concatenate(found)

    def trained(learner, net, optimizer):
        return learner.train(target, optimizer, update_every=2)(xs, ys)

    for a, b in zip(once(by_hand), once(trained), strict=True):
        close(a, b)


def test_a_module_that_shares_its_weights():
    class Twice(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(N, N, rngs=nnx.Rngs(0), **FLOAT)
            self.b = self.a
            self.h = Memory(jnp.zeros((B, N)))

        def __call__(self, x):
            self.h[...] = 0.5 * self.h[...] + jnp.tanh(self.a(x) + self.b(2 * x))
            return self.h[...]

    net, xs = Twice(), jnp.asarray(np.random.default_rng(1).normal(size=(T, B, N)))
    want = bptt(net, xs)
    learner = bt.compile(net, "d_rtrl", xs[0], strict=True)
    close(learner.grad(loss, block_size=3)(xs)[0], want)


class Wrong(nnx.Module):
    def __init__(self, call):
        self.w = nnx.Param(jnp.ones((I, N)))
        self.v = Memory(jnp.zeros((B, N)))
        self._call = call

    def __call__(self, x):
        return self._call(self, x)


def writes_a_parameter(net, x):
    net.w[...] = net.w[...] + 1
    return x


def adds_a_variable(net, x):
    net.new = Memory(x)
    return x


def counts(net, x):
    net.count = getattr(net, "count", 0) + 1
    return x


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net, x: x @ net.w[...], "reads and writes no floating variable"),
        (writes_a_parameter, "writes the parameter w"),
        (adds_a_variable, "changes its structure"),
        (counts, "changes its structure"),
    ],
)
def test_a_module_that_is_no_network(call, says):
    with pytest.raises(bt.CompilationError, match=says):
        bt.compile(Wrong(call), "d_rtrl", jnp.ones((B, I)))


def test_calls_that_make_no_sense():
    x = jnp.ones((B, I))
    with pytest.raises(TypeError, match=r"(?s)GRUCell.*braintrace\.online"):
        bt.compile(nnx.GRUCell(I, N, rngs=nnx.Rngs(0)), "d_rtrl", x)
    with pytest.raises(bt.NotSupportedError, match="batch_size, vmap"):
        bt.compile(Net(nnx.Rngs(0)), "d_rtrl", x, batch_size=B, vmap=True)
    with pytest.raises(TypeError, match="D_RTRL is not a rule"):
        bt.compile(Net(nnx.Rngs(0)), bt.D_RTRL, x)
    with pytest.raises(bt.CompilationError, match="strict=True"):
        bt.compile(Net(nnx.Rngs(0)), "d_rtrl", x, strict=True)
    learner = bt.compile(Net(nnx.Rngs(0)), "d_rtrl", x)
    with pytest.raises(TypeError, match=r"nnx\.Optimizer\(module"):
        learner.train(loss, optax.adam(0.1))
    with pytest.raises(TypeError, match="transformation"):
        jax.jit(learner)(x)


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    xs = jnp.asarray(XS)

    def made(seed, rule="d_rtrl"):
        net = Net(nnx.Rngs(seed))
        optimizer = nnx.Optimizer(net, optax.adam(0.05), wrt=nnx.Param)
        learner = bt.compile(net, rule, xs[0])
        return learner, optimizer, learner.train(loss, optimizer, update_every=2)

    learner, optimizer, train = made(0)
    train(xs)
    learner.save(tmp_path / "a", optimizer=optimizer, step=T, extra={"name": "net"})
    want = train(xs), nnx.state(learner.module), nnx.state(optimizer), learner.carry

    again, optimizer, train = made(1)
    saved = again.load(tmp_path / "a", optimizer=optimizer)
    assert saved.step == T and saved.extra == {"name": "net"} and saved.optimizer is optimizer
    got = train(xs), nnx.state(again.module), nnx.state(optimizer), again.carry
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype and np.array_equal(a, b)

    before = jax.tree.leaves(nnx.state(again.module, nnx.Param))
    for options, said in (
        ({}, "holds an optimizer."),
        (
            {"optimizer": nnx.Optimizer(again.module, optax.sgd(0.1), wrt=nnx.Param)},
            "only in the file",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            again.load(tmp_path / "a", **options)
    with pytest.raises(ValueError, match=r"'d_rtrl'.*'rtrl'"):
        made(0, "rtrl")[0].load(tmp_path / "a", optimizer=False)
    with pytest.raises(TypeError, match="GradientTransformation"):
        again.save(tmp_path / "b", optimizer=optax.adam(0.1))
    assert all(
        a is b
        for a, b in zip(before, jax.tree.leaves(nnx.state(again.module, nnx.Param)), strict=True)
    )
    assert again.load(tmp_path / "a", optimizer=False).optimizer is None
