"""A recurrent core for streaming agents: linear units that rotate and decay, exact under D-RTRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def rotating_units(
    key: jax.Array,
    inputs: int,
    outputs: int,
    units: int = 16,
    ring: tuple[float, float] = (0.9, 0.999),
) -> tuple[dict[str, Any], tuple[Any, Any], Callable[..., Any]]:
    """Parameters, a state and a step of units c' = r e^{iθ} c + √(1 - r²) x W, read out after tanh.

    Args:
        key: of the weights.
        inputs: the number of inputs.
        outputs: the number of outputs, which start at zero.
        units: the number of complex units; the read-out sees both parts.
        ring: the smallest and the largest r at the start, r = exp(-exp(ν)): near 1 for a long
            memory, from 0 where what counts is a few steps ago.

    Returns:
        `(params, state, step)`, for `braintrace.online(step, rule)`.
    """
    of_r, of_angle, *of_w = jax.random.split(key, 4)
    r = jax.random.uniform(of_r, (units,), minval=max(ring[0], 1e-3), maxval=ring[1])
    real, imaginary = (jax.random.normal(k, (inputs, units)) / inputs**0.5 for k in of_w)
    params = {
        "nu": jnp.log(-jnp.log(r)),
        "angle": jax.random.uniform(of_angle, (units,), maxval=jnp.pi / 10),
        "real": real,
        "imaginary": imaginary,
        "out": jnp.zeros((2 * units, outputs)),
    }

    def step(params: dict[str, Any], state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
        a, b = state
        r = jnp.exp(-jnp.exp(params["nu"]))
        cos, sin, gain = (
            r * jnp.cos(params["angle"]),
            r * jnp.sin(params["angle"]),
            (1 - r**2) ** 0.5,
        )
        a, b = (
            cos * a - sin * b + gain * (x @ params["real"]),
            sin * a + cos * b + gain * (x @ params["imaginary"]),
        )
        return (a, b), jnp.tanh(jnp.concatenate([a, b])) @ params["out"]

    return params, (jnp.zeros(units), jnp.zeros(units)), step
