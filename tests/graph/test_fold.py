"""Weights with a factor that varies: the operator and the factor are one operator."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO

import braintrace as bt
from braintrace import element_wise, matmul, sparse_matmul
from braintrace.ops import Rules
from gradients import bptt_grad, online_grad
from oracle import reference_grad

T, I, O, E = 5, 3, 4, 2
DENSE = np.arange(12.0).reshape(I, O) % 3
SPARSE = BCOO((DENSE[DENSE != 0], np.argwhere(DENSE)), shape=DENSE.shape)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


class Net(brainstate.nn.Module):
    """`h = step(x, h, parameters, key)`; the key is a state that no trace follows."""

    def __init__(self, step, batch, **shapes):
        super().__init__()
        self.step = step
        self.p = {k: brainstate.ParamState(0.5 * draw(*s)) for k, s in shapes.items()}
        self.batch = batch
        self.init_state()

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(0.3 * draw(*self.batch, O))
        self.key = brainstate.ShortTermState(jax.random.PRNGKey(0))

    def update(self, x):
        self.key.value, key = jax.random.split(self.key.value)
        weights = {k: s.value for k, s in self.p.items()}
        self.h.value = self.step(x, self.h.value, weights, key)
        return self.h.value


def loss(net, x, target):
    return ((net(x) - target) ** 2).sum()


def sequences(*batch):
    return 2 * draw(T, *batch, I), draw(T, *batch, O)


def assert_near(found, truth, most=1e-9):
    for path, value in truth.items():
        size = float(jnp.abs(value).max())
        assert size > 1e-3  # alive
        np.testing.assert_allclose(found[path], value, atol=most * size, rtol=0, err_msg=str(path))


def dropout(x, h, p, key):
    on = jax.random.bernoulli(key, 0.7, (I, O))
    return 0.8 * h + jnp.tanh(matmul(x, jnp.where(on, p["w"] / 0.7, 0.0)))


def input_gain(x, h, p, key):
    gain = jnp.tanh(x.reshape(-1, I).sum(0))[:, None]
    return 0.8 * h + matmul(x, jax.nn.softplus(p["w"]) * gain, p["b"] * gain[0])


def expert(x, h, p, key):
    return jnp.tanh(0.8 * h + matmul(x, p["w"][(x.sum() > 0).astype(int)]))


def expert_of_state(x, h, p, key):
    return jnp.tanh(0.8 * h + matmul(x, p["w"][(h.sum() > 0).astype(int)]))


def expert_per_sample(x, h, p, key):
    one = lambda x, i: matmul(x, p["w"][i])
    return jnp.tanh(0.8 * h + jax.vmap(one)(x, (x.sum(-1) > 0).astype(int)))


def mixture(x, h, p, key):
    w = jnp.einsum("e,eio->io", jax.nn.softmax(x.reshape(-1, I)[0, :E]), p["w"])
    return 0.8 * h + matmul(x, w)


def decay(x, h, p, key):
    return h * element_wise(0.5 * jnp.tanh(p["w"] * x.mean()))


def two_weights(x, h, p, key):
    return 0.8 * h + matmul(x, p["w"] * x.mean() + jnp.sin(p["v"].T * x.sum()))


def synapses(x, h, p, key):
    on = jax.random.bernoulli(key, 0.7, p["w"].shape)
    return 0.8 * h + sparse_matmul(x, p["w"] * on, sparse_mat=SPARSE)


scaled = bt.register_primitive("scaled", lambda x, w, s: jnp.tanh(x @ w) * s)


def further_operand(x, h, p, key):
    return 0.8 * h + scaled.bind(x, p["w"], x.sum(-1, keepdims=True))


def branch(x, h, p, key):
    drive = lambda: matmul(x, p["w"] * x.mean())
    return 0.8 * h + lax.cond(x.sum() > 0, drive, lambda: jnp.zeros(h.shape))


def loop(x, h, p, key):
    turn = lambda h, gain: (jnp.tanh(0.8 * h + matmul(x, p["w"] * gain)), None)
    return lax.scan(turn, h, jnp.array([0.5, 1.0]) * x.sum())[0]


W, TABLE = {"w": (I, O)}, {"w": (E, I, O)}
EXACT = {
    "dropout": (dropout, (2,), W, (2, I, O, 1)),
    "dropout_alone": (dropout, (), W, (I, O, 1)),
    "input_gain": (input_gain, (2,), {**W, "b": (O,)}, (2, I, O, 1)),
    "expert": (expert, (2,), TABLE, (2, E, I, O, 1)),
    "expert_of_state": (expert_of_state, (1,), TABLE, (1, E, I, O, 1)),
    "expert_per_sample": (expert_per_sample, (2,), TABLE, (2, E, I, O, 1)),
    "mixture": (mixture, (2,), TABLE, (2, E, I, O, 1)),
    "decay": (decay, (), {"w": (O,)}, (O, 1)),
    "two_weights": (two_weights, (2,), {**W, "v": (O, I)}, (2, I, O, 1)),
    "synapses": (synapses, (2,), {"w": (8,)}, (2, 8, 1)),
    "further_operand": (further_operand, (2,), W, (2, I, O, 1)),
    "branch": (branch, (2,), W, (2, I, O, 1)),
    "loop": (loop, (2,), W, (2, I, O, 1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_factor_that_no_state_enters_is_exact(name):
    step, batch, shapes, stored = EXACT[name]
    model = Net(step, batch, **shapes)
    xs, targets = sequences(*batch)
    learner = bt.compile(model, "d_rtrl", xs[0], strict=True)
    assert learner.report.parameters["p", "w"].trace_shapes == (stored,)
    truth = bptt_grad(model, loss, xs, targets)
    assert_near(online_grad(learner, loss, xs, targets), truth)
    assert_near(online_grad(learner, loss, xs, targets, block_size=1), truth)


@pytest.mark.parametrize("mapped", [False, True])
def test_masked_losses_and_mapped_learners_follow_the_factor(mapped):
    xs, targets = sequences(2)
    mask = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0])
    counted = lambda net, x, t, m: m * loss(net, x, t)
    if mapped:  # sample by sample
        model = Net(expert, (), **TABLE)
        each = [bptt_grad(model, counted, xs[:, i], targets[:, i], mask) for i in range(2)]
        truth = jax.tree.map(jnp.add, *each)
        learner = bt.compile(model, "d_rtrl", xs[0], batch_size=2, vmap=True, strict=True)
    else:
        model = Net(expert_per_sample, (2,), **TABLE)
        truth = bptt_grad(model, counted, xs, targets, mask)
        learner = bt.compile(model, "d_rtrl", xs[0], strict=True)
    step = lambda x, t: loss(learner, x, t)
    assert_near(learner.etrace_grad(xs, targets, step_fn=step, mask=mask, reduction="sum"), truth)


def recurrent(x, h, p, key):
    back = matmul(h, p["r"] * jax.random.bernoulli(key, 0.7, (O, O)))
    return jnp.tanh(0.5 * h + 0.5 * back + matmul(x, p["w"] * x.mean()))


@pytest.mark.parametrize(
    "rule, options, how",
    [
        ("d_rtrl", {}, "trace"),
        ("snap", {"n": 2}, "trace"),
        ("pp_prop", {"decay_or_rank": 0.9}, "within-step"),
    ],
)
def test_recurrent_weight_with_a_factor_is_the_rule(rule, options, how):
    xs, targets = sequences(2)
    steady = lambda x, h, p, key: recurrent(x, h, p, key) + 0.1 * matmul(x, p["u"])
    model = Net(steady, (2,), w=(I, O), r=(O, O), u=(I, O))
    learner = bt.compile(model, rule, xs[0], **options)
    report = learner.report.parameters
    assert report["p", "w"].how == report["p", "r"].how == how and report["p", "u"].how == "trace"
    if how != "trace":
        assert "changes within a sequence" in str(report["p", "w"])
    truth = reference_grad(rule, model, loss, xs, targets, **options)
    assert_near(online_grad(learner, loss, xs, targets), truth)


def test_gain_with_a_weight_of_its_own_leaves_that_one_within_the_step():
    def step(x, h, p, key):
        return 0.8 * h + matmul(x, p["w"] * jax.nn.sigmoid(x @ p["v"])[:, None])

    xs, targets = sequences()
    model = Net(step, (), w=(I, O), v=(I, I))
    learner = bt.compile(model, "d_rtrl", xs[0])
    report = learner.report.parameters
    assert report["p", "w"].exact and report["p", "v"].how == "within-step"
    assert "p.v -> h by plain computation" in str(report["p", "v"])
    found, truth = online_grad(learner, loss, xs, targets), bptt_grad(model, loss, xs, targets)
    assert_near(found, {("p", "w"): truth["p", "w"]})
    assert_near(found, reference_grad("d_rtrl", model, loss, xs, targets))


@pytest.mark.parametrize(
    "drive",
    [
        lambda x, h, p: matmul(x, p["w"] * jnp.tanh(h)),  # a state enters
        lambda x, h, p: matmul(x, jnp.roll(p["w"], (x.sum() > 0).astype(int), 1)),  # any column
        lambda x, h, p: bt.lora_matmul(x, p["w"] * x.mean(), p["r"]),  # any row of the product
    ],
)
def test_other_varying_operands_stay_within_the_step(drive):
    step = lambda x, h, p, key: 0.8 * h + drive(x, h, p) + matmul(x, p["u"])
    xs, _ = sequences()
    learner = bt.compile(Net(step, (), w=(I, O), u=(I, O), r=(O, O)), "d_rtrl", xs[0])
    report = learner.report.parameters["p", "w"]
    assert report.how == "within-step" and not report.exact


def test_a_relation_is_called_by_its_weight_beside_a_steady_bias():
    step = lambda x, h, p, key: 0.8 * h + matmul(x, p["w"] * x.mean(), p["b"])
    graph = bt.compile_etrace_graph(Net(step, (), w=(I, O), b=(O,)), sequences()[0][0])
    (relation,) = graph.hidden_param_op_relations
    assert relation.weight_path == ("p", "w") and len(relation.trainable_paths) == 2


@pytest.mark.parametrize("name", ["dropout", "input_gain", "expert", "mixture"])
def test_chained_features_are_the_derived_ones(name):
    step, batch, shapes, _ = EXACT[name]
    model = Net(step, batch, **shapes)
    graph = bt.compile(model, "d_rtrl", sequences(*batch)[0][0]).graph
    (relation,) = graph.hidden_param_op_relations
    operator, primitive = relation.operator, relation.primitive
    assert primitive.rules.features is not None
    numbers = lambda s: draw(*s.shape).astype(s.dtype)
    given, weights = jax.tree.map(numbers, (operator.record, operator.shapes))
    chained = operator.features(given, weights)
    primitive.rules = Rules()
    for key, value in operator.features(given, weights).items():
        full = jnp.broadcast_to(chained[key], value.shape)
        np.testing.assert_allclose(full, value, atol=1e-12)
