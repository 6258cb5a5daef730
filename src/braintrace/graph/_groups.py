"""Hidden groups: states of one shape whose units feed only themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.sparse import csgraph

from .._errors import dotted
from .._published import published
from ._influence import Influence
from ._pattern import Pattern, matrix
from ._sets import distinct
from ._sites import Site
from ._step import Parts, Path, Step, parts_of
from ._tangent import Tangent


@dataclass(frozen=True, eq=False, slots=True)
class Followed:
    """What an analysis followed; `crossing` if paths go on through operators."""

    step: Step
    sites: tuple[Site, ...]
    tangent: Tangent
    influence: Influence
    pattern: Pattern
    crossing: bool


@dataclass(frozen=True, eq=False, slots=True)
class HiddenGroup:
    """States that share a shape and meet element by element; `num_state` variables per unit."""

    index: int
    leaves: tuple[int, ...]
    components: tuple[int, ...]
    hidden_paths: tuple[Path, ...]
    varshape: tuple[int, ...]
    num_state: int
    parts: tuple[Parts | None, ...]
    followed: Followed
    hidden_states: tuple[Any, ...]

    @property
    def name(self) -> str:
        return "{" + ", ".join(dotted(p) for p in self.hidden_paths) + "}"

    def __getattr__(self, name: str) -> Any:
        return published(self, name)

    def concat_hidden(self, values: Sequence[Array]) -> Array:
        """Stack the states of the group on a trailing axis: (*varshape, num_state)."""
        if len(values) != len(self.leaves):
            raise ValueError(
                f"Group {self.name} has {len(self.leaves)} states, got {len(values)} values."
            )
        parts = [_last(v, how) for v, how in zip(values, self.parts, strict=True)]
        return jnp.concatenate(parts, axis=-1)

    def split_hidden(self, array: Array) -> list[Array]:
        """The states of a stacked array; the inverse of `concat_hidden`."""
        widths = [1 if how is None else how[1] for how in self.parts]
        if array.shape[-1] != sum(widths):
            raise ValueError(
                f"Group {self.name} has {sum(widths)} variables per unit, "
                f"got an array of width {array.shape[-1]}."
            )
        parts = jnp.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [_first(p, how) for p, how in zip(parts, self.parts, strict=True)]


# A state (3, 8) packed along its last axis from two parts of 4, parts (-1, 2, 4): as units (3, 4)
# with two variables each it is (3, 4, 2). Of a state with a channel axis of two, parts (-1, 2, 1),
# (3, 2), the axis only goes last: it is that already.
def _last(value: Array, parts: Parts | None) -> Array:
    """A state with the variables of a unit on a trailing axis."""
    if parts is None:
        return value[..., None]
    axis, n, width = parts
    at, shape = value.ndim + axis, value.shape
    inside = (width,) if width > 1 else ()
    return jnp.moveaxis(value.reshape((*shape[:at], n, *inside, *shape[at + 1 :])), at, -1)


def _first(value: Array, parts: Parts | None) -> Array:
    """The inverse of `_last`."""
    if parts is None:
        return value[..., 0]
    axis, n, width = parts
    at = value.ndim + axis - (width > 1)
    moved = jnp.moveaxis(value, -1, at)
    return moved.reshape((*moved.shape[:at], n * width, *moved.shape[at + 1 + (width > 1) :]))


def find_groups(
    followed: Followed, pattern: Pattern, states: Callable[[Path], Any]
) -> tuple[HiddenGroup, ...]:
    """Join leaves of equal shape that a kept edge connects; in the order of the states."""
    step, components = followed.step, followed.tangent.components
    offsets = followed.influence.offsets[: len(components) + 1]
    n = len(step.hidden)
    shape = {c.leaf: c.shape for c in components}
    leaf_of = np.array([c.leaf for c in components], int)
    ends = leaf_of[np.searchsorted(offsets, pattern.kept, side="right") - 1].reshape(-1, 2)
    pairs = np.stack(np.divmod(distinct(ends @ [n, 1], n * n), max(n, 1)), 1)
    alike = np.array([shape[a] == shape[b] for a, b in pairs.tolist()], bool)
    _, label = csgraph.connected_components(matrix(pairs[alike], (n, n)), directed=False)

    groups: list[HiddenGroup] = []
    for one in dict.fromkeys(label.tolist()):
        leaves = tuple(np.flatnonzero(label == one).tolist())
        members = [step.hidden[i] for i in leaves]
        parts = tuple(parts_of(step, m) for m in members)
        groups.append(
            HiddenGroup(
                index=len(groups),
                leaves=leaves,
                components=tuple(k for k, c in enumerate(components) if c.leaf in leaves),
                hidden_paths=tuple(m.path for m in members),
                varshape=shape[leaves[0]],
                num_state=sum(1 if how is None else how[1] for how in parts),
                parts=parts,
                followed=followed,
                hidden_states=tuple(states(m.path) for m in members),
            )
        )
    return tuple(groups)
