"""A small task and a small network as plain functions of arrays."""

import jax
import jax.numpy as jnp

LENGTH, INPUTS, UNITS = 6, 2, 3


class Sum:
    """The running sum of the first input; only the last three steps count."""

    chance, higher_is_better = 1.0, False
    mask = jnp.array([0, 0, 0, 1, 1, 2.0])

    def batch(self, key, size):
        xs = jax.random.normal(key, (LENGTH, size, INPUTS))
        return xs, jnp.cumsum(xs[..., 0], 0)

    def validation(self, size):
        return self.batch(jax.random.key(1001), size)

    def test(self, size):
        return self.batch(jax.random.key(1002), size)

    def loss(self, out, target):
        return ((out - target) ** 2).mean()

    def score(self, outs, targets):
        return ((outs - targets) ** 2).mean() / (targets**2).mean()


def step(params, h, x):
    """A recurrence through weights and an element-wise one."""
    h = jax.nn.sigmoid(params["a"]) * h + jnp.tanh(x @ params["w"] + h @ params["u"])
    return h, h @ params["out"]


def network(key, batch_size):
    """Step, parameters and state."""
    w, u, out = jax.random.split(key, 3)
    params = {
        "w": jax.random.normal(w, (INPUTS, UNITS)),
        "u": 0.5 * jax.random.normal(u, (UNITS, UNITS)),
        "a": jnp.ones(UNITS),
        "out": jax.random.normal(out, (UNITS,)),
    }
    return step, params, jnp.zeros((batch_size, UNITS))
