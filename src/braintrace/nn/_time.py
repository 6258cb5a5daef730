"""Time constants: the step `dt` of the environment, and what is left of a state after it."""

from __future__ import annotations

from typing import Any

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


def check_positive(what: str, given: object, value: UnitArray, why: str) -> None:
    """Refuse an argument of a layer that is not above zero everywhere."""
    if refuted(u.get_mantissa(value) > 0):
        raise value_error(f"{what} is {given}.", why=why, do="make it positive.")


def time_step(owner: str, why: str = "time constants count in it.") -> UnitArray:
    """The `dt` of the environment."""
    try:
        return brainstate.environ.get_dt()
    except KeyError as error:
        raise value_error(
            f"{owner}: the time step dt is not set.",
            why=why,
            do="call brainstate.environ.set(dt=1.0 * saiunit.ms) before building the layer.",
        ) from error


def _timed(dt: UnitArray, time: UnitArray) -> UnitArray:
    """A time; one without a unit counts in the unit of dt."""
    return u.get_mantissa(time) * u.get_unit(dt) if u.is_unitless(time) else time


def _plain(owner: str, name: str, dt: UnitArray, time: UnitArray, ratio: UnitArray) -> jax.Array:
    """A ratio of dt and a time as a number."""
    ratio = u.maybe_decimal(ratio)
    if isinstance(ratio, u.Quantity):
        raise value_error(
            f"{owner}: dt is {dt} and {name} is {time}.",
            why=f"dt / {name} must be a plain number.",
            do="give both a unit of time, or neither.",
        )
    return ratio


def steps_per(owner: str, name: str, tau: UnitArray) -> jax.Array:
    """`dt / tau`, a plain number; a tau without a unit counts in the unit of dt."""
    dt = time_step(owner, f"a state decays by exp(-dt / {name}) in a step.")
    tau = _timed(dt, tau)
    ratio = _plain(owner, name, dt, tau, dt / tau)
    if refuted(ratio > 0):
        raise value_error(
            f"{owner}: {name} is {tau}.",
            why="a state decays with a positive time constant.",
            do=f"make dt and every {name} positive.",
        )
    return ratio


def in_steps(owner: str, name: str, time: UnitArray) -> jax.Array:
    """`time / dt`, a plain number that is not negative."""
    dt = time_step(owner, f"{name} is kept as a number of steps.")
    time = _timed(dt, time)
    steps = _plain(owner, name, dt, time, time / dt)
    if refuted(steps >= 0):
        raise value_error(
            f"{owner}: {name} is {time}.",
            why="nothing arrives before it was sent.",
            do=f"make {name} zero or longer.",
        )
    return steps


def in_ms(steps: jax.Array, dt: UnitArray) -> UnitArray:
    """So many steps as a time: in ms where dt has a unit, else in whatever dt counts."""
    time: Any = steps * dt
    return time if u.is_unitless(time) else time.in_unit(u.ms)


class Decay(brainstate.nn.Module):
    """What is left after a step, `exp(-dt / tau)`; a trained one is `exp(-exp(rate))`."""

    def __init__(self, owner: str, name: str, tau: Init, shape: tuple[int, ...], train: bool):
        super().__init__()
        ratio = steps_per(owner, name, initial(tau, shape, f"{owner}: {name}"))
        self.argument, self.dt = name, time_step(owner)
        self.rate = brainstate.ParamState(jnp.log(ratio)) if train else None
        if not train:
            self.constant = jnp.exp(-ratio)

    def update(self) -> jax.Array:
        """The decay of every unit."""
        if self.rate is None:
            return self.constant
        return element_wise(self.rate.value, lambda rate: jnp.exp(-jnp.exp(rate)))

    def tau(self) -> UnitArray:
        """The time constant of every unit, in ms where dt has a unit."""
        if self.rate is None:
            return in_ms(-1 / jnp.log(self.constant), self.dt)
        return in_ms(jnp.exp(-self.rate.value), self.dt)
