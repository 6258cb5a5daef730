"""Rules whose traces belong to operators: a rule from functions of relations.

A relation is an operator whose weights reach a state. These rules see it through its `Steps` (x, f
and D of a block) and `Signals` (what reaches it from the losses), never the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.tree_util import tree_map

from ..engine import (
    Arrived,
    Block,
    Fresh,
    Grads,
    Rule,
    Signals,
    Steps,
    Values,
    observe_block,
    operands_pulled,
    signals_of,
)
from ..graph import Graph
from ..graph import HiddenParamOpRelation as Relation

Trace = Any
Relations = Sequence[Relation]
Kept = Callable[[Relation, Steps], Steps]


class RelationFunctions(NamedTuple):
    """What a rule does with relations.

    Attributes:
        init: `(relation, weights) -> trace` before the first step; `weights` are the operands.
        advance: `(relations, traces, steps, weights, fresh) -> traces` after the block.
        credit: `(relations, traces, steps, signals, weights, fresh) -> gradients` of the operands
            in the block that begins with these traces.
        prepare: `(relations, traces, steps) -> own` per relation, what both of these need.
    """

    init: Callable[[Relation, Grads], Trace]
    advance: Callable[
        [Relations, Sequence[Trace], Sequence[Steps], Sequence[Grads], Fresh], list[Trace]
    ]
    credit: Callable[
        [
            Relations,
            Sequence[Trace],
            Sequence[Steps],
            Sequence[Signals],
            Sequence[Grads],
            Fresh,
        ],
        list[Grads],
    ]
    prepare: Callable[[Relations, Sequence[Trace], Sequence[Steps]], list[Any]] | None = None


def relation_rule(
    functions: RelationFunctions,
    *,
    kept: Kept | None = None,
    takes_signal: bool = True,
    one_by_one: bool = False,
    **facts: Any,
) -> Rule:
    """A rule whose traces belong to relations.

    Args:
        functions: what it does with them.
        kept: `(relation, steps) -> steps` with another Jacobian in place of the step's own, or more
            slots.
        takes_signal: see `Rule`.
        one_by_one: see `Rule`.
        **facts: see `Rule`.
    """
    init, advance, credit, prepare = functions

    def init_all(graph: Graph, values: Values) -> list[Trace]:
        weights = graph.operands(values.consts, values.params)
        return [init(r, w) for r, w in zip(graph.relations, weights, strict=True)]

    def observe(graph: Graph, block: Block, traces: Sequence[Trace]) -> list[Steps]:
        steps = observe_block(graph, block)
        if kept is not None:
            steps = [kept(r, s) for r, s in zip(graph.relations, steps, strict=True)]
        if prepare is not None:
            own = prepare(graph.relations, traces, steps)
            steps = [s._replace(own=o) for s, o in zip(steps, own, strict=True)]
        return steps

    def advance_all(
        graph: Graph, block: Block, traces: Sequence[Trace], steps: list[Steps], fresh: Fresh
    ) -> list[Trace]:
        weights = graph.operands(block.consts, block.path.params)
        if not one_by_one or not steps:
            return advance(graph.relations, traces, steps, weights, fresh)

        def body(traces, now):
            now = tree_map(lambda a: a[None], now)
            return advance(graph.relations, traces, now, weights, None), None

        return lax.scan(body, list(traces), list(steps))[0]

    def credit_all(graph: Graph, arrived: Arrived) -> Any:
        steps = arrived.observed
        signals = signals_of(graph, arrived, steps)
        weights, pull = operands_pulled(graph, arrived.consts, arrived.params)
        return pull(credit(graph.relations, arrived.traces, steps, signals, weights, arrived.fresh))

    return Rule(
        init_all,
        lambda graph: [(r.index, r.weight_path) for r in graph.relations],
        advance_all,
        credit_all,
        observe,
        takes_signal=takes_signal,
        one_by_one=one_by_one,
        **facts,
    )
