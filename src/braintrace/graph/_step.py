"""What a front end hands over: one step of a network as a program with named slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import dotted
from ..program import Program, Var

Path = tuple[Any, ...]
MOST_COUPLED = 64  # elements along an axis that count as one unit


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of one named state: where it enters the program and where it leaves."""

    path: Path
    index: int
    position: int
    output: int
    channels: bool = False  # whether the last axis counts the variables of one unit, not units
    packed: tuple[int, int] | None = None  # (axis, n): its n equal parts are variables of one unit

    @property
    def name(self) -> str:
        name = dotted(self.path)
        return f"{name}[{self.index}]" if self.index else name


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step: program inputs are arguments, then states; outputs are results, then states."""

    program: Program
    n_args: int
    n_outs: int
    params: tuple[Leaf, ...]
    hidden: tuple[Leaf, ...]
    others: tuple[Leaf, ...]
    penalised: bool = False  # and then the penalty of backward rules that add a constant
    couple_axis: int | None = None  # elements along this axis of a state count as one unit
    fixed: int = 0  # the last arguments, which are the same at every step
    filters: int = 0  # hidden leaves at the end are filters of the rule: zero, stored nowhere
    rates: int = 0  # and the last ones firing rates, which are stored with its traces

    @property
    def stored(self) -> tuple[Leaf, ...]:
        """The hidden leaves that the user's step has."""
        return self.hidden[: len(self.hidden) - self.filters - self.rates]

    @property
    def filter_shapes(self) -> list[Var]:
        """The entries of the filters."""
        first = len(self.stored)
        return [self.entry(leaf) for leaf in self.hidden[first : first + self.filters]]

    @property
    def rate_leaves(self) -> tuple[Leaf, ...]:
        """The firing rates of the rule."""
        return self.hidden[len(self.hidden) - self.rates :]

    def entry(self, leaf: Leaf) -> Var:
        return self.program.inputs[leaf.position]

    def exit(self, leaf: Leaf) -> Any:
        return self.program.outputs[leaf.output]

    def arguments(
        self,
        args: Sequence[Any],
        params: Sequence[Any],
        hidden: Sequence[Any],
        others: Sequence[Any],
    ) -> list[Any]:
        """The program's flat inputs: the arguments of the step, and arrays of its states."""
        flat = [*args, *[None] * (len(self.program.inputs) - self.n_args)]
        leaves = (*self.params, *self.hidden, *self.others)
        for leaf, array in zip(leaves, (*params, *hidden, *others), strict=True):
            flat[leaf.position] = array
        return flat

    def reached(self, bits: Mapping[Var, int], i: int) -> int:
        """Mask of the hidden leaves whose new value has bit i."""
        exits = enumerate(map(self.exit, self.hidden))
        return sum(1 << k for k, out in exits if bits.get(out, 0) >> i & 1)

    def entry_bits(self, leaves: Sequence[Leaf]) -> dict[Var, int]:
        """Bit i at the entry of leaf i: seeds of `reach`."""
        return {self.entry(leaf): 1 << i for i, leaf in enumerate(leaves)}


# A state is differentiated in real coordinates: a complex array counts as two components, an
# array with channels or parts as one per channel or part. Each component has one scalar per unit.


@dataclass(frozen=True, slots=True)
class Component:
    """One real number per unit: a part of a hidden leaf, `part` of so many along an axis."""

    leaf: int
    part: int | None
    imaginary: bool
    shape: tuple[int, ...]
    axis: int = 0
    width: int = 1
    coupled: int | None = None  # elements along this axis, from the end, are one unit's


Parts = tuple[int, int, int]  # an axis from the end, its number of parts, and the width of each


def parts_of(step: Step, leaf: Leaf) -> Parts | None:
    """How an array holds several variables of each unit, None if it holds one."""
    shape = step.entry(leaf).shape
    cut = (len(shape) - 1, shape[-1]) if leaf.channels else leaf.packed
    return None if cut is None else (cut[0] - len(shape), cut[1], shape[cut[0]] // cut[1])


def components_of(step: Step) -> tuple[Component, ...]:
    """The real components of all hidden leaves, in order."""
    out = []
    for i, leaf in enumerate(step.hidden):
        var = step.entry(leaf)
        shape, cut = var.shape, parts_of(step, leaf)
        axis, n, width = cut or (0, 1, 1)
        if cut:
            at = axis + len(shape)
            shape = (*shape[:at], *([width] if width > 1 else []), *shape[at + 1 :])
        coupled = _coupled(shape, step.couple_axis)
        out += [
            Component(i, part, im, shape, axis, width, coupled)
            for part in (range(n) if cut else [None])
            for im in ((False, True) if var.is_complex else (False,))
        ]
    return tuple(out)


def _coupled(shape: tuple[int, ...], axis: int | None) -> int | None:
    """The axis, from the end, along which elements of a component count as one unit."""
    if axis is None or len(shape) < 2 or not -len(shape) <= axis < len(shape):
        return None
    axis = axis % len(shape) - len(shape)
    return axis if 1 < shape[axis] <= MOST_COUPLED else None


def split(components: Sequence[Component], leaves: Sequence[Array]) -> list[Array]:
    """Real components of the hidden leaves."""
    out = []
    for c in components:
        value = leaves[c.leaf]
        if c.part is not None:
            ends = c.part * c.width, (c.part + 1) * c.width
            value = jax.lax.slice_in_dim(value, *ends, axis=c.axis)
            value = value.squeeze(c.axis) if c.width == 1 else value
        if jnp.iscomplexobj(value):
            value = value.imag if c.imaginary else value.real
        out.append(value)
    return out


def split_cotangents(components: Sequence[Component], leaves: Sequence[Array]) -> list[Array]:
    """Real components of cotangents: JAX's cotangent of a + ib is dL/da - i dL/db."""
    out = split(components, leaves)
    return [-v if c.imaginary else v for c, v in zip(components, out, strict=True)]


def join(components: Sequence[Component], values: Sequence[Array], n_leaves: int) -> list[Array]:
    """The hidden leaves of real components; the inverse of `split`."""
    out: list[Array] = []
    for i in range(n_leaves):
        parts = [(c, v) for c, v in zip(components, values, strict=True) if c.leaf == i]
        if any(c.imaginary for c, _ in parts):
            parts = [
                (re[0], jax.lax.complex(re[1], im[1]))
                for re, im in zip(parts[::2], parts[1::2], strict=True)
            ]
        one, value = parts[0]
        if one.part is not None:
            arrays = [v for _, v in parts]
            together = jnp.stack if one.width == 1 else jnp.concatenate
            value = together(arrays, axis=one.axis)
        out.append(value)
    return out
