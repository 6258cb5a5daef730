"""A step, or a window of steps, whose ordinary derivative is the learning rule's gradient.

The memory of a rule enters as an identity on the entry states with a derivative of its own: the
cotangent `lam` that reaches it becomes <lam, trace> on the parameters, and nothing goes on to the
past. Everything else is ordinary reverse mode inside the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._control import Apply, bind_quietly, run
from .._jaxpr import Equation, bind
from ..graph import Graph, bind_reversible, split_cotangents
from ..rules import Forward, Rule
from ._forward import forward_advance, forward_init, forward_remember
from ._observe import Observation, observe
from ._tied import tied
from ._worlds import evaluate_cut, evaluate_sealed

Array = jax.Array


@dataclass(frozen=True, slots=True)
class Values:
    """The arrays of a step: closed-over constants, arguments, and the three kinds of state."""

    consts: tuple[Any, ...]
    args: tuple[Any, ...]
    params: tuple[Any, ...]
    hidden: tuple[Any, ...]
    others: tuple[Any, ...]


jax.tree_util.register_dataclass(
    Values, data_fields=["consts", "args", "params", "hidden", "others"], meta_fields=[]
)


def init_traces(graph: Graph, rule: Rule | Forward, values: Values) -> list[Any]:
    """Traces before the first step."""
    if isinstance(rule, Forward):
        return forward_init(graph, values.params)
    weights = graph.operands(values.consts, values.params)
    return [rule.init(r, w) for r, w in zip(graph.relations, weights, strict=True)]


def single_step(
    graph: Graph, rule: Rule | Forward, values: Values, traces: Sequence[Any]
) -> tuple[list[Any], Values, list[Any]]:
    """One step with recurrent entries cut; returns (outputs, values with new states, traces)."""
    if isinstance(rule, Forward):  # everything is kept, so nothing is cut
        return window_step(graph, rule, enter_window(graph, rule, values, traces), traces)
    before = lax.stop_gradient(list(traces))
    seen = _observed(graph, values)
    after = _advance(graph, rule, values, before, seen)
    if rule.carry is not None:
        return (*_sealed_step(graph, rule, values, before, seen), after)
    entry = _remember(graph, rule, values, before, after)
    inputs = inputs_of(graph, values, entry)
    taps = _taps(graph, rule, values, after)
    outs = evaluate_cut(graph, values.consts, inputs, _applied(graph, taps), taps)
    return (*_outputs(graph, values, outs), after)


def _sealed_step(
    graph: Graph, rule: Rule, values: Values, before: list[Any], seen: list[Observation]
) -> tuple[list[Any], Values]:
    """A step of a rule with its own D: credit to the past passes the new states through that D."""
    step = graph.step
    still: Values = lax.stop_gradient(values)
    weights = graph.operands(still.consts, still.params)
    assert rule.carry is not None
    moved = [
        rule.carry(r, eps, o.D, w)
        for r, eps, o, w in zip(graph.relations, before, seen, weights, strict=True)
    ]
    made = {o for eqn in step.program.equations for o in eqn.outputs}
    hooks: dict[Any, Any] = {}
    for k, leaf in enumerate(step.hidden):
        var = step.exit(leaf)
        if var in made and var not in hooks:  # one value in two states moves both of their slots
            hooks[var] = lambda value, k=k: _credited(graph, rule, values, moved, k, value)
    entry = _remember(graph, rule, values, before, None)
    inputs = inputs_of(graph, values, entry)
    outs = evaluate_sealed(graph, values.consts, inputs, _applied(graph, {}), {}, hooks)
    return _outputs(graph, values, outs)


def window_step(
    graph: Graph, rule: Rule | Forward | None, values: Values, traces: Sequence[Any]
) -> tuple[list[Any], Values, list[Any]]:
    """One step inside a window: nothing is cut, nothing is remembered; no rule, no traces."""
    before = lax.stop_gradient(list(traces))
    if rule is None:
        after = []
    elif isinstance(rule, Forward):
        run_step = lambda params, hidden: _new_hidden(graph, values, params, hidden)
        after = forward_advance(graph, rule, values.params, values.hidden, before, run_step)
    else:
        after = _advance(graph, rule, values, before, _observed(graph, values))
    outs = plain_step(graph, values.consts, inputs_of(graph, values))
    return (*_outputs(graph, values, outs), after)


def _new_hidden(graph: Graph, values: Values, params: Any, hidden: Any) -> list[Any]:
    """The new hidden states as a function that can be differentiated forward."""
    still: Values = lax.stop_gradient(values)
    inputs = inputs_of(graph, Values(still.consts, still.args, params, hidden, still.others))
    apply: Apply = lambda eqn, operands, feed: (bind_quietly(eqn, operands), {})
    outs = run(graph.step.program, still.consts, inputs, apply, graph.custom)[0]
    return [outs[leaf.output] for leaf in graph.step.hidden]


def plain_step(graph: Graph, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The step itself, with a reverse mode through every `while`."""
    apply: Apply = lambda eqn, operands, feed: (bind_reversible(eqn, operands), {})
    return run(graph.step.program, consts, inputs, apply, graph.whiles)[0]


def enter_window(
    graph: Graph, rule: Rule | Forward, values: Values, traces: Sequence[Any]
) -> Values:
    """The entry states of a window, remembering what the traces hold."""
    before = lax.stop_gradient(list(traces))
    if isinstance(rule, Forward):
        hidden = forward_remember(graph, values.params, values.hidden, before)
    else:
        hidden = _remember(graph, rule, values, before, None)
    return Values(values.consts, values.args, values.params, hidden, values.others)


def sequence(
    graph: Graph,
    rule: Rule | Forward,
    values: Values,
    traces: list,
    timed: tuple[bool, ...],
    single: bool,
) -> tuple[list, Values, list]:
    """Several steps: one entry for all of them, or one per step under a single-step rule.

    `timed` says which arguments have a leading axis of steps; outputs are stacked over them.
    """
    entry = values if single else enter_window(graph, rule, values, traces)
    moving = [a for a, t in zip(values.args, timed, strict=True) if t]

    def body(carry, slices):
        hidden, others, traces = carry
        slices = iter(slices)
        args = tuple(next(slices) if t else a for a, t in zip(values.args, timed, strict=True))
        now = Values(values.consts, args, values.params, hidden, others)
        outs, new, traces = (single_step if single else window_step)(graph, rule, now, traces)
        return (new.hidden, new.others, traces), outs

    start = (entry.hidden, entry.others, list(traces))
    (hidden, others, traces), outs = lax.scan(body, start, moving)
    return outs, Values(values.consts, values.args, values.params, hidden, others), traces


def inputs_of(graph: Graph, values: Values, hidden: Sequence[Any] | None = None) -> list[Any]:
    """The program's flat inputs, with other entry states if `hidden` is given."""
    step = graph.step
    hidden = values.hidden if hidden is None else hidden
    inputs: list[Any] = [None] * len(step.program.inputs)
    inputs[: step.n_args] = values.args
    for leaves, arrays in (
        (step.params, values.params),
        (step.hidden, hidden),
        (step.others, values.others),
    ):
        for leaf, array in zip(leaves, arrays, strict=True):
            inputs[leaf.position] = array
    return inputs


def _outputs(graph: Graph, values: Values, outs: list[Any]) -> tuple[list[Any], Values]:
    step = graph.step
    new = Values(
        values.consts,
        values.args,
        values.params,
        tuple(outs[leaf.output] for leaf in step.hidden),
        tuple(outs[leaf.output] for leaf in step.others),
    )
    return outs[: step.n_outs], new


def _observed(graph: Graph, values: Values) -> list[Observation]:
    still: Values = lax.stop_gradient(values)
    return observe(graph, still.consts, inputs_of(graph, still))


def _advance(
    graph: Graph, rule: Rule, values: Values, traces: list[Any], seen: list[Observation]
) -> list[Any]:
    still: Values = lax.stop_gradient(values)
    weights = graph.operands(still.consts, still.params)
    return [
        rule.advance(r, eps, o.x, o.f, o.D, w)
        for r, eps, o, w in zip(graph.relations, traces, seen, weights, strict=True)
    ]


def _remember(
    graph: Graph, rule: Rule, values: Values, before: list[Any], after: list[Any] | None
) -> tuple[Any, ...]:
    """The entry states; their cotangent goes to the parameters, nothing to the past."""

    @jax.custom_vjp
    def remember(params, hidden, saved):
        return tied(hidden, params, saved)

    def forward(params, hidden, saved):
        return tied(hidden, params, saved), (params, hidden, saved)

    def backward(kept, cotangents):
        params, hidden, (consts, before, after) = kept

        def recall(i, r, at, weights):
            if after is None:
                return rule.recall_window(r, before[i], at, weights)
            return rule.recall(r, before[i], after[i], at, weights)

        grads = _pulled(graph, consts, params, cotangents, recall)
        return grads, tuple(jnp.zeros_like(h) for h in hidden), None

    remember.defvjp(forward, backward)
    if not graph.relations:
        return lax.stop_gradient(values.hidden)
    saved = lax.stop_gradient((values.consts, before, after))
    return remember(values.params, values.hidden, saved)


def _credited(
    graph: Graph, rule: Rule, values: Values, moved: list[Any], leaf: int, value: Any
) -> Any:
    """The new value of a state; its cotangent also meets what the past has moved it by."""

    @jax.custom_vjp
    def credited(params, value, saved):
        return tied(value, params, saved)

    def forward(params, value, saved):
        return tied(value, params, saved), (params, saved)

    def backward(kept, cotangent):
        params, (consts, moved) = kept
        shapes = [graph.step.entry(leaf) for leaf in graph.step.hidden]
        cotangents = [jnp.zeros(v.shape, v.dtype) for v in shapes]
        cotangents[leaf] = cotangent
        recall = lambda i, r, at, weights: rule.recall_window(r, moved[i], at, weights)
        return _pulled(graph, consts, params, cotangents, recall), cotangent, None

    credited.defvjp(forward, backward)
    if not graph.relations:
        return value
    return credited(values.params, value, lax.stop_gradient((values.consts, moved)))


def _pulled(graph: Graph, consts: Any, params: Any, cotangents: Any, recall: Any) -> Any:
    """Gradients of the parameters from cotangents of states and what a rule makes of them."""

    def traced(p):
        found = graph.operands(consts, p)
        pairs = zip(graph.relations, found, strict=True)
        return [{k: w[k] for k in r.keys} for r, w in pairs], found

    _, pull, weights = jax.vjp(traced, params, has_aux=True)
    lam = split_cotangents(graph.tangent.components, cotangents)
    dtype = jnp.result_type(*lam)
    grads = []
    for i, r in enumerate(graph.relations):
        at = jnp.stack([pick(lam, dtype) for pick in r.slots.at], -1)
        grads.append(recall(i, r, at, weights[i]))
    return pull(grads)[0]


def _taps(graph: Graph, rule: Rule, values: Values, after: list[Any]) -> dict[int, Array]:
    """Zeros added to the operators' outputs whose cotangent becomes the rule's weight gradient."""
    if rule.tap is None:
        return {}
    return {r.index: _tap(graph, rule, values, r, after[r.index]) for r in graph.relations}


def _tap(graph: Graph, rule: Rule, values: Values, r: Any, after: Any) -> Array:
    y = r.operator.y
    shape = y.shape if r.site.turns is None else (r.site.turns, *y.shape)

    @jax.custom_vjp
    def zeros(params, saved):
        return tied(jnp.zeros(shape, y.dtype), params, saved)

    def forward(params, saved):
        return zeros(params, saved), (params, saved)

    def backward(kept, ct):
        params, (consts, after) = kept

        def traced(p):
            found = graph.operands(consts, p)[r.index]
            return {k: found[k] for k in r.keys}, found

        _, pull, weights = jax.vjp(traced, params, has_aux=True)
        assert rule.tap is not None
        return pull(rule.tap(r, after, ct, weights))[0], None

    zeros.defvjp(forward, backward)
    return r.site.inward(zeros(values.params, lax.stop_gradient((values.consts, after))))


def _applied(graph: Graph, taps: dict[int, Array]):
    """How to apply an equation: a tapped operator passes no gradient to its weights."""
    relation_of = {r.site.equation: r for r in graph.relations if r.index in taps}

    def apply(eqn: Equation, operands: list[Any], feed: Any) -> tuple[list[Any], dict]:
        r = relation_of.get(eqn)
        if r is None:
            return bind_reversible(eqn, operands), {}
        still = [i for k, i in r.operator.positions.items() if r.site.leaves[k]]
        operands = [lax.stop_gradient(v) if i in still else v for i, v in enumerate(operands)]
        (y,) = bind(eqn, operands)
        return [y + feed[r.index].astype(y.dtype)], {}

    return apply
