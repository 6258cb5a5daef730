"""Transformations of optax are the same ones in C."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import build, difference, run
from networks import NETWORKS, loss, stream

import braintrace

STEPS = 20
RATE = 1e-2
PLAIN = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars
    lion nadam nadamw novograd optimistic_gradient_descent radam rmsprop sgd sign_sgd sm3 yogi
    """.split()
OPTIMIZERS = {
    **{name: getattr(optax, name)(RATE) for name in PLAIN},
    "noisy_sgd": optax.noisy_sgd(RATE, key=0),
    "a schedule": optax.adam(optax.cosine_decay_schedule(RATE, 100)),
    "clipped by units": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
    "several steps": optax.MultiSteps(optax.adam(RATE), 3),
    "if finite": optax.apply_if_finite(optax.adam(RATE), 3),
    "muon": optax.contrib.muon(RATE),
    "schedule_free": optax.contrib.schedule_free_sgd(RATE),
}


def errors(step, params, state, xs, ys, optimizer, path):
    net = braintrace.online(step, "d_rtrl")
    carry = net.init(params, state, xs[0])
    how = dict(loss=loss, optimizer=optimizer, path=path)
    done = net.export_c(params, carry, xs[0], ys[0], **how)
    found = run(done, build(done), {"x": xs, "target": ys})
    train = net.train(loss, optimizer)
    *_, losses = train(params, optimizer.init(params), carry, xs, ys)
    return difference(found.losses, losses)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_transformation_in_c_is_that_of_train(name, tmp_path):
    network, data = NETWORKS["mingru"](np.float64), stream(np.float64, "mingru", STEPS)
    assert errors(*network, *data, OPTIMIZERS[name], tmp_path) < 1e-12


def test_old_values_are_read_before_new_ones_are_stored_over_them(tmp_path):
    """The gradient of the last step is read where that of this one is stored, in one loop."""

    def step(w, h, x):
        h = 0.5 * h + w * x
        return h, h

    data = np.ones((4, 2)), np.zeros((4, 2))
    optimizer = optax.optimistic_gradient_descent(RATE)
    assert errors(step, jnp.ones(2), jnp.zeros(2), *data, optimizer, tmp_path) < 1e-12


def test_output_that_is_the_new_state_stays_until_it_is_one(tmp_path):
    """Both are one number all over: a view, of which there is one copy."""

    def step(w, h, x):
        h = jnp.full(2, jnp.tanh(h[0] + x @ w))
        return h, h

    data = np.ones((6, 2)), np.linspace(-1, 1, 12).reshape(6, 2)
    assert errors(step, jnp.ones(2), jnp.zeros(2), *data, optax.adam(0.1), tmp_path) < 1e-12
