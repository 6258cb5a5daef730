"""Where a derivative of a step may be infinite: what a tangent of zero must not be multiplied with.

The norm of a state that is zero has the derivative 0 / 0, and the root of it 1 / 0. A tangent that
is zero passes as zero, as reverse mode would not get there. Where a coefficient is finite for
certain, products stay as they are: a short analysis of signs shows it for 1 / (1 + v ** 2), for
rsqrt(mean(h ** 2) + eps), and for whatever is divided by a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..graph import Graph, Tangent, reach
from ..program import Atom, Const, Equation, Program, Var, bind, deep_equations, opened, run, trace

# Operands whose zeros (or negative values) make a value or its derivative infinite.
_SINGULAR = {
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt", "log", "pow", "atan2"), 0),
    **dict.fromkeys(("acos", "acosh", "asin", "atanh", "erf_inv", "lgamma", "digamma", "log1p"), 0),
    "div": 1,
    "integer_pow": 0,
}
_BOUNDED = {"tanh", "logistic", "sign", "erf", "eq", "ne", "lt", "le", "gt", "ge", "is_finite"}
_SAME_SIGN = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "copy", "copy_p"}
_SAME_SIGN |= {"reduce_sum", "reduce_max", "convert_element_type", "stop_gradient", "sqrt", "cbrt"}


@dataclass(slots=True)
class _Signs:
    """Values that are positive, and not negative, for certain: 2 and 1; others are not listed."""

    of: dict[Any, int] = field(default_factory=dict)

    def __call__(self, atom: Atom) -> int:
        if isinstance(atom, Const):
            value = np.asarray(atom.value)
            if value.dtype.kind not in "fiu" or not value.size:
                return 0
            return 2 if (value > 0).all() else int((value >= 0).all())
        return self.of.get(atom, 0)

    def add(self, eqn: Equation) -> None:
        signs = [self(a) for a in eqn.inputs]
        sign = 0
        if eqn.name in ("exp", "abs", "square", "logistic"):
            sign = max(1, signs[0] if eqn.name in ("abs", "square") else 1)
        elif eqn.name == "integer_pow" and eqn.params["y"] > 0:
            sign = max(signs[0], 1 - eqn.params["y"] % 2)
            # Of a product the weaker sign; of `h * h` at least 1.
        elif eqn.name == "mul":
            sign = min(signs) or int(eqn.inputs[0] is eqn.inputs[1])
        elif eqn.name == "div":
            sign = min(signs) if signs[1] == 2 else 0
        elif eqn.name == "rsqrt":
            sign = signs[0] if signs[0] == 2 else 0
        elif eqn.name in ("add", "add_any", "max"):
            sign = max(signs) if eqn.name == "max" or min(signs) else 0
        elif eqn.name in _SAME_SIGN:
            sign = signs[0]
        if sign:
            self.of[eqn.outputs[0]] = sign


def _is_singular(eqn: Equation, signs: _Signs) -> bool:
    """Whether a value or derivative of an equation may be infinite at finite operands."""
    if eqn.name not in _SINGULAR or (eqn.name == "integer_pow" and eqn.params["y"] >= 0):
        return False
    operand = eqn.inputs[_SINGULAR[eqn.name]]
    if isinstance(operand, Const) and eqn.name == "div":
        return not np.all(operand.value)
    if eqn.name in ("sqrt", "rsqrt", "cbrt", "log", "pow", "div", "integer_pow"):
        return signs(operand) < 2
    return eqn.name != "log1p" or signs(operand) < 1


@lru_cache(maxsize=128)
def guarded(tangent: Tangent) -> dict[Equation, int]:
    """Equations, in bodies too, that multiply a tangent with what may be infinite.

    And the position of the tangent among their operands.
    """
    return _guarded(tangent.program, tangent.sources)


def _guarded(program: Program, sources: Sequence[Var]) -> dict[Equation, int]:
    # h' = h / (1 + n) with n = sqrt(s), s = sum(h * h), pushed forward from h = 0 with dh = 0:
    #
    #     ds = sum(2 h dh)             0
    #     dn = ds / (2 n)              0 / 0: `div` by what may be zero, guarded, so dn = 0
    #     dr = -dn / (1 + n) ** 2      `div` by what is positive (`_Signs`), as it stands
    #     dh' = dh r + h dr            `mul` with r = 1 / (1 + n), which is finite, as it stands
    #
    # In a branch or a loop, JAX pushes values and tangents through one body; which of its variables
    # are tangents, and which may be infinite, is what reaches them.
    equations, signs = list(deep_equations(program)), _Signs()
    for eqn in equations:
        signs.add(eqn)
    tangents = reach(program, dict.fromkeys(sources, 1))
    moved = {e: [i for i, a in enumerate(e.inputs) if a in tangents] for e in equations}
    singular = {e for e in equations if _is_singular(e, signs)}
    seeds = {o: 1 for e in singular if not moved[e] for o in e.outputs}
    unbounded = lambda eqn: eqn.name not in _BOUNDED
    infinite = reach(program, seeds, differentiable=False, through=unbounded)
    out: dict[Equation, int] = {}
    for eqn, at in moved.items():
        if len(at) == 1 and len(eqn.inputs) == 2:
            by_infinite = eqn.name == "mul" and eqn.inputs[1 - at[0]] in infinite
            if by_infinite or (eqn.name == "div" and eqn in singular):
                out[eqn] = at[0]
    return out


@lru_cache(maxsize=128)
def _singular(program: Program) -> bool:
    signs = _Signs()
    for eqn in deep_equations(program):
        signs.add(eqn)
        if _is_singular(eqn, signs):
            return True
    return False


def singular(graph: Graph) -> bool:
    """Whether a derivative within a step may be infinite at some value of the states."""
    return bool(guarded(graph.tangent)) or _singular(graph.step.program)


def pushed(graph: Graph, function: Callable[..., Any], *primals: Any) -> Callable[..., Any]:
    """The forward derivative of a function of the step at a point, in which zero stays zero."""
    push = lambda *tangents: jax.jvp(function, primals, tangents)[1]
    if not singular(graph):
        return push
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), primals)
    tree = jax.tree.structure(jax.eval_shape(push, *shapes))
    program, consts = trace(push, *shapes)
    of_zero = _guarded(program, program.inputs)
    opens = opened(program, lambda e: -1 if e in of_zero else None)

    def apply(eqn: Equation, operands: list[Any], feed: Any) -> tuple[list[Any], dict]:
        outs = bind(eqn, operands)
        return (zero_stays(operands[of_zero[eqn]], outs) if eqn in of_zero else outs), {}

    def evaluated(*tangents: Any) -> Any:
        outs, _ = run(program, consts, jax.tree.leaves(tangents), apply, opens)
        return jax.tree.unflatten(tree, outs)

    return evaluated


def zero_stays(tangent: Array, outs: Sequence[Array]) -> list[Array]:
    """The results of a product with a tangent, zero where that is."""
    return [jnp.where(tangent == 0, jnp.zeros((), o.dtype), o) for o in outs]
