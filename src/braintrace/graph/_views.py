"""Parts of a step that the records of the compiler show, as jaxprs.

A jaxpr here is the part of the step between two sets of its variables. What else it reads, and the
values at which a rule's paths end (outputs of trained operators, results of equations that mix
units), are its constants: `ModuleInfo.jaxpr_call` returns all of them by variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._errors import NotSupportedError, message
from ..program import Array, Equation, JaxVar, Program, Var, opened, section, variable
from ._influence import Influence
from ._pattern import Pattern
from ._sites import Site
from ._step import Step
from ._tangent import Tangent

Values = Sequence[Array] | Mapping[JaxVar, Array]


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
                raise NotSupportedError(not_apart(cut, "an equation that mixes units"))
            fixed.update(origin.outputs)
        exits = [step.exit(step.hidden[i]) for i in leaves]
        part = section(step.program, inputs, exits, fixed)
        if not self.crossing:
            around = opened(part, {s.equation: -1 for s in self.sites}.get)
            for eqn in around:
                raise NotSupportedError(not_apart(eqn, "a trained operator"))
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


def not_apart(eqn: Equation, what: str) -> str:
    return message(
        "the paths that the rule follows here are no jaxpr of their own.",
        where=eqn.where(),
        why=f"{what} is inside control flow or a custom derivative, part of which is followed",
        do="read the arrays instead: ETraceVjpGraphExecutor.solve_h2w_h2h_jacobian",
    )


def arranged(part: Program, values: Values) -> list[Array]:
    """Values of a part's constants: by variable, or in their order already."""
    if isinstance(values, Mapping):
        return [values[variable(v)] for v in part.consts]
    return list(values)
