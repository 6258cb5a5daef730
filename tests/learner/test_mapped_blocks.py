"""A learner mapped over samples runs in blocks, with the numbers of single calls."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt

B, T = 3, 7
RULES = {
    "d_rtrl": {},
    "pp_prop": {"decay_or_rank": 0.8},
    "rtrl": {},
    "uoro": {"vjp_method": "single-step"},
    "kf_rtrl": {},
    "snap": {"n": 2},
    "no_trace": {},
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
        self.w = brainstate.ParamState(0.5 * draw(0, 2, 4))
        self.r = brainstate.ParamState(0.4 * draw(1, 4, 4))
        self.out = brainstate.ParamState(draw(2, 4))
        self.calls = None

    def init_state(self, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(4))
        self.count = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        self.count.value = self.count.value + 1
        self.h.value = jnp.tanh(
            0.7 * self.h.value + bt.matmul(x, self.w.value) + bt.matmul(self.h.value, self.r.value)
        )
        return self.h.value @ self.out.value


def sequence(seed=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(T, B, 2))), jnp.asarray(rng.normal(size=(T, B)))


def make(rule, **options):
    inputs = jnp.zeros((B, 2))
    return bt.compile(
        Net(), rule, inputs, batch_size=B, vmap=True, **RULES.get(rule, {}), **options
    )


def single_calls(learner, step, arrays, mask=None):
    """The sum of the gradients of calls one by one, in the user's own loop."""
    weights = learner.param_states
    grad = brainstate.transform.grad(lambda m, *s: m * step(*s), weights, check_states=False)
    total = jax.tree.map(jnp.zeros_like, {k: s.value for k, s in weights.items()})
    for t in range(T):
        m = 1.0 if mask is None else mask[t]
        total = jax.tree.map(jnp.add, total, grad(m, *(a[t] for a in arrays)))
    return total


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, want)


def left(learner):
    states = {k: s.value for k, s in learner.states().items()}
    return jax.tree.leaves(states)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_blocks_are_those_of_single_calls(rule, size):
    learner, other, (xs, ys) = make(rule), make(rule), sequence()
    step = lambda net: lambda x, y: jnp.sum((net(x) - y) ** 2)
    for _ in range(2):  # the second time from traces that are not zero
        got = learner.etrace_grad(xs, ys, step_fn=step(learner), reduction="sum", block_size=size)
        same(got, single_calls(other, step(other), (xs, ys)))
    alone = learner.module.rule.one_by_one
    assert learner.last_run.in_blocks != alone
    same(left(learner), left(other))


def test_a_mask_counts_some_steps():
    learner, other, (xs, ys) = make("d_rtrl"), make("d_rtrl"), sequence()
    mask = jnp.asarray([1.0, 0, 2, 0, 0, 1, 0])
    step = lambda net: lambda x, y: jnp.sum((net(x) - y) ** 2)
    got = learner.etrace_grad(xs, ys, step_fn=step(learner), reduction="sum", mask=mask)
    same(got, single_calls(other, step(other), (xs, ys), mask))


def test_what_the_rule_takes_is_mapped_too():
    learner, other, (xs, ys) = make("three_factor"), make("three_factor"), sequence()
    step = lambda net: lambda x, y: jnp.sum(net(x, modulator=y))
    got = learner.etrace_grad(xs, ys, step_fn=step(learner), reduction="sum")
    assert learner.last_run.in_blocks
    same(got, single_calls(other, step(other), (xs, ys)))


@pytest.mark.parametrize("every", [3, 1])
def test_weights_learn_while_the_sequence_runs(every):
    learner, other, (xs, ys) = make("d_rtrl"), make("d_rtrl"), sequence()
    step = lambda net: lambda x, y: jnp.sum((net(x) - y) ** 2)
    losses = learner.etrace_train(
        xs,
        ys,
        step_fn=step(learner),
        optimizer=optax.sgd(0.01),
        update_every=every,
        reduction="sum",
    )
    assert learner.last_run.in_blocks and losses.shape == (T,)
    weights = other.param_states
    grad = brainstate.transform.grad(step(other), weights, check_states=False)
    for start in range(0, T, every):
        total = jax.tree.map(jnp.zeros_like, {k: s.value for k, s in weights.items()})
        for t in range(start, min(start + every, T)):
            total = jax.tree.map(jnp.add, total, grad(xs[t], ys[t]))
        for k, s in weights.items():
            s.value = s.value - 0.01 * total[k]
    same(left(learner), left(other))


def test_evolving_runs_in_blocks():
    learner, other, (xs, _) = make("d_rtrl"), make("d_rtrl"), sequence()
    got = learner.etrace_evolve(xs, return_outputs=True)
    same(got, jnp.stack([other(x) for x in xs]))
    same(left(learner), left(other))
