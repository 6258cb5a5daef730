"""The certificate: how every parameter is learned, and what its gradient leaves out.

A parameter is *exact* when its online gradient, summed over the steps, is that of back-propagation
through time: every path from it to a state is in a trace, and every path from the states it reaches
to later states is in the trace's D. Whatever else there is, is listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import numpy as np

from .._errors import dotted
from ..program import Equation, Var
from ._arrival import Arrival, Credit, Silent
from ._graph import Graph, View
from ._influence import Cut
from ._leaky import leaky_readouts
from ._pattern import matrix, short_axis
from ._reach import bits_of, indices_of, reach, union_of
from ._relations import HiddenParamOpRelation
from ._sets import NONE
from ._sites import Site
from ._step import Path


@dataclass(frozen=True, slots=True)
class Way:
    """From a parameter or state to states, through another parameter's operator if `via` is one."""

    source: Path
    via: Path | None
    targets: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dependency that the gradient leaves out: in words, and the user's line that makes it.

    `do` is what would let the gradient have it, where that is one thing.
    """

    text: str
    line: str | None = None
    way: Way | None = field(default=None, compare=False, repr=False)
    do: str | None = field(default=None, compare=False, repr=False)
    axis: int | None = field(default=None, compare=False, repr=False)  # couple_axis, if that helps

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


Dropped.__module__ = "braintrace"


@dataclass(frozen=True, slots=True)
class ParameterReport:
    """How one parameter is learned.

    Attributes:
        path: the parameter.
        how: 'trace' (it has memory), 'within-step' (the exact gradient of the step alone) or 'none'
            (nothing that the step computes depends on it: its gradient is zero).
        exact: whether the summed online gradient is the gradient of the whole sequence, for losses
            of what the step returns and of the states it leaves behind. After a driver
            (`etrace_grad`, ...) the step is all that its step function does.
        dropped: what it leaves out; empty if exact.
        operators: the operators that consume it, with their lines.
        states: the states its traces belong to.
        trace_shapes: shapes of the stored arrays; a trace that parameters share counts for each.
        trace_bytes: their size.
        silent: why it never learns, None if it does: no gradient of what the step returns can
            arrive under this rule, which `exact` does not tell. A loss that reads the parameter
            itself (a penalty) always brings one.
        while_constant: whether that holds for weights that stay as they are within a sequence only:
            its trace is that of a weight which is computed from it, and is no linear or
            element-wise function of it. If weights change between two steps, such a trace is
            pulled back at the present ones.
        rule: of a mixture, the rule that it has.
    """

    path: Path
    how: str
    exact: bool
    dropped: tuple[Dropped, ...]
    operators: tuple[str, ...]
    states: tuple[Path, ...]
    trace_shapes: tuple[tuple[int, ...], ...]
    trace_bytes: int
    silent: Silent | None = None
    while_constant: bool = False
    rule: str = ""

    def __str__(self) -> str:
        by = f" by {self.rule}" if self.rule else ""
        what = f"{dotted(self.path)}: {self.how}{by}"
        if self.operators:
            what += f" through {', '.join(self.operators)}"
        if self.states:
            what += f" to {', '.join(map(dotted, self.states))}"
        if self.trace_shapes:
            shapes = " + ".join(str(s) for s in self.trace_shapes)
            what += f", stored {shapes}, {self.trace_bytes:,} bytes"
        silent = [] if self.silent is None else [f"  {self.silent}"]
        if self.exact:
            exact = "exact while the weights are constant" if self.while_constant else "exact"
            return "\n".join([f"{what}; {exact}", *silent])
        left_out = [f"  - {d}" for d in self.dropped]
        left_out += [f"  {do}" for do in dict.fromkeys(d.do for d in self.dropped) if do]
        return "\n".join([f"{what}; not exact, it leaves out", *left_out, *silent])


ParameterReport.__module__ = "braintrace"


@dataclass(frozen=True, slots=True)
class Traces:
    """What a rule stores: shapes of arrays, per relation or, if `per_parameter`, parameter leaf.

    `approximates` says in words what the rule stores in place of a trace, None if it stores the
    trace itself; `complete` that it follows all paths between states, `random_feedback` that the
    reverse pass through operators is random, `credit` where cotangents meet what is stored.
    `steps` are those that a gradient goes back, by evaluating them again; None for no limit.
    """

    shapes: Sequence[Any]
    per_parameter: bool = False
    approximates: str | None = None
    complete: bool = False
    random_feedback: bool = False
    credit: Credit = Credit.CUT
    steps: int | None = None


def certify(graph: Graph, traces: Traces) -> dict[Path, ParameterReport]:
    """The report on every parameter that the step reads."""
    certifier = _Certifier(graph, traces)
    reports: dict[Path, list[ParameterReport]] = {}
    for i, leaf in enumerate(graph.step.params):
        reports.setdefault(leaf.path, []).append(certifier.leaf(i))
    return {path: _joined(path, leaves) for path, leaves in reports.items()}


def unused(path: Path) -> ParameterReport:
    """The report on a parameter that the step never reads."""
    return ParameterReport(path, "none", True, (), (), (), (), 0)


_COUPLE = (
    "if elements along axis {0} are the compartments of one unit, d_rtrl(couple_axis={0}) follows "
    "them: the traces are as many times as large"
)
_FILTER = (
    "{0} is a filter behind a weight: the same function with the filter before the weight is exact "
    "here: {0} = decay * {0} + x, then the weight, as in braintrace.nn.FilteredReadout"
)
_LATER = "what it does to losses more than {0} steps later: exact for those at most {0} steps back"
_RANDOM = "the derivative of the loss by the states: random operands in the reverse pass"


def _joined(path: Path, leaves: Sequence[ParameterReport]) -> ParameterReport:
    order = ("trace", "within-step", "none")

    def all_of(items: Iterable[tuple]) -> tuple:
        return tuple(dict.fromkeys(x for item in items for x in item))

    return ParameterReport(
        path,
        min((leaf.how for leaf in leaves), key=order.index),
        all(leaf.exact for leaf in leaves),
        all_of(leaf.dropped for leaf in leaves),
        all_of(leaf.operators for leaf in leaves),
        all_of(leaf.states for leaf in leaves),
        tuple(s for leaf in leaves for s in leaf.trace_shapes),
        sum(leaf.trace_bytes for leaf in leaves),
        _all_silent([leaf.silent for leaf in leaves if leaf.how != "none" or leaf.silent]),
        any(leaf.while_constant for leaf in leaves),
    )


def _all_silent(leaves: Sequence[Silent | None]) -> Silent | None:
    silent = [leaf for leaf in leaves if leaf is not None]
    if not silent or len(silent) < len(leaves):
        return None
    unless = dict.fromkeys(path for leaf in silent for path in leaf.unless)
    instead = max((leaf.instead for leaf in silent), key=len)
    return Silent(tuple(unless), instead, next((s.flat for s in silent if s.flat), None))


class _Certifier:
    def __init__(self, graph: Graph, traces: Traces):
        self.graph, self.traces, self.step = graph, traces, graph.step
        self.used = reach(self.step.program, self.step.entry_bits(self.step.params))
        self.n = len(graph.tangent.components)
        self.relation_of = {r.site.equation: r for r in graph.relations}
        self.arrival = Arrival(graph, traces.credit)
        self.leaky = leaky_readouts(graph.step, graph.sites, graph.links)
        ends = enumerate(self.step.hidden)
        values = [(v, 1 << k) for k, h in ends for v in (self.step.entry(h), self.step.exit(h))]
        seeds: dict[Var, int] = {}
        for v, bit in values:
            if isinstance(v, Var):
                seeds[v] = seeds.get(v, 0) | bit
        self.entered = reach(self.step.program, seeds)  # which states it is computed from

    def path_of(self, site: Site) -> Path:
        return self.step.params[next(i for v in site.leaves.values() for i in v)].path

    def leaf(self, i: int) -> ParameterReport:
        """The report on parameter leaf i."""
        step, graph = self.step, self.graph
        path = step.params[i].path
        sites = [s for s in graph.sites if any(i in v for v in s.leaves.values())]
        operators = tuple(dict.fromkeys(_named(s.equation) for s in sites))
        if not any(bits_of(o, self.used) >> i & 1 for o in step.program.outputs):
            silent = self.arrival.silent(i, ())
            told = silent if silent is not None and silent.flat else None
            return replace(unused(path), operators=operators, silent=told)
        leaves: Sequence[int] = graph.influenced[i]
        dropped: list[Dropped] = []
        if self.traces.steps is not None:
            shapes, traced = [], bool(leaves)
            dropped += [Dropped(_LATER.format(self.traces.steps))] * traced
        elif self.traces.per_parameter:
            shapes = jax.tree.leaves(self.traces.shapes[i])
            traced = bool(shapes)
        else:
            traces = (self.relation_of.get(s.equation) for s in sites)
            relations = [r for r in traces if r is not None]
            traced, shapes = bool(relations), [s for r in relations for s in self.shapes(r, i)]
            leaves, dropped = self.from_relations(i, sites, relations)
        if traced and self.traces.approximates:
            dropped.insert(0, Dropped(self.traces.approximates))
        listed = tuple(dict.fromkeys(dropped))
        return ParameterReport(
            path,
            "trace" if traced else "within-step",
            not listed,
            listed,
            operators,
            tuple(dict.fromkeys(step.hidden[k].path for k in leaves)),
            tuple(s.shape for s in shapes),
            sum(prod(s.shape) * s.dtype.itemsize for s in shapes),
            self.arrival.silent(i, leaves),
            traced and not listed and self.follows_a_weight(i),
        )

    def follows_a_weight(self, i: int) -> bool:
        """Whether a trace of parameter leaf i is that of a weight, in the weight's coordinates."""
        if self.traces.per_parameter or self.traces.steps is not None:
            return False
        for r in self.graph.relations:
            for k in (k for k, leaves in r.site.leaves.items() if i in leaves):
                # A factor of a low-rank product has no trace of its own: the product has one.
                keys = [k] if k in r.keys else r.keys
                if any(key in r.mapped and r.mapped[key] is None for key in keys):
                    return True
        return False

    def from_relations(
        self, i: int, sites: Sequence[Site], relations: Sequence[HiddenParamOpRelation]
    ) -> tuple[list[int], list[Dropped]]:
        """The hidden leaves that the traces of parameter leaf i belong to, and what is dropped."""
        graph = self.graph
        dropped = [*self.plainly(i)]
        for site in sites:
            dropped += self.from_site(site)
        by_view: dict[int, set[int]] = {}
        for r in relations:
            components = r.slots.components(graph.influence.offsets[: self.n + 1])
            leaves = {graph.tangent.components[c].leaf for c in components}
            by_view.setdefault(graph.view_of[r.index], set()).update(leaves)
        if graph.crossings is None and not self.traces.complete:
            for k, leaves in by_view.items():
                dropped += self.from_states(sorted(leaves), graph.views[k])
        leaves = set().union(*by_view.values())
        if self.traces.random_feedback and self.is_random(i, leaves):
            dropped.insert(0, Dropped(_RANDOM))
        return sorted(leaves), dropped

    def is_random(self, i: int, leaves: Collection[int]) -> bool:
        """Whether the loss reads parameter leaf i, or these states, through a random operator.

        Or through a random matrix, if there is no such operator.
        """
        own = union_of(1 << k for k in leaves)
        xs = [s.x for s in self.graph.sites if s.equation not in self.graph.links.cut_entries]
        read = [(x, bits_of(x, self.entered)) for x in xs if x is not None]
        if not any(states for _, states in read):
            return bool(leaves)
        return any(n & own or (n and bits_of(x, self.used) >> i & 1) for x, n in read)

    def shapes(self, r: HiddenParamOpRelation, i: int) -> list[Any]:
        trace = self.traces.shapes[r.index]
        own = [k for k, v in r.site.leaves.items() if i in v and k in trace]
        return jax.tree.leaves([trace[k] for k in own] if own else trace)

    # ------------------------------------------------------------------------ what is left out

    def drop(
        self,
        source: Path,
        leaves: Iterable[int],
        why: str,
        eqn: Equation | None = None,
        via: Site | None = None,
        axis: int | None = None,
    ) -> Dropped:
        """What is dropped from a parameter or state to hidden leaves, at an equation.

        `axis` is that of the states along which alone their elements meet there.
        """
        targets = tuple(dict.fromkeys(self.step.hidden[k].path for k in leaves))
        through = () if via is None else (self.path_of(via),)
        ends = ", ".join(map(dotted, targets))
        text = " -> ".join((*map(dotted, (source, *through)), ends)) + why
        way = Way(source, through[0] if through else None, targets)
        do = None if axis is None else _COUPLE.format(axis)
        if via is not None and via.equation in self.leaky:
            do = _FILTER.format(ends)
        return Dropped(text, None if eqn is None else eqn.where(), way, do, axis)

    def plainly(self, i: int) -> list[Dropped]:
        """Paths to a state that cross no operator, or enter one as its input."""
        step, links = self.step, self.graph.links
        states = indices_of(step.reached(links.plain, i))
        if not states:
            return []
        why = " by plain computation, through no operator of its own"
        use = links.plain_use.get(step.entry(step.params[i]))
        return [self.drop(step.params[i].path, states, why, use)]

    def from_site(self, site: Site) -> list[Dropped]:
        """Paths from an operator's output to a state that are in no trace."""
        graph, eqn = self.graph, site.equation
        through = indices_of(graph.links.through[eqn])
        if not through:
            return []
        path, relation = self.path_of(site), self.relation_of.get(eqn)
        if site.closed is not None:
            why = f": the policy closes the {site.closed.name} around its operator"
            return [replace(self.drop(path, through, why, eqn), way=None)]
        if not site.steady:
            why = ": its operand changes within a sequence"
            return [self.drop(path, through, why, eqn)]
        if graph.crossings is not None:
            return self.beyond(site, relation, through)
        out = []
        for other in graph.links.blockers[eqn]:
            reached = indices_of(graph.links.through[other.equation])
            if reached:
                out.append(self.drop(path, reached, " across steps", other.equation, other))
        taps = {*graph.tangent.tap_sources(graph.sites.index(site))}
        view = graph.views[0 if relation is None else graph.view_of[relation.index]]
        out += self.cut_between(taps, path, view)
        if relation is None and not out:
            out.append(self.drop(path, through, ": no path keeps units apart", eqn))
        return out

    def from_states(self, leaves: Sequence[int], view: View) -> list[Dropped]:
        """Paths from the states a trace belongs to, to later states, that D leaves out."""
        links, components = self.graph.links, self.graph.tangent.components
        out = []
        for k in leaves:
            own = {c for c in range(self.n) if components[c].leaf == k}
            path = self.step.hidden[k].path
            out += self.cut_between(own, path, view)
            for to, source, axis in view.pattern.dropped:
                if source in own:
                    why = " across steps, from other units"
                    at = view.influence.meetings.get(source)
                    out.append(self.drop(path, [components[to].leaf], why, at, axis=axis))
            for site in self.graph.sites:
                inputs, reached = site.equation.inputs, links.through[site.equation]
                if reached and any(bits_of(a, links.from_leaves) >> k & 1 for a in inputs):
                    to_leaves = indices_of(reached)
                    out.append(self.drop(path, to_leaves, " across steps", site.equation, site))
        return out

    def cut_between(self, sources: set[int], path: Path, view: View) -> list[Dropped]:
        """What is cut between the sources and the states."""
        influence, components = view.influence, self.graph.tangent.components
        out: dict[int, list[int]] = {}
        for c, cuts in enumerate(influence.lost):
            for k in cuts:
                if influence.cuts[k].sources & sources:
                    out.setdefault(k, []).append(components[c].leaf)
        by_cut = [(influence.cuts[k], leaves) for k, leaves in out.items()]
        return [
            self.drop(path, leaves, f": {cut.reason}", cut.equation, axis=self.axis_of(cut, view))
            for cut, leaves in by_cut
        ]

    def axis_of(self, cut: Cut, view: View) -> int | None:
        """The axis of states along which alone an equation joins elements, if it is short."""
        rows, offsets = cut.rows, view.influence.offsets
        if rows is None or rows.shape[-1] < 2 or self.step.couple_axis is not None:
            return None
        first, others = np.broadcast_to(rows[:, :1], rows[:, 1:].shape), rows[:, 1:]
        # Rows [[0, 1], [2, 3]] of h (2, 2): 0 and 1, 2 and 3 differ along the last axis alone, so
        # that to couple this axis, of two compartments, would follow them.
        states = (first != NONE) & (others != NONE) & (np.maximum(first, others) < offsets[self.n])
        if not states.any():
            return None
        return short_axis(view.components, offsets, first[states], others[states])

    def beyond(
        self, site: Site, relation: HiddenParamOpRelation | None, through: Sequence[int]
    ) -> list[Dropped]:
        """What lies further than the crossings a rule follows."""
        graph, path = self.graph, self.path_of(site)
        n = int(graph.influence.offsets[self.n])
        why = f" through more than {graph.crossings} crossing(s)"
        far = self.drop(path, through, why, site.equation)
        out = self.cut_between(set(range(len(graph.tangent.sources))), path, graph.views[0])
        if relation is None:
            # Without an edge all its paths lead through weights, whose sites account for them.
            taps = graph.views[0].taps[graph.sites.index(site)]
            return [*out, far] if len(taps.all_edges) else out
        # Would one crossing more reach new elements? Then what `_Paths.reached` computed with the
        # crossings allowed is not closed. If it is, more = reached, and nothing is left out.
        destination = relation.slots.analysed
        lane, y, slot = np.nonzero(destination >= 0)
        pairs = np.stack([destination[lane, y, slot], y], axis=1)
        reached = matrix(pairs, (n, destination.shape[1]))
        taps = graph.views[0].taps[graph.tapped[relation.index]]
        direct = matrix(taps.all_edges, (n, destination.shape[1]))
        more = matrix(graph.pattern.kept, (n, n)) @ reached + direct + reached
        return out if more.astype(bool).nnz == reached.nnz else [*out, far]


def _named(eqn: Equation) -> str:
    where = eqn.where()
    return f"{eqn.name} at {where}" if where else eqn.name
