"""How the equations of a step are applied: as they are, or with something held constant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax import lax

from braintrace.program import Equation, bind, bind_forward

from ._structure import Structure

Feedback = Mapping[Equation, Mapping[int, Any]]
"""Per operator and operand what replaces it in the derivative by the operator's input."""
Values = list[Any]

constant = lax.stop_gradient


class Variants:
    """The detached variants of a step, and its Jacobian: a `while` has no reverse mode."""

    def __init__(self, step: Structure, feedback: Feedback):
        self.step, self.feedback = step, feedback
        self.inputs = {o.equation: o.x_at for o in step.operators}
        self.factors = {o.equation: o.factors for o in step.operators}
        self.trained = {o.equation: o.trained for o in step.traced}
        self.bind: Any = bind_forward if step.loops else bind
        self.jacobian: Any = jax.jacfwd if step.loops else jax.jacrev

    def plain(self, eqn: Equation, values: Values) -> Values:
        """As it is, but for random feedback."""
        if eqn not in self.feedback:
            return self.bind(eqn, values)
        x = self.inputs[eqn]
        ahead = self.bind(eqn, [constant(v) if i == x else v for i, v in enumerate(values)])
        other = [self.feedback[eqn].get(i, v) for i, v in enumerate(values)]
        back = self.bind(eqn, [v if i == x else constant(v) for i, v in enumerate(other)])
        return [a + b - constant(b) for a, b in zip(ahead, back, strict=True)]

    def kept(self, eqn: Equation, values: Values) -> Values:
        """Along kept paths."""
        if eqn in self.inputs:
            return constant(self.plain(eqn, values))
        held = [i for i in range(len(values)) if (eqn, i) in self.step.held]
        return self._without(eqn, values, held)

    def outside_operators(self, eqn: Equation, values: Values) -> Values:
        """Along all paths that cross no operator."""
        outs = self.plain(eqn, values)
        return constant(outs) if eqn in self.inputs else outs

    def without_input(
        self, equations: Collection[Equation]
    ) -> Callable[[Equation, Values], Values]:
        """With the inputs of these operators held constant."""
        return lambda eqn, values: self._without(
            eqn, values, [self.inputs[eqn], *self.factors[eqn]] if eqn in equations else []
        )

    def without_operands(self, eqn: Equation, values: Values) -> Values:
        """With the operands of the traced operators held constant."""
        return self._without(eqn, values, self.trained.get(eqn, ()))

    def _without(self, eqn: Equation, values: Values, places: Collection[int | None]) -> Values:
        return self.plain(eqn, [constant(v) if i in places else v for i, v in enumerate(values)])
