"""What the records of the compiler show of a step: JAX's own variables and jaxprs, computed.

A jaxpr here is the part of the step between two sets of its variables. What else it reads, and the
values at which a rule's paths end (outputs of trained operators, results of equations that mix
units), are its constants: `ModuleInfo.jaxpr_call` returns all of them by variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._control import opened
from .._errors import NotSupportedError, message
from .._jaxpr import (
    Equation,
    Program,
    Var,
    bind_forward,
    equation_of,
    evaluate,
    jaxpr_of,
    operand_of,
    section,
    variable,
)
from ._influence import Influence
from ._operands import operand_equations
from ._pattern import Pattern
from ._sites import Site
from ._step import Path, Step, join, split
from ._tangent import Tangent

Array = jax.Array
Values = Sequence[Any] | Mapping[Any, Any]


@dataclass(frozen=True, eq=False, slots=True)
class Followed:
    """What an analysis followed; `crossing` if paths go on through operators."""

    step: Step
    sites: tuple[Site, ...]
    tangent: Tangent
    influence: Influence
    pattern: Pattern
    crossing: bool

    def between(
        self, inputs: Sequence[Var], sources: frozenset[int], leaves: Sequence[int]
    ) -> Program:
        """The part of the step from `inputs` to new states, along the paths that are followed.

        `sources` are the source indices of the inputs.

        Raises:
            NotSupportedError: the paths do not end between two equations of the step.
        """
        step, tangent = self.step, self.tangent
        cuts, origins = self._cuts(sources, leaves), tangent.origins
        components = [i for i, c in enumerate(tangent.components) if c.leaf in leaves]
        seeds = [v for i, v in enumerate(tangent.sources) if i in sources]
        ends = {o for e in cuts for o in e.outputs}
        live = section(tangent.program, seeds, [tangent.exits[i] for i in components], ends)
        followed = {origins.get(e) for e in live.equations}
        fixed = {s.y for s in self.sites if not self.crossing}
        for cut in cuts:
            origin = origins.get(cut)
            if origin is None or origin.bodies or origin in followed:
                raise NotSupportedError(_not_apart(cut, "an equation that mixes units"))
            fixed.update(origin.outputs)
        exits = [step.exit(step.hidden[i]) for i in leaves]
        part = section(step.program, inputs, exits, fixed)
        if not self.crossing:
            around = opened(part, {s.equation: -1 for s in self.sites}.get)
            for eqn in around:
                raise NotSupportedError(_not_apart(eqn, "a trained operator"))
        return part

    def _cuts(self, sources: frozenset[int], leaves: Sequence[int]) -> list[Equation]:
        """The equations at which paths from the sources to the states end."""
        pairs = zip(self.tangent.components, self.influence.lost, strict=True)
        lost = [cuts for component, cuts in pairs if component.leaf in leaves]
        return [
            cut.equation
            for i, cut in enumerate(self.influence.cuts)
            if cut.sources & sources and any(i in m for m in lost)
        ]


def _not_apart(eqn: Equation, what: str) -> str:
    return message(
        "the paths that the rule follows here are no jaxpr of their own.",
        where=eqn.where(),
        why=f"{what} is inside control flow or a custom derivative, part of which is followed",
        do="read the arrays instead: ETraceVjpGraphExecutor.solve_h2w_h2h_jacobian",
    )


def _arranged(part: Program, values: Values) -> list[Any]:
    """Values of a part's constants: by variable, or in their order already."""
    if isinstance(values, Mapping):
        return [values[variable(v)] for v in part.consts]
    return list(values)


class GroupViews:
    """What a `HiddenGroup` shows of the step."""

    __slots__ = ()
    index: int
    leaves: tuple[int, ...]
    components: tuple[int, ...]
    hidden_paths: tuple[Path, ...]
    hidden_states: tuple[Any, ...]
    varshape: tuple[int, ...]
    followed: Followed

    @property
    def hidden_invars(self) -> list[Any]:
        """Variables of the group's states before the step."""
        return [variable(v) for v in self._entries]

    @property
    def hidden_outvars(self) -> list[Any]:
        """Variables of the group's states after the step."""
        step = self.followed.step
        return [variable(step.exit(step.hidden[i])) for i in self.leaves]

    @property
    def transition_jaxpr(self) -> Any:
        """From the group's states before the step to those after it, along the followed paths.

        Raises:
            NotSupportedError: a path ends inside control flow or a custom derivative.
        """
        return jaxpr_of(self._transition)

    @property
    def transition_jaxpr_constvars(self) -> list[Any]:
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

    def state_transition(self, hidden_vals: Sequence[Any], input_vals: Values) -> list[Any]:
        """The group's states after the step.

        Args:
            hidden_vals: the states before it, in the order of `hidden_paths`.
            input_vals: what else it reads, in the order of `transition_jaxpr_constvars` or by
                variable.
        """
        part = self._transition
        return evaluate(part, _arranged(part, input_vals), hidden_vals, bind_forward)

    transition = state_transition

    def diagonal_jacobian(self, hidden_vals: Sequence[Any], input_vals: Values) -> Array:
        """The derivative of each unit's states by its own states, (*varshape, S, S).

        Takes the arguments of `state_transition`; a complex state counts as two.
        """
        moved, parts = self._real(hidden_vals, input_vals)
        n, shape = len(parts), self.varshape
        if self.is_diagonal_recurrence:
            ones = [[jnp.full_like(p, i == k) for k, p in enumerate(parts)] for i in range(n)]
            columns = [jax.jvp(moved, parts, tangents)[1] for tangents in ones]
            return jnp.stack([jnp.stack(column, -1) for column in columns], -1)
        size = int(np.prod(shape, dtype=np.int64))
        full = self.full_jacobian(hidden_vals, input_vals).reshape((size, n, size, n))
        own = np.arange(size)
        return full[own, :, own].reshape((*shape, n, n))

    def full_jacobian(self, hidden_vals: Sequence[Any], input_vals: Values) -> Array:
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
        self, hidden_vals: Sequence[Any], input_vals: Values
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


class RelationViews:
    """What a `HiddenParamOpRelation` shows of the step."""

    __slots__ = ()
    site: Site
    hidden_groups: tuple[Any, ...]
    trainable_paths: Mapping[str, Path]

    @property
    def x_var(self) -> Any:
        """Variable of the operator's input, None if it has none."""
        return None if self.site.x is None else operand_of(self.site.x)

    @property
    def y_var(self) -> Any:
        """Variable of the operator's output."""
        return variable(self.site.y)

    @property
    def trainable_vars(self) -> Mapping[str, Any]:
        """Variables of the operator's weights."""
        at = self.site.operator.positions
        return {k: operand_of(self.site.equation.inputs[i]) for k, i in at.items()}

    @property
    def trainable_processing_chains(self) -> Mapping[str, tuple[Any, ...]]:
        """For each weight, the equations that compute it from parameters, in order."""
        program = self._followed.step.program
        return {
            key: tuple(map(equation_of, operand_equations(program, self.site, key)))
            for key in self.trainable_paths
        }

    @property
    def y_to_hidden_group_jaxprs(self) -> list[Any]:
        """For each hidden group, a jaxpr from the operator's output to the group's new states.

        Raises:
            NotSupportedError: the operator, or the end of a path, is inside control flow.
        """
        return [jaxpr_of(part) for part in self._tails]

    def y_to_hidden_groups(
        self, y: Any, const_vals: Mapping[Any, Any], concat_hidden_vals: bool = True
    ) -> list[Any]:
        """The new states of each hidden group for an output of the operator.

        Args:
            y: the output.
            const_vals: what else the step computed, by variable.
            concat_hidden_vals: whether a group's states come as one array.
        """
        tails = zip(self.hidden_groups, self._tails, strict=True)
        states = [(g, evaluate(t, _arranged(t, const_vals), [y], bind_forward)) for g, t in tails]
        return [g.concat_hidden(v) if concat_hidden_vals else v for g, v in states]

    @property
    def _followed(self) -> Followed:
        return self.hidden_groups[0].followed

    @property
    def _tails(self) -> list[Program]:
        if self.site.levels:
            raise NotSupportedError(_not_apart(self.site.equation, "the operator itself"))
        followed = self._followed
        i = next(i for i, s in enumerate(followed.sites) if s.equation is self.site.equation)
        sources = frozenset(followed.tangent.tap_sources(i))
        return [followed.between([self.site.y], sources, g.leaves) for g in self.hidden_groups]
