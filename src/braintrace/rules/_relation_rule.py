"""Rules whose traces belong to operators: a rule from functions of relations.

A relation is an operator whose weights reach a state. These rules see it through its `Steps` (x, f
and D of a block) and `Signals` (what reaches it from the losses), never the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import tree_map

from ..engine import (
    Arrived,
    Backward,
    Block,
    Fresh,
    Grads,
    Rule,
    Signals,
    Steps,
    Transition,
    Values,
    observe_block,
    operands_pulled,
    signals_of,
    singular,
)
from ..graph import Graph, trace_names
from ..graph import HiddenParamOpRelation as Relation

Trace = Any
NO_STEPS: Any = None  # where only traces are put together
Kept = Callable[[Relation, Steps], Steps]


class RelationBlock(NamedTuple):
    """One relation in a block: its trace before it, what it did, and its operands."""

    relation: Relation
    trace: Trace
    steps: Steps
    weights: Grads
    singular: bool  # whether derivatives within the step may be infinite
    slopes: Grads  # of weights whose trace is in the coordinates of their parameter

    @property
    def table(self) -> bool:
        """Whether there are so many slots that D is a table."""
        return self.relation.slots.table is not None

    @property
    def transition(self) -> Transition:
        """D of all steps."""
        return self.map(self.steps.D)

    def map(self, jacobian: Array) -> Transition:
        """A map between the slots from its array."""
        return Transition.of(jacobian, self.table, self.singular)


Blocks = Sequence[RelationBlock]


class RelationsBackward(NamedTuple):
    """How a rule takes blocks backward, see `engine.Backward`; arrays are per space of slots.

    Attributes:
        adjoints: `(relations, dtype) -> arrays` of zeros, after the last block.
        moves: `relations -> arrays`, maps that leave everything as it is.
        credit: `(blocks, signals, adjoints after) -> (gradients, adjoints before)`.
        read: `(blocks, adjoints, fresh) -> gradients` from what the traces hold.
        deposits: `(blocks, moves) -> (moves, deposits per relation)`.
        put: `(blocks, moves, deposits, fresh) -> traces`.
    """

    adjoints: Callable[[Sequence[Relation], Any], list[Array]]
    moves: Callable[[Sequence[Relation]], list[Array]]
    credit: Callable[[Blocks, Sequence[Signals], list[Array]], tuple[list[Grads], list[Array]]]
    read: Callable[[Blocks, list[Array], Fresh], list[Grads]]
    deposits: Callable[[Blocks, list[Array]], tuple[list[Array], list]]
    put: Callable[[Blocks, list[Array], list, Fresh], list[Trace]]


class RelationFunctions(NamedTuple):
    """What a rule does with relations.

    Attributes:
        init: `(relation, weights) -> trace` before the first step; `weights` are the operands.
        advance: `(blocks, fresh) -> traces` after the block.
        credit: `(blocks, signals, fresh) -> gradients` of the operands in the block.
        prepare: `blocks -> arrays` per relation, `Steps.prepared` for both of these.
        backward: how it takes blocks backward, if it can.
    """

    init: Callable[[Relation, Grads], Trace]
    advance: Callable[[Blocks, Fresh], list[Trace]]
    credit: Callable[[Blocks, Sequence[Signals], Fresh], list[Grads]]
    prepare: Callable[[Blocks], list] | None = None
    backward: RelationsBackward | None = None


def relation_rule(
    functions: RelationFunctions,
    *,
    kept: Kept | None = None,
    of_parameters: bool = False,
    takes_signal: bool = True,
    one_by_one: bool = False,
    **facts: Any,
) -> Rule:
    """A rule whose traces belong to relations.

    Args:
        functions: what it does with them.
        kept: `(relation, steps) -> steps` with another Jacobian in place of the step's own, or more
            slots.
        of_parameters: whether the traces of weights that are element-wise functions of a parameter
            belong to that: gradients of these are its own.
        takes_signal, one_by_one, **facts: see `Rule`.
    """
    of_graph = OfGraph(functions, kept, of_parameters, one_by_one)
    backward = functions.backward
    return Rule(
        of_graph.init,
        lambda graph: [(r.index, r.weight_path) for r in graph.relations],
        of_graph.advance,
        of_graph.credit,
        of_graph.observe,
        names=lambda graph: list(trace_names(graph)),
        takes_signal=takes_signal,
        one_by_one=one_by_one,
        backward=None if backward is None else OfGraphBackward(of_graph, backward).record(),
        **facts,
    )


@dataclass(frozen=True, eq=False, slots=True)
class OfGraph:
    """The functions of relations, as those of a graph that the engine calls; see `Rule`."""

    functions: RelationFunctions
    kept: Kept | None
    of_parameters: bool
    one_by_one: bool

    def init(self, graph: Graph, values: Values) -> list[Trace]:
        weights = graph.operands(values.consts, values.params)
        pairs = zip(graph.relations, weights, strict=True)
        return [self.functions.init(r, w) for r, w in pairs]

    def observe(self, graph: Graph, block: Block, traces: Sequence[Trace]) -> list[Steps]:
        steps = observe_block(graph, block)
        kept, prepare = self.kept, self.functions.prepare
        if kept is not None:
            steps = [kept(r, s) for r, s in zip(graph.relations, steps, strict=True)]
        at_outputs = self.slopes(graph, block.consts, block.path.params)[0]
        steps = [_steeper(s, slope) for s, slope in zip(steps, at_outputs, strict=True)]
        if prepare is not None:
            prepared = prepare(_blocks(graph, traces, steps, *[[{}] * len(steps)] * 2))
            steps = [s._replace(prepared=p) for s, p in zip(steps, prepared, strict=True)]
        return steps

    def advance(
        self,
        graph: Graph,
        block: Block,
        traces: Sequence[Trace],
        steps: list[Steps],
        fresh: Fresh,
    ) -> list[Trace]:
        weights = graph.operands(block.consts, block.path.params)
        slopes = self.slopes(graph, block.consts, block.path.params)[1]

        def run(traces: Sequence[Trace], steps: Sequence[Steps], fresh: Fresh) -> list[Trace]:
            return self.functions.advance(_blocks(graph, traces, steps, weights, slopes), fresh)

        if not self.one_by_one or not steps:
            return run(traces, steps, fresh)
        one = lambda traces, now: (run(traces, tree_map(lambda a: a[None], now), None), None)
        steps = [s._replace(slots=None) for s in steps]
        every = lambda s: s._replace(D=jnp.broadcast_to(s.D, (len(s.f), *s.D.shape[1:])))
        return lax.scan(one, list(traces), list(map(every, steps)))[0]

    def credit(self, graph: Graph, arrived: Arrived) -> Any:
        blocks, signals, pulled = self.met(graph, arrived)
        return pulled(self.functions.credit(blocks, signals, arrived.fresh))

    def met(self, graph: Graph, arrived: Arrived) -> tuple[Blocks, list[Signals], Callable]:
        """Relations, what reaches them, and from gradients of their operands to parameters'."""
        steps = arrived.observed
        signals = signals_of(graph, arrived, steps)
        at_outputs = self.slopes(graph, arrived.consts, arrived.params)[0]
        pairs = zip(signals, at_outputs, strict=True)
        signals = [s if slope is None else s._replace(ct=s.ct * slope) for s, slope in pairs]
        blocks, pulled = self.read(graph, arrived.consts, arrived.params, arrived.traces, steps)
        return blocks, signals, pulled

    def read(
        self, graph: Graph, consts: Any, params: Any, traces: Sequence[Trace], steps: Sequence[Any]
    ) -> tuple[Blocks, Callable]:
        """Relations at these parameters, and from gradients of their operands to parameters'."""
        weights, pull = operands_pulled(graph, consts, params)
        blocks = _blocks(graph, traces, steps, weights, self.slopes(graph, consts, params)[1])
        if not self.of_parameters:
            return blocks, pull
        return blocks, lambda grads: _pulled_back(graph, grads, pull)

    def slopes(
        self, graph: Graph, consts: Any, params: Any
    ) -> tuple[list[Array | None], list[Grads]]:
        """Slopes that meet the outputs of an operator, which are its weight, and the others."""
        if not self.of_parameters:
            return [None for _ in graph.relations], [{} for _ in graph.relations]
        pairs = list(zip(graph.relations, graph.slopes(consts, params), strict=True))
        at_outputs = [next(iter(of.values()), None) if r.is_weight else None for r, of in pairs]
        return at_outputs, [{} if r.is_weight else of for r, of in pairs]


@dataclass(frozen=True, eq=False, slots=True)
class OfGraphBackward:
    """How a rule takes blocks backward, as functions of a graph; see `engine.Backward`."""

    of_graph: OfGraph
    own: RelationsBackward

    def record(self) -> Backward:
        moves = lambda graph: self.own.moves(graph.relations)
        return Backward(self.adjoints, self.credit, self.read, moves, self.deposits, self.put)

    def adjoints(self, graph: Graph) -> list[Array]:
        dtype = jnp.result_type(*(v.dtype for v in graph.tangent.entries))
        return self.own.adjoints(graph.relations, dtype)

    def credit(self, graph: Graph, arrived: Arrived) -> tuple[Any, list[Array]]:
        blocks, signals, pulled = self.of_graph.met(graph, arrived)
        grads, before = self.own.credit(blocks, signals, arrived.later)
        return pulled(grads), before

    def read(
        self,
        graph: Graph,
        consts: Any,
        params: Any,
        traces: Sequence[Trace],
        at: list[Array],
        fresh: Fresh,
    ) -> Any:
        blocks, pulled = self.of_graph.read(graph, consts, params, traces, _no_steps(graph))
        return pulled(self.own.read(blocks, at, fresh))

    def deposits(self, graph: Graph, block: Block, steps: list[Steps], moves: Any) -> Any:
        nothing: list[Any] = [{}] * len(steps)
        return self.own.deposits(_blocks(graph, nothing, steps, nothing, nothing), moves)

    def put(
        self,
        graph: Graph,
        consts: Any,
        params: Any,
        traces: Sequence[Trace],
        moves: Any,
        deposits: Any,
        fresh: Fresh,
    ) -> list[Trace]:
        weights = graph.operands(consts, params)
        slopes = self.of_graph.slopes(graph, consts, params)[1]
        blocks = _blocks(graph, traces, _no_steps(graph), weights, slopes)
        return self.own.put(blocks, moves, deposits, fresh)


def _no_steps(graph: Graph) -> list[Any]:
    return [NO_STEPS for _ in graph.relations]


def _steeper(steps: Steps, slope: Array | None) -> Steps:
    """Tails from a parameter in place of those from the output that is made of it."""
    if slope is None:
        return steps
    slots = None if steps.slots is None else tuple(a * slope for a in steps.slots)
    return steps._replace(f=steps.f * slope[..., None], slots=slots)


def _pulled_back(graph: Graph, grads: list[Grads], pull: Callable[[Any], Any]) -> Any:
    """Gradients of the parameters; those that are in their coordinates already are added."""
    # W = softplus(a) with its trace in the coordinates of a (`mapped`): what the rule returns for W
    # is the gradient of a already. It is added to that of a, and zero is pulled back through W. Of
    # V = b.T, which has none of that, the gradient is pulled back: its transposition.
    direct: list[tuple[Any, Array]] = []
    of_weights: list[Grads] = []
    for r, of in zip(graph.relations, grads, strict=True):
        own = {k: mapped for k, mapped in r.mapped.items() if mapped is not None}
        direct += [(mapped, of[k]) for k, mapped in own.items()]
        of_weights.append({k: jnp.zeros_like(g) if k in own else g for k, g in of.items()})
    out = list(pull(of_weights))
    for mapped, gradient in direct:
        out[mapped.leaf] += mapped.total(gradient, out[mapped.leaf])
    return tuple(out)


def _blocks(graph: Graph, *arrays: Sequence) -> list[RelationBlock]:
    infinite = singular(graph)
    each: Any = zip(graph.relations, *arrays, strict=True)
    return [RelationBlock(r, t, s, w, infinite, slopes) for r, t, s, w, slopes in each]
