"""Weights with a factor that varies: `matmul(x, W * mask)` as one operator of x, W and the mask.

An operand may depend on parameters and on values that differ from step to step. As long as no
state enters it along a derivative, dy/dW needs no past, and the operator has an ordinary trace. So
the equations between the last values that depend on parameters alone and the operator become part
of the operator. These values are its weights; whatever else enters is a *factor*, an input that is
recorded at every step with x:

    c = u > 0;  v = W * c;  y = matmul(x, v)        is        y = folded(x, W, c)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import ETPPrimitive, Operator, Rules, tied_axes
from ..program import Atom, Equation, Program, Var, evaluate, is_inexact, prune, section, shape_of
from ._reach import bits_of, reach, union_of
from ._sites import Around, Flow, Site, wraps_operator
from ._step import Step

Is = Callable[[Atom], bool]


@dataclass(frozen=True, slots=True)
class Kinds:
    """What a value depends on: parameters, anything that varies from step to step, states."""

    trained: Is
    varies: Is
    entered: Is

    def weight(self, atom: Atom) -> bool:
        """Whether a value depends on parameters alone."""
        return self.trained(atom) and not self.varies(atom)


def kinds_of(step: Step, flow: Flow, trained: Mapping[Var, int]) -> Callable[[Around], Kinds]:
    """The kinds of the values in a body of the step; `trained` masks what counts as trained."""
    entered = reach(step.program, {step.entry(leaf): 1 for leaf in step.hidden})
    return lambda around: Kinds(
        trained=lambda a: bool(bits_of(a, trained)),
        varies=lambda a: flow.varies(a, around),
        entered=lambda a: bool(bits_of(a, entered)),
    )


def in_all_bodies(step: Step, rewrite: Callable[[Program, Around], Program]) -> Step:
    """The step with its program, and before it those in bodies of control flow, rewritten."""

    def inside(program: Program, around: Around) -> Program:
        new = {}
        for eqn in program.equations:
            bodies = [(b, inside(b.program, (*around, (eqn, k)))) for k, b in enumerate(eqn.bodies)]
            if any(b.program is not p for b, p in bodies):
                new[eqn] = replace(eqn, bodies=tuple(replace(b, program=p) for b, p in bodies))
        return rewrite(replaced(program, new), around)

    program = inside(step.program, ())
    return step if program is step.program else replace(step, program=program)


def fold_step(step: Step, flow: Flow, sites: Sequence[Site]) -> Step:
    """The step with such operators folded, the same if there are none."""
    unsteady = [s for s in sites if s.trained and not s.steady]
    if not unsteady:
        return step
    fed = reach(step.program, {s.y: 1 << i for i, s in enumerate(unsteady)})
    reached = union_of(bits_of(step.exit(leaf), fed) for leaf in step.hidden)
    targets = {s.equation for i, s in enumerate(unsteady) if reached >> i & 1}
    kinds = kinds_of(step, flow, flow.trained)

    def rewrite(program: Program, around: Around) -> Program:
        return replaced(program, folded_equations(program, targets, kinds(around)))

    return in_all_bodies(step, rewrite)


def replaced(program: Program, new: dict[Equation, Equation]) -> Program:
    """The program with other equations, without those that nothing needs any more."""
    if not new:
        return program
    return prune(replace(program, equations=tuple(new.get(e, e) for e in program.equations)))


def folded_equations(
    program: Program, targets: Collection[Equation], kinds: Kinds
) -> dict[Equation, Equation]:
    """Of the target operators those that can be folded, and what takes their place."""
    operators = [e for e in program.equations if isinstance(e.primitive, ETPPrimitive)]
    new = {e: folded(e, program, kinds) for e in operators if e in targets}
    return {e: one for e, one in new.items() if one is not None}


def folded(eqn: Equation, program: Program, kinds: Kinds) -> Equation | None:
    """The operator with the varying factors of its operands inside; None if that is impossible."""
    skip: set[Var] = set()
    while True:
        # `y = x @ (c * roll(w, i))` with c = u > 0 and i a counter. Back from the operator:
        #
        #     v = c * r         varies, leads to w             part of the operator
        #     r = roll(w, i)    varies, leads to w             part of the operator
        #     w                 depends on parameters alone    its weight: a trace in w
        #     c, i              lead to no weight              factors, recorded with x
        #
        # If r makes dy/dw as large as (outputs, elements of w), since every output may read every
        # element (`_spreads`), w counts as a factor in the next attempt (`skip`), so that nothing
        # of r is absorbed; an operator left without a weight stays as it is.
        cone = _Cone(eqn, program, kinds, skip)
        weights = [*cone.new.values(), *(eqn.inputs[i] for i in cone.steady.values())]
        if not any(map(kinds.trained, weights)) or any(map(kinds.entered, cone.factors)):
            return None
        new = cone.equation()
        operator = Operator.of(new.primitive, {}, new.inputs, new.outputs[0])
        large = {v for k, v in cone.new.items() if _spreads(cone, operator, k)}
        if not large:
            return new
        skip |= large


def _spreads(cone: _Cone, operator: Operator, key: str) -> bool:
    """Whether a trace would have all output elements apart, and be larger than the operator's."""
    if prod(operator.free_shape(key)) < prod(operator.y.shape):
        return False
    own = max(prod(cone.operator.trace_shape(k)) for k in cone.operator.shapes)
    return prod(operator.trace_shape(key)) > own


def _absorbs(eqn: Equation) -> bool:
    """Whether an equation may become part of an operator."""
    apart = isinstance(eqn.primitive, ETPPrimitive) or eqn.name == "custom_vjp_call"
    return not (apart or eqn.bodies or eqn.effects or wraps_operator(eqn))


class _Cone:
    """The equations between steady values and an operator.

    `varying` are the operator's operands that vary; `new` the weights behind them, and `behind` the
    one of these each belongs to (None if it is more than one), `of` the first; `skip` are values
    that count as factors though they depend on parameters.
    """

    def __init__(self, eqn: Equation, program: Program, kinds: Kinds, skip: Collection[Var]):
        self.own = eqn
        self.operator = Operator.of(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs[0])
        positions = self.operator.positions
        self.varying = {k: i for k, i in positions.items() if kinds.varies(eqn.inputs[i])}
        self.steady = {k: i for k, i in positions.items() if k not in self.varying}
        values = [o for e in program.equations for o in e.outputs]
        values = [*program.consts, *program.inputs, *values]
        weights = {v for v in values if kinds.weight(v) and v not in skip}
        absorbed = (e for e in program.equations if _absorbs(e))
        inside = {o for e in absorbed for o in e.outputs if kinds.trained(o) and kinds.varies(o)}
        fixed = {v for v in values if v not in inside}
        parts = {
            k: section(program, [*weights], [eqn.inputs[i]], fixed) for k, i in self.varying.items()
        }
        equations = {e for part in parts.values() for e in part.equations}
        self.equations = [e for e in program.equations if e in equations]
        self.factors = dict.fromkeys(v for part in parts.values() for v in part.consts)
        self.new: dict[str, Var] = {}
        self.behind: dict[str, str | None] = {}
        self.of: dict[str, str] = {}
        for key, part in parts.items():
            for v in part.read:
                if isinstance(v, Var) and v in weights:
                    self._weight(key, v)

    def _weight(self, key: str, var: Var) -> None:
        for name, weight in self.new.items():
            if weight is var:
                self.behind[name] = key if self.behind[name] == key else None
                return
        taken = {*self.steady, *self.new}
        names = (key, *(f"{key}_{n}" for n in range(1, 2 + len(taken))))
        name = next(n for n in names if n not in taken)
        self.new[name], self.behind[name], self.of[name] = var, key, key

    # ----------------------------------------------------------------------------- the operator

    def equation(self) -> Equation:
        """The operator with all of this inside."""
        eqn, at = self.own, self.own.primitive.x_invar_index
        own_inputs = [*([] if at is None else [at]), *self.steady.values()]
        inside = {i: Var(eqn.inputs[i].shape, eqn.inputs[i].dtype) for i in own_inputs}
        rest = (*self.new.values(), *self.factors)
        outputs = tuple(inside.get(i, a) for i, a in enumerate(eqn.inputs))
        operands = Program((), (*inside.values(), *rest), (*self.equations,), outputs)
        function = eqn.primitive.apply(eqn.params)
        n_x = len(own_inputs) - len(self.steady)
        places = {k: n_x + i for i, k in enumerate((*self.steady, *self.new))}
        order = [*self.operator.positions]  # the weight stays before the bias
        at_place = lambda k: order.index(self.of[k] if k in self.of else k)
        names = {k: places[k] for k in sorted(places, key=at_place)}
        primitive = ETPPrimitive(
            eqn.name,
            lambda *args: function(*evaluate(operands, (), args)),
            trainable_invars_fn=lambda params: names,
            x_invar_index=None if at is None else 0,
            factor_invars=tuple(range(n_x + len(names), len(operands.inputs))),
        )
        inputs = (*(eqn.inputs[i] for i in own_inputs), *rest)
        primitive.rules = self._rules(Operator.of(primitive, {}, inputs, eqn.outputs[0]))
        return replace(eqn, primitive=primitive, inputs=inputs, params={})

    def _rules(self, folded: Operator) -> Rules:
        """dy/dw as the operator's own dy/dv, v its operand, times dv/dw, where that is possible."""
        # In coordinates of the trace (`_ties`): of y = x @ v the element v_ij meets y_j alone, so
        # dy/dv is one number x_i per element, and dy/dw = x_i dv_ij/dw_ij is one, too, if every v
        # reads the w at its own place (`same`), or if w has the free axes that v has. What
        # is not of this form has no rules here: autodiff derives them, from y by w as a whole.
        own, rules = self.operator, self.operator.primitive.rules
        values = [*self.new.values(), *self.factors, *self.own.outputs]
        other = rules.effective is not None and own.plain  # the operator's weights are not v
        affine = own.is_affine and folded.is_affine
        if other or not affine or any(v.is_complex for v in values):
            return Rules()
        at = {k: v for k, v in self.behind.items() if v is not None}
        placed = rules.spread is not None and own.plain
        same = {k: self._keeps_axes(k) for k in at}
        fits = [
            same[k] if placed else folded.free_axes(k) == own.free_axes(v) for k, v in at.items()
        ]
        if len(at) < len(self.behind) or not all(fits):
            return Rules()
        steady = [k for k in self.steady if is_inexact(own.shapes[k].dtype)]
        keys = list(dict.fromkeys([*steady, *at.values()]))

        def features(recorded: Any, shapes: Any) -> dict[str, Any]:
            x, *factors = recorded
            unread = {k: jnp.zeros(s.shape, s.dtype) for k, s in own.shapes.items()}
            by_operand = own.features(x, unread, keys)
            chained = {k: self._chained(k, by_operand[v], factors, same[k]) for k, v in at.items()}
            return {**{k: by_operand[k] for k in steady}, **chained}

        if not placed:
            return Rules(features=features)
        here = {k: k for k in self.steady}
        return Rules(
            features=features,
            spread=lambda key, values, lead: own.spread({**here, **at}[key], values, lead),
            free=lambda key, y_shape: own.free_shape({**here, **at}[key]),
        )

    def _chained(self, key: str, by_operand: Any, factors: Sequence[Any], same: bool) -> Any:
        """dy/dw of a weight from dy/dv of the operand, both in coordinates of the trace."""
        own, behind, w = self.operator, self.of[key], self.new[key]
        operand = own.shapes[behind]
        operand_of = lambda w: self._operand(key, w, factors)
        _, pull = jax.vjp(operand_of, jnp.zeros(w.shape, w.dtype))
        # Two inputs, one output, v = w * c, y = x @ v: dy/dv = [x1, x2], and dv_i/dw_i = c_i, so
        # dy/dw = [x1 c1, x2 c2]: a product of arrays where each v reads its own w only. Where it
        # reads others, v = w @ C, every row of dy/dv is pulled back: dy/dw_k = sum_i x_i C_ki.
        if same:  # dv/dw is diagonal
            return by_operand * pull(jnp.ones(operand.shape, operand.dtype))[0]
        full = jnp.broadcast_to(by_operand, own.trace_shape(behind)).astype(operand.dtype)
        each = jax.vmap(lambda a: pull(a)[0])(full.reshape((-1, *operand.shape)))
        return each.reshape((*own.free_shape(behind), *w.shape))

    def _operand(self, key: str, weight: Any, factors: Sequence[Any]) -> Any:
        """The operand that a weight is behind of, as a function of this weight."""
        zeros = {k: jnp.zeros(v.shape, v.dtype) for k, v in self.new.items()}
        target = self.own.inputs[self.varying[self.of[key]]]
        program = Program((), (*self.new.values(), *self.factors), (*self.equations,), (target,))
        return evaluate(program, (), [*{**zeros, key: weight}.values(), *factors])[0]

    def _keeps_axes(self, key: str) -> bool:
        """Whether each element of the operand reads the element of the weight at its place only."""
        shapes = [shape_of(v) for v in (self.new[key], *self.factors)]
        fun = lambda weight, *factors: self._operand(key, weight, factors)
        pairs = tied_axes(fun, tuple(shapes), 0)
        rank = len(self.new[key].shape)
        whole = jax.eval_shape(fun, *shapes).shape == self.new[key].shape
        return whole and set(pairs) == {(i, i) for i in range(rank)}
