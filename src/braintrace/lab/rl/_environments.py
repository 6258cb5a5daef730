"""Environments in JAX: a reset and a step, pure functions of a key and a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Moment(NamedTuple):
    """What an agent gets of an environment.

    Attributes:
        observation: what it sees now; after an end, what the new episode begins with.
        reward: that of its last action.
        terminated: whether that action ended the episode, and nothing comes after it.
        truncated: whether the episode was cut there, and what would have come is not known.
    """

    observation: Array
    reward: Any
    terminated: Any
    truncated: Any


class Environment(NamedTuple):
    """An environment in JAX.

    Attributes:
        observations: the number of observed values.
        actions: the number of actions.
        reset: `key -> (state, observation)`.
        step: `(key, state, action) -> (state, Moment)`, without a reset at the end.
    """

    observations: int
    actions: int
    reset: Callable[[Array], tuple[Any, Array]]
    step: Callable[[Array, Any, Array], tuple[Any, Moment]]

    def next(self, key: Array, state: Any, action: Array) -> tuple[Any, Moment]:
        """A step, and the first observation of the next episode where one ends."""
        of_step, of_reset = jax.random.split(key)
        after, now = self.step(of_step, state, action)
        new, first = self.reset(of_reset)
        ended = now.terminated | now.truncated
        choose = lambda a, b: jnp.where(ended, a, b)
        state = jax.tree.map(choose, new, after)
        return state, now._replace(observation=choose(first, now.observation))


def memory_chain(length: int) -> Environment:
    """A cue of ±1 at the first step, noise beside it, and after `length` steps it is asked for.

    The reward is 1 for the right one of two actions, -1 for the other; 0 on the way.
    """
    return _walk(length, maze=False)


def t_maze(length: int) -> Environment:
    """The same in a corridor: one of three actions leads on, running into a wall costs 0.1."""
    return _walk(length, maze=True)


def _walk(length: int, maze: bool) -> Environment:
    def seen(key: Array, place: Array, cue: Array) -> Array:
        return jnp.array([(place == 0) * cue, place == length, jax.random.normal(key)], float)

    def reset(key: Array) -> tuple[Any, Array]:
        of_cue, of_noise = jax.random.split(key)
        place, cue = jnp.zeros((), int), jax.random.rademacher(of_cue, ())
        return (place, cue), seen(of_noise, place, cue)

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Moment]:
        place, cue = state
        end, answer = place == length, jnp.where(action == (cue > 0), 1.0, -1.0)
        turns = (action < 2) if maze else end
        wall = -0.1 * (end | turns) if maze else 0.0
        reward, over = jnp.where(end & turns, answer, wall), end & turns
        place = place + ~(end | turns)
        return (place, cue), Moment(seen(key, place, cue), reward, over, jnp.array(False))

    return Environment(3, 3 if maze else 2, reset, step)


def cartpole(velocities: bool = False, limit: int = 500) -> Environment:
    """The equations of CartPole-v1; without `velocities` the agent sees position and angle only.

    The reward of a step is 0.1; an episode ends with a fall, or is cut after `limit` steps.
    """

    def seen(world: Array) -> Array:
        scaled = world * jnp.array([1 / 2.4, 0.5, 15 / jnp.pi, 0.5])
        return scaled if velocities else scaled[::2]

    def reset(key: Array) -> tuple[Any, Array]:
        world = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return (world, jnp.zeros((), int)), seen(world)

    def step(key: Array, state: Any, action: Array) -> tuple[Any, Moment]:
        world, age = state
        _, speed, angle, turn = world
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        force = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * turn**2 * sin) / 1.1
        fall = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        world = world + 0.02 * jnp.array([speed, force - 0.05 * fall * cos / 1.1, turn, fall])
        fell = (jnp.abs(world[0]) > 2.4) | (jnp.abs(world[2]) > jnp.pi / 15)
        age = age + 1
        reward = jnp.where(fell, 0.0, 0.1)
        return (world, age), Moment(seen(world), reward, fell, ~fell & (age == limit))

    return Environment(4 if velocities else 2, 2, reset, step)
