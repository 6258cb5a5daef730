"""The arrays of a step, how those of a block lie in time, and functions of all its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Values:
    """The arrays of a step: closed-over constants, arguments, and the three kinds of state.

    `extra` is what the rule is called with besides, and the step does not see.
    """

    consts: tuple[Any, ...]
    args: tuple[Any, ...]
    params: tuple[Any, ...]
    hidden: tuple[Any, ...]
    others: tuple[Any, ...]
    extra: tuple[Any, ...] = ()


jax.tree_util.register_dataclass(
    Values, data_fields=["consts", "args", "params", "hidden", "others", "extra"], meta_fields=[]
)


@dataclass(frozen=True, slots=True)
class TimeAxes:
    """How a block is laid out in time.

    `consts` and `args` say which of these have a leading axis of `length` steps. `window` is the
    number of steps in which reverse mode is complete, None for single steps with recurrent entries
    cut. `extra` says the same of what the rule is called with, and `names` is its structure.
    """

    length: int
    consts: tuple[bool, ...]
    args: tuple[bool, ...]
    window: int | None
    extra: tuple[bool, ...] = ()
    names: Any = None

    def slices(self, values: Values) -> tuple[list[Array], list[Array]]:
        """The constants and arguments that have an axis of time."""
        return timed_of(values.consts, self.consts), timed_of(values.args, self.args)

    def at(self, values: Values, slices: Any, hidden: Any, others: Any) -> Values:
        """The values of one step: its slices of constants and arguments, and its states."""
        consts, args = slices
        return Values(
            merged(values.consts, self.consts, consts),
            merged(values.args, self.args, args),
            values.params,
            hidden,
            others,
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A block of steps and the states before each.

    Attributes:
        path: the values, with states stacked: those before every step.
        axes: how arrays lie in time.
        ys: outputs of operators that were computed on the way, by the number of the site.
        new: the states after each step that were stored on the way, by the number of the leaf.
    """

    path: Values
    axes: TimeAxes
    ys: dict[int, Array]
    new: dict[int, Array] = field(default_factory=dict)

    @property
    def consts(self) -> tuple[Array, ...]:
        """The constants of the first step: operands do not vary in a block."""
        path, flags = self.path, self.axes.consts
        return merged(path.consts, flags, [a[0] for a in timed_of(path.consts, flags)])


def timed_of(arrays: Sequence[Array], flags: Sequence[bool]) -> list[Array]:
    """The arrays that have an axis of time."""
    return [a for a, f in zip(arrays, flags, strict=True) if f]


def merged(
    arrays: Sequence[Array], flags: Sequence[bool], timed: Sequence[Array]
) -> tuple[Array, ...]:
    """`arrays` with `timed` in the places of those that have an axis of time."""
    items = iter(timed)
    return tuple(next(items) if f else a for a, f in zip(arrays, flags, strict=True))


def map_steps(count: int, function: Callable, *arrays: Any, mapped: bool = True) -> Any:
    """A function of slices along the first axis, for all of them at once.

    Without `jit` they are evaluated one after another, so that each can be looked at; in a scan
    if they cannot be `mapped`.
    """
    if count == 1:
        out = function(*jax.tree.map(lambda a: a[0], arrays))
        return jax.tree.map(lambda a: jnp.expand_dims(a, 0), out)
    config: Any = jax.config
    if config.jax_disable_jit:
        out = [function(*jax.tree.map(lambda a: a[i], arrays)) for i in range(count)]  # noqa: B023
        return jax.tree.map(lambda *a: jnp.stack(a), *out)
    if not mapped:
        return jax.lax.map(lambda slices: function(*slices), arrays)
    return jax.vmap(function, axis_size=count)(*arrays)


def scan_steps(block: Block, push: Callable[[Values, Any], Any], carry: Any) -> Any:
    """`push(values, carry)` at every step of a block, one after another."""
    axes, path = block.axes, block.path

    def step(carry, sliced):
        return push(axes.at(path, *sliced), carry), None

    sliced = (axes.slices(path), path.hidden, path.others)
    if axes.length == 1:
        return step(carry, jax.tree.map(lambda a: a[0], sliced))[0]
    return jax.lax.scan(step, carry, sliced, axes.length)[0]
