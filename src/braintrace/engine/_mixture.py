"""A mixture: one rule for some parameters, another one for others, in one evaluation of a block.

The gradient of a parameter under a rule does not depend on the rules of the others, so a mixture is
a partition: each part has its own graph, with the operators of its parameters, and its own traces.
All parts share the loop over the states. Those that differentiate a step in the same way share one
reverse pass too. With d_rtrl for `a`, snap for `b` and windows of d_rtrl for `c` and `d`,

    pass 0   a       recurrent entries cut           traces of a
    pass 1   b       zeros added to the new states   traces of b
    pass 2   c, d    nothing cut in a window         traces of c, traces of d

In each the parameters of the others are constants. The results are those of the last pass, with the
derivatives of all: the loss is differentiated once, and its cotangents go through every pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph import Graph
from ._rule import Arrived, Backward, ExitCotangents, Fresh, Part, Pending, Rule, Trace
from ._values import Block, TimeAxes, Values

Array = jax.Array


def mixture(parts: Sequence[Part]) -> Rule:
    """The rule whose parts learn the parameters of the graphs `Graph.parts`, each its own."""
    rules = [part.rule for part in parts]
    signals = [rule.signal for rule in rules if rule.signal is not None]

    def init(graph: Graph, values: Values) -> list[Trace]:
        return [t for rule, own in _each(rules, graph) for t in rule.init(own, values)]

    def traced(graph: Graph) -> list[Any]:
        return [what for rule, own in _each(rules, graph) for what in rule.traced(own)]

    def observe(graph: Graph, block: Block, traces: Sequence[Trace]) -> list[Any]:
        split = split_traces(rules, graph, traces)
        each = zip(_each(parts, graph), split, strict=True)
        return [p.rule.observe(own, _seen(p, own, graph, block), t) for (p, own), t in each]

    def advance(
        graph: Graph, block: Block, traces: Sequence[Trace], observed: Any, fresh: Fresh
    ) -> list[Trace]:
        out: list[Trace] = []
        split = split_traces(rules, graph, traces)
        for (p, own), t, o in zip(_each(parts, graph), split, observed, strict=True):
            out += p.rule.advance(own, _seen(p, own, graph, block), t, o, fresh)
        return out

    return Rule(
        init,
        traced,
        advance,
        _in_passes,
        observe,
        names=lambda graph: _names(rules, graph),
        signal=signals[0] if signals else None,
        takes_signal=False,
        one_by_one=any(rule.one_by_one for rule in rules),
        pending=_pending(parts),
        backward=_backward(parts),
        constants={f"{k} of {i}": v for i, r in enumerate(rules) for k, v in r.constants.items()},
        per_parameter=any(rule.per_parameter for rule in rules),
        parts=tuple(parts),
    )


def _each(of_parts: Sequence[Any], graph: Graph) -> list[tuple[Any, Graph]]:
    return list(zip(of_parts, graph.parts, strict=True))


def _in_passes(graph: Graph, arrived: Arrived) -> Any:
    raise AssertionError("a mixture has no pass of its own, see passes_of")


def split_traces(rules: Sequence[Rule], graph: Graph, traces: Sequence[Trace]) -> list[list[Trace]]:
    """The traces of a mixture, part by part."""
    out, rest = [], iter(traces)
    for rule, own in _each(rules, graph):
        out.append([next(rest) for _ in rule.traced(own)])
    return out


def reset_traces(rule: Rule, graph: Graph, traces: Sequence[Trace]) -> list[Trace]:
    """The traces of a rule, or of a mixture, between sequences."""
    if not rule.parts:
        return rule.reset(traces)
    rules = [part.rule for part in rule.parts]
    pairs = zip(rules, split_traces(rules, graph, traces), strict=True)
    return [t for own, of_part in pairs for t in own.reset(of_part)]


def _names(rules: Sequence[Rule], graph: Graph) -> list[Any]:
    """Names as the parts have them; an operator whose weights have several rules is in several."""
    trees = [rule.named(own) for rule, own in _each(rules, graph)]
    # One product with a trained W (d_rtrl) and a trained bias (snap) has the name "W" in both
    # parts: they become "W of rule 0" and "W of rule 1".
    used = Counter(name for tree in trees for name in jax.tree.leaves(tree))
    shown = lambda i, name: name if used[name] == 1 else f"{name} of rule {i}"
    return [jax.tree.map(partial(shown, i), t) for i, tree in enumerate(trees) for t in tree]


def _seen(part: Part, own: Graph, graph: Graph, block: Block) -> Block:
    """A block as a part sees it: with its windows, and what its own program has computed."""
    axes = replace(block.axes, window=_window(part, block.axes))
    if own.step.program is graph.step.program:
        return replace(block, axes=axes)
    zeros = _filters(own, (axes.length,))
    path = replace(block.path, hidden=(*block.path.hidden, *zeros))
    return Block(path, axes, {})


def _filters(graph: Graph, lead: tuple[int, ...] = ()) -> tuple[Array, ...]:
    """The states of a rule's own filters, which are always zero."""
    return tuple(jnp.zeros((*lead, *v.shape), v.dtype) for v in graph.step.filter_shapes)


def _window(part: Part, axes: TimeAxes) -> int | None:
    if part.rule.entry_only:
        return axes.length
    return axes.window if part.windowed else None


# ----------------------------------------------------------------------------------------- passes


@dataclass(frozen=True, slots=True)
class Pass:
    """One reverse pass: the parts that share it, their graph and rule, and the block they see."""

    numbers: tuple[int, ...]
    graph: Graph
    rule: Rule
    block: Block
    traces: list[Any]
    observed: list[Any]
    last: bool

    def values(self, values: Values) -> Values:
        """The arrays of the block; what others learn is constant.

        What surrounds a step is not in the rules: it has the derivative of the last pass.
        """
        own = [self.graph.owns(i) for i in range(len(values.params))]
        pairs = zip(own, values.params, strict=True)
        values = replace(
            values,
            params=tuple(p if mine else lax.stop_gradient(p) for mine, p in pairs),
            hidden=(*values.hidden, *_filters(self.graph)),
        )
        if self.last:
            return values
        outside = lax.stop_gradient((values.consts, values.args))
        return replace(values, consts=outside[0], args=outside[1])

    def results(self, outs: list[Array]) -> list[Array]:
        """The results without the states of filters."""
        step = self.graph.step
        own = {leaf.output for leaf in step.hidden[len(step.stored) :]}
        return [a for i, a in enumerate(outs) if i not in own]

    def behind(self, graph: Graph, rule: Rule, behind: Any) -> Any:
        """What comes from the blocks behind, of it what is about the parts of this pass."""
        if behind is None:
            return None
        adjoints = split_adjoints(rule.parts, graph, behind.adjoints)
        return replace(behind, adjoints=[a for i in self.numbers for a in adjoints[i]], moves=None)

    def substitute(self, substitute: Array | None, axes: TimeAxes) -> Array | None:
        """Windows to evaluate in place of others, as those of this pass."""
        if substitute is None or self.rule.entry_only:
            return None
        if axes.window in (None, 1) or self.block.axes.window is not None:
            return substitute
        steps = substitute[:, None] * axes.window + jnp.arange(axes.window)
        return steps.reshape(-1)


def passes_of(
    graph: Graph, rule: Rule, traces: Sequence[Trace], observed: Sequence[Any], block: Block
) -> list[Pass]:
    """The reverse passes of a mixture over a block."""
    split = split_traces([part.rule for part in rule.parts], graph, traces)
    numbers = shared_passes(graph, rule, block.axes.window is not None)
    out = []
    for own in numbers:
        first, parts = rule.parts[own[0]], [rule.parts[i].rule for i in own]
        graphs = [graph.parts[i] for i in own]
        union = graphs[0]
        if len(own) > 1:
            leaves = frozenset[int]().union(*(g.owned or () for g in graphs))
            union = graph.whole[own[0]].owning(leaves)
        credit = _Credit(tuple(parts), tuple(graphs))
        back = rule.backward and rule.backward._replace(credit=credit.backward)
        together = replace(first.rule, credit=credit, backward=back)
        seen = _seen(first, union, graph, block)
        at = [split[i] for i in own], [observed[i] for i in own]
        out.append(Pass(tuple(own), union, together, seen, *at, own is numbers[-1]))
    return out


def shared_passes(graph: Graph, rule: Rule, windows: bool) -> list[list[int]]:
    """The numbers of the parts that one reverse pass serves, the last part last."""
    groups: dict[Hashable, list[int]] = {}
    for i, (part, own) in enumerate(_each(rule.parts, graph)):
        groups.setdefault(_way(i, part, own, windows), []).append(i)
    return sorted(groups.values(), key=lambda numbers: numbers[-1])


def _way(i: int, part: Part, graph: Graph, windows: bool) -> Hashable:
    """How a part differentiates a step: equal for parts that can share a pass."""
    rule, program = part.rule, id(graph.step.program)
    if rule.signal is not None or rule.feedback is not None:
        return i
    if rule.entry_only or (windows and part.windowed):
        return program, rule.entry_only
    # D-RTRL of `a` and pp_prop of `b` ask for no cotangents of new states and cut the same entries:
    # one reverse pass, in which both are differentiated. SnAp cuts nothing: a pass of its own.
    cuts = {} if rule.exit_cotangents is ExitCotangents.UNCUT else graph.links.cut_entries
    shared = None if rule.exit_cotangents is None else graph.shares_trace
    return program, rule.exit_cotangents, frozenset(cuts.items()), shared


@dataclass(frozen=True, slots=True)
class _Credit:
    """The gradients of the parts that share a pass: of each parameter by its own rule."""

    rules: tuple[Rule, ...]
    graphs: tuple[Graph, ...]

    def __call__(self, graph: Graph, arrived: Arrived) -> Any:
        out = [_no_gradient(p) for p in arrived.params]
        for rule, own, now in self._each(graph, arrived):
            _put_own(out, own, rule.credit(own, now))
        return tuple(out)

    def backward(self, graph: Graph, arrived: Arrived) -> tuple[Any, list[Array]]:
        """The same of a block that is taken backward; and the adjoints before it."""
        out, before, later = [_no_gradient(p) for p in arrived.params], [], iter(arrived.later)
        for rule, own, now in self._each(graph, arrived):
            assert rule.backward is not None
            after = [next(later) for _ in rule.backward.adjoints(own)]
            gradients, adjoints = rule.backward.credit(own, now._replace(later=after))
            _put_own(out, own, gradients)
            before += adjoints
        return tuple(out), before

    def _each(self, graph: Graph, arrived: Arrived) -> Iterator[tuple[Rule, Graph, Arrived]]:
        """The rules with their graphs and what reached their memory."""
        number = {r.site.equation: r.index for r in graph.relations}
        each = zip(self.rules, self.graphs, arrived.traces, arrived.observed, strict=True)
        for rule, own, traces, observed in each:
            taps = arrived.taps
            if taps:
                taps = {r.index: taps[number[r.site.equation]] for r in own.relations}
            yield rule, own, arrived._replace(traces=traces, observed=observed, taps=taps)


def _put_own(out: list[Any], graph: Graph, gradients: Sequence[Any]) -> None:
    for i, gradient in enumerate(gradients):
        if graph.owns(i):
            out[i] = gradient


def _no_gradient(p: Array) -> Any:
    if not jnp.issubdtype(p.dtype, jnp.inexact):
        return np.zeros(p.shape, jax.dtypes.float0)
    return jnp.zeros_like(p)


# ---------------------------------------------------------------------------- backward over blocks


def split_adjoints(
    parts: Sequence[Part], graph: Graph, adjoints: Sequence[Array]
) -> list[list[Array]]:
    """The adjoints of a mixture, part by part."""
    out, rest = [], iter(adjoints)
    for part, own in _each(parts, graph):
        assert part.rule.backward is not None
        out.append([next(rest) for _ in part.rule.backward.adjoints(own)])
    return out


def _backward(parts: Sequence[Part]) -> Backward | None:
    """Blocks from the last to the first, if all parts can take them so, each as it is alone."""
    ways = [part.rule.backward for part in parts if part.rule.backward is not None]
    rules = [part.rule for part in parts]
    if len(ways) < len(parts):
        return None

    def adjoints(graph: Graph) -> list[Array]:
        return [a for way, own in _each(ways, graph) for a in way.adjoints(own)]

    def read(
        graph: Graph, consts: Any, params: Any, traces: Sequence[Trace], at: list, fresh: Fresh
    ) -> Any:
        out = [_no_gradient(p) for p in params]
        split = split_traces(rules, graph, traces), split_adjoints(parts, graph, at)
        for (way, own), t, a in zip(_each(ways, graph), *split, strict=True):
            _put_own(out, own, way.read(own, consts, params, t, a, fresh))
        return tuple(out)

    def deposits(graph: Graph, block: Block, observed: Any, moves: Any) -> tuple[Any, Any]:
        new, out = [], []
        each = zip(_each(parts, graph), ways, observed, moves, strict=True)
        for (part, own), way, o, m in each:
            maps, found = way.deposits(own, _seen(part, own, graph, block), o, m)
            new.append(maps)
            out += found
        return new, out

    def put(
        graph: Graph,
        consts: Any,
        params: Any,
        traces: Sequence[Trace],
        moves: Any,
        deposits: Any,
        fresh: Fresh,
    ) -> list[Trace]:
        out: list[Trace] = []
        rest = iter(deposits)
        each = zip(_each(ways, graph), split_traces(rules, graph, traces), moves, strict=True)
        for (way, own), t, m in each:
            found = [next(rest) for _ in own.relations]
            out += way.put(own, consts, params, t, m, found, fresh)
        return out

    moves = lambda graph: [way.moves(own) for way, own in _each(ways, graph)]
    return Backward(adjoints, _in_passes, read, moves, deposits, put)


# ------------------------------------------------------------------------- steps beside the traces


def _pending(parts: Sequence[Part]) -> Pending | None:
    """For weights that change every few steps: each part as it is alone, if all can wait.

    What these functions are given is a list of relations for every part.
    """
    waiting = [part.rule.pending for part in parts]
    if not any(waiting) or any(p.rule.one_by_one or p.rule.per_parameter for p in parts):
        return None

    def fits(relations: Sequence[Any]) -> bool:
        pairs = zip(waiting, relations, strict=True)
        return all(own is None or own.fits(of) for own, of in pairs)

    def cut(relations: Sequence[Any], traces: Sequence[Trace]) -> list[tuple[Any, Any, Any]]:
        rest = iter(traces)
        pairs = zip(waiting, relations, strict=True)
        return [(own, of, [next(rest) for _ in of]) for own, of in pairs]

    def opened(relations: Sequence[Any], traces: Sequence[Trace], size: int) -> list[Trace]:
        each = cut(relations, traces)
        return [t for own, of, at in each for t in (own.open(of, at, size) if own else at)]

    def fold(relations: Sequence[Any], traces: Sequence[Trace]) -> list[Trace]:
        each = cut(relations, traces)
        return [t for own, of, at in each for t in (own.fold(of, at) if own else at)]

    pairs = zip(parts, waiting, strict=True)
    rule = mixture([p if own is None else p._replace(rule=own.rule) for p, own in pairs])
    return Pending(fits, opened, rule, fold)
