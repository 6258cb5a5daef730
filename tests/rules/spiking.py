"""Spiking neurons with a surrogate derivative, for rules that are held to equations of them."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def spike(over):
    return (over > 0).astype(over.dtype)


spike.defjvps(lambda t, z, over: 0.3 * jnp.maximum(0, 1 - jnp.abs(over)) * t)


def neurons(params, state, x):
    """The voltages and spikes after a step; spikes have no derivative on their way back."""
    v, z = state
    z = jax.lax.stop_gradient(z)
    v = 0.9 * v + x @ params["w_in"] + z @ params["w_rec"] - z
    return v, spike(v - 1.0)
