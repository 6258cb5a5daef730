"""The gradient of one call and of many: a sum of online gradients, in any loop."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

from .reference import (
    XS,
    assert_alive,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    recurrent,
    squares,
)


@pytest.mark.parametrize("make", [leaky, recurrent])
@pytest.mark.parametrize("way", ["scan", "for_loop", "python", "etrace_grad"])
def test_gradient_over_many_calls_is_the_sum_of_online_gradients(make, way):
    want = online(learner_of(make(), XS[0]), XS)
    algo = learner_of(make(), XS[0])

    def through_scan():
        def body(total, x):
            return total + squares(algo(x)), None

        return brainstate.transform.scan(body, jnp.zeros(()), XS)[0]

    losses = {
        "scan": through_scan,
        "for_loop": lambda: brainstate.transform.for_loop(lambda x: squares(algo(x)), XS).sum(),
        "python": lambda: sum(squares(algo(x)) for x in XS),
    }
    if way == "etrace_grad":
        got = algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), reduction="sum")
    else:
        got = brainstate.transform.grad(losses[way], algo.param_states)()
    assert_alive(got)
    assert_close(got, want)


def test_gradient_equals_bptt_for_an_elementwise_recurrence_and_not_for_a_recurrent_weight():
    assert_close(online(learner_of(leaky(), XS[0]), XS), bptt(leaky(), XS))
    got, whole = online(learner_of(recurrent(), XS[0]), XS), bptt(recurrent(), XS)
    assert np.abs(got[("w",)] - whole[("w",)]).max() > 1e-3


def test_readout_is_trained_with_its_exact_gradient():
    algo = learner_of(recurrent(), XS[0])
    got = online(algo, XS)
    assert_close(got[("v",)], bptt(recurrent(), XS)[("v",)])


def test_two_calls_in_one_loss_count_both():
    algo, other = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    got = brainstate.transform.grad(
        lambda: squares(algo(XS[0])) + squares(algo(XS[1])), algo.param_states
    )()
    assert_close(got, online(other, XS[:2]))


def test_loss_that_reads_a_stored_state_after_the_call():
    algo, other = learner_of(leaky(), XS[0]), leaky()

    def loss(x):
        algo(x)
        return squares(algo.model4compile.h.value)

    step = brainstate.transform.grad(loss, algo.param_states)
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])

    def read(out):
        return squares(other.h.value)

    assert_close(got, bptt(other, XS, read))


def test_encoder_outside_the_model_gets_its_gradient_within_the_step():
    encoder = brainstate.ParamState(normal(8, 4, 2))
    raw = normal(9, 5, 4)
    algo = learner_of(leaky(), XS[0])
    states = {("encoder",): encoder, **algo.param_states}
    step = brainstate.transform.grad(lambda x: squares(algo(x @ encoder.value)), states)
    for x in raw:
        h = algo.model4compile.h.value
        got = step(x)[("encoder",)]

        def loss(e, h=h, x=x):
            m = algo.model4compile
            h = 0.9 * jnp.tanh(h) + (x @ e) @ m.w.value + m.b.value
            return squares(h @ m.v.value)

        assert_close(got, jax.grad(loss)(encoder.value))


def test_gradient_by_input_is_the_one_within_the_step():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    m, h = algo.model4compile, algo.model4compile.h.value

    def loss(x):
        return squares((0.9 * jnp.tanh(h) + x @ m.w.value + m.b.value) @ m.v.value)

    got = brainstate.transform.grad(lambda x: squares(algo(x)), argnums=0)(XS[1])
    assert_close(got, jax.grad(loss)(XS[1]))


def test_learning_loop_reduces_the_loss_of_a_memory_task():
    # Say at the last step what came at the first one.
    brainstate.random.seed(0)

    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = braintrace.nn.GRUCell(1, 12)
            self.out = braintrace.nn.Linear(12, 1)

        def update(self, x):
            return self.out(self.cell(x))

    rng = np.random.default_rng(0)
    first = jnp.asarray(rng.choice([-1.0, 1.0], size=(16, 1)))
    xs = jnp.concatenate([first[None], jnp.zeros((4, 16, 1))])
    mask = jnp.asarray([0, 0, 0, 0, 1.0])
    algo = braintrace.compile(Net(), "d_rtrl", xs[0], batch_size=16)
    params = algo.param_states
    optimizer = optax.adam(0.03)
    memory = optimizer.init({k: s.value for k, s in params.items()})

    @brainstate.transform.jit
    def train(memory):
        algo.reset()
        grads, loss = algo.etrace_grad(
            xs,
            step_fn=lambda x: ((algo(x) - first) ** 2).mean(),
            mask=mask,
            return_value=True,
            loss_output="scalar",
        )
        change, memory = optimizer.update(grads, memory)
        for k, s in params.items():
            s.value = optax.apply_updates(s.value, change[k])
        return memory, loss

    losses = []
    for _ in range(60):
        memory, loss = train(memory)
        losses.append(float(loss))
    assert losses[0] > 0.5
    assert losses[-1] < 0.05
