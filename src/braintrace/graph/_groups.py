"""Hidden groups: states of one shape whose units feed only themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.sparse import csgraph

from .._errors import dotted
from ..program import Jaxpr, JaxVar, Program, Var, bind_forward, evaluate, jaxpr_of, variable
from ._pattern import Pattern, matrix
from ._sets import distinct
from ._step import Parts, Path, join, parts_of, split
from ._views import Followed, Values, arranged


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

    @property
    def hidden_invars(self) -> list[JaxVar]:
        """Variables of the group's states before the step."""
        return [variable(v) for v in self._entries]

    @property
    def hidden_outvars(self) -> list[JaxVar]:
        """Variables of the group's states after the step."""
        step = self.followed.step
        return [variable(step.exit(step.hidden[i])) for i in self.leaves]

    @property
    def transition_jaxpr(self) -> Jaxpr:
        """From the group's states before the step to those after it, along the followed paths.

        Raises:
            NotSupportedError: a path ends inside control flow or a custom derivative.
        """
        return jaxpr_of(self._transition)

    @property
    def transition_jaxpr_constvars(self) -> list[JaxVar]:
        """What `transition_jaxpr` reads besides the states."""
        return [variable(v) for v in self._transition.consts]

    @property
    def is_diagonal_recurrence(self) -> bool:
        """Whether each unit depends, within the group, on its own states only."""
        edges, offsets = self.followed.pattern.edges, self.followed.influence.offsets
        component = np.searchsorted(offsets, edges, side="right") - 1
        inside = np.isin(component, self.components).all(axis=1)
        place = edges[inside] - offsets[component[inside]]
        return bool((place[:, 0] == place[:, 1]).all())

    def state_transition(self, hidden_vals: Sequence[Array], input_vals: Values) -> list[Array]:
        """The group's states after the step.

        Args:
            hidden_vals: the states before it, in the order of `hidden_paths`.
            input_vals: what else it reads, in the order of `transition_jaxpr_constvars` or by
                variable.
        """
        part = self._transition
        return evaluate(part, arranged(part, input_vals), hidden_vals, bind_forward)

    transition = state_transition

    def diagonal_jacobian(self, hidden_vals: Sequence[Array], input_vals: Values) -> Array:
        """The derivative of each unit's states by its own states, (*varshape, S, S).

        Takes the arguments of `state_transition`; a complex state counts as two.
        """
        moved, parts = self._real(hidden_vals, input_vals)
        n, shape = len(parts), self.varshape
        if self.is_diagonal_recurrence:
            ones = [[jnp.full_like(p, i == k) for k, p in enumerate(parts)] for i in range(n)]
            columns = [jax.jvp(moved, parts, tangents)[1] for tangents in ones]
            return jnp.stack([jnp.stack(column, -1) for column in columns], -1)
        size = prod(shape)
        full = self.full_jacobian(hidden_vals, input_vals).reshape((size, n, size, n))
        own = np.arange(size)
        return full[own, :, own].reshape((*shape, n, n))

    def full_jacobian(self, hidden_vals: Sequence[Array], input_vals: Values) -> Array:
        """The derivative of the group's states by all of them, (*varshape, S, *varshape, S)."""
        moved, parts = self._real(hidden_vals, input_vals)
        rows = jax.jacfwd(moved, argnums=tuple(range(len(parts))))(*parts)
        return jnp.stack([jnp.stack(row, -1) for row in rows], len(self.varshape))

    def dict(self) -> dict[str, Any]:
        """What the group consists of, by name."""
        names = ("index", "hidden_paths", "hidden_states", "hidden_invars", "hidden_outvars",
                 "transition_jaxpr", "transition_jaxpr_constvars",
                 "is_diagonal_recurrence")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def _entries(self) -> list[Var]:
        step = self.followed.step
        return [step.entry(step.hidden[i]) for i in self.leaves]

    @property
    def _transition(self) -> Program:
        return self.followed.between(self._entries, frozenset(self.components), self.leaves)

    def _real(
        self, hidden_vals: Sequence[Array], input_vals: Values
    ) -> tuple[Callable[..., list[Array]], list[Array]]:
        """The transition between real components, and those of the states."""
        all_of_step = self.followed.tangent.components
        own = [
            replace(all_of_step[i], leaf=self.leaves.index(all_of_step[i].leaf))
            for i in self.components
        ]

        def moved(*parts: Array) -> list[Array]:
            return split(own, self.state_transition(join(own, parts, len(self.leaves)), input_vals))

        return moved, split(own, [jnp.asarray(v) for v in hidden_vals])


def _last(value: Array, parts: Parts | None) -> Array:
    """A state with the variables of a unit on a trailing axis."""
    if parts is None:
        return value[..., None]
    axis, n, width = parts
    if width == 1:
        return jnp.moveaxis(value, axis, -1)
    at, shape = value.ndim + axis, value.shape
    return jnp.moveaxis(value.reshape((*shape[:at], n, width, *shape[at + 1 :])), at, -1)


def _first(value: Array, parts: Parts | None) -> Array:
    """The inverse of `_last`."""
    if parts is None:
        return value[..., 0]
    axis, n, width = parts
    if width == 1:
        return jnp.moveaxis(value, -1, axis)
    at, moved = value.ndim + axis - 1, jnp.moveaxis(value, -1, axis - 1)
    return moved.reshape((*moved.shape[:at], n * width, *moved.shape[at + 2 :]))


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
