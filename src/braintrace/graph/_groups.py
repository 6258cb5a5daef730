"""Hidden groups: states of one shape whose units feed only themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import dotted
from ._pattern import Pattern
from ._step import Path
from ._views import Followed, GroupViews

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class HiddenGroup(GroupViews):
    """States that share a shape and meet element by element; `num_state` variables per unit."""

    index: int
    leaves: tuple[int, ...]
    components: tuple[int, ...]
    hidden_paths: tuple[Path, ...]
    varshape: tuple[int, ...]
    num_state: int
    channels: tuple[int, ...]
    followed: Followed
    hidden_states: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return "{" + ", ".join(dotted(p) for p in self.hidden_paths) + "}"

    def concat_hidden(self, values: Sequence[Array]) -> Array:
        """Stack the states of the group on a trailing axis: (*varshape, num_state)."""
        if len(values) != len(self.leaves):
            raise ValueError(
                f"Group {self.name} has {len(self.leaves)} states, got {len(values)} values."
            )
        parts = [v[..., None] if not n else v for v, n in zip(values, self.channels, strict=True)]
        return jnp.concatenate(parts, axis=-1)

    def split_hidden(self, array: Array) -> list[Array]:
        """The states of a stacked array; the inverse of `concat_hidden`."""
        widths = [n or 1 for n in self.channels]
        if array.shape[-1] != sum(widths):
            raise ValueError(
                f"Group {self.name} has {sum(widths)} variables per unit, "
                f"got an array of width {array.shape[-1]}."
            )
        parts = jnp.split(array, np.cumsum(widths)[:-1], axis=-1)
        return [p if n else p[..., 0] for p, n in zip(parts, self.channels, strict=True)]


HiddenGroup.__module__ = "braintrace"


def find_groups(followed: Followed, pattern: Pattern) -> tuple[HiddenGroup, ...]:
    """Join leaves of equal shape that a kept edge connects; in the order of the states."""
    step, components = followed.step, followed.tangent.components
    offsets = followed.influence.offsets[: len(components) + 1]
    n = len(step.hidden)
    parent = list(range(n))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    shape = {c.leaf: c.shape for c in components}
    owner = np.array([c.leaf for c in components], int)
    of = owner[np.searchsorted(offsets, pattern.kept, side="right") - 1]
    for a, b in np.unique(of, axis=0) if len(of) else ():
        if shape[int(a)] == shape[int(b)]:
            low, high = sorted((root(int(a)), root(int(b))))
            parent[high] = low

    groups: list[HiddenGroup] = []
    for r in sorted({root(i) for i in range(n)}):
        leaves = tuple(i for i in range(n) if root(i) == r)
        channels = tuple(
            step.entry(step.hidden[i]).shape[-1] if step.hidden[i].channels else 0 for i in leaves
        )
        groups.append(
            HiddenGroup(
                index=len(groups),
                leaves=leaves,
                components=tuple(k for k, c in enumerate(components) if c.leaf in leaves),
                hidden_paths=tuple(step.hidden[i].path for i in leaves),
                varshape=shape[leaves[0]],
                num_state=sum(k or 1 for k in channels),
                channels=channels,
                followed=followed,
            )
        )
    return tuple(groups)
