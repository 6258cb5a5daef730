"""Time constants: the step `dt` of the environment, and what is left of a state after it."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import value_error
from ..ops import element_wise
from ._shapes import Init, UnitArray, initial


def refuted(condition: jax.Array) -> bool:
    """Whether a condition fails somewhere; False inside of `jit`, where it has no value yet."""
    try:
        return not bool(jnp.all(condition))
    except jax.errors.ConcretizationTypeError:
        return False


def steps_per(owner: str, name: str, tau: UnitArray) -> jax.Array:
    """`dt / tau`, a plain number; a tau without a unit counts in the unit of dt."""
    try:
        dt = brainstate.environ.get_dt()
    except KeyError as error:
        raise value_error(
            f"{owner}: the time step dt is not set.",
            why=f"a state decays by exp(-dt / {name}) in a step.",
            do="call brainstate.environ.set(dt=1.0 * saiunit.ms) before building the layer.",
        ) from error
    if u.is_unitless(tau):
        tau = u.get_mantissa(tau) * u.get_unit(dt)
    ratio = u.maybe_decimal(dt / tau)
    if isinstance(ratio, u.Quantity):
        raise value_error(
            f"{owner}: dt is {dt} and {name} is {tau}.",
            why=f"dt / {name} must be a plain number.",
            do="give both a unit of time, or neither.",
        )
    if refuted(ratio > 0):
        raise value_error(
            f"{owner}: {name} is {tau}.",
            why="a state decays with a positive time constant.",
            do=f"make dt and every {name} positive.",
        )
    return ratio


class Decay(brainstate.nn.Module):
    """What is left after a step, `exp(-dt / tau)`; a trained one is `exp(-exp(rate))`."""

    def __init__(self, owner: str, name: str, tau: Init, shape: tuple[int, ...], train: bool):
        super().__init__()
        ratio = steps_per(owner, name, initial(tau, shape, f"{owner}: {name}"))
        self.rate = brainstate.ParamState(jnp.log(ratio)) if train else None
        if not train:
            self.constant = jnp.exp(-ratio)

    def update(self) -> jax.Array:
        """The decay of every unit."""
        if self.rate is None:
            return self.constant
        return element_wise(self.rate.value, lambda rate: jnp.exp(-jnp.exp(rate)))
