"""What is known about every parameter's gradient: how it is learned, and what is left out.

A parameter is *exact* when its online gradient, summed over the steps, is that of back-propagation
through time: every way from it to a state is in a trace, and every way from the states it reaches
to later states is in the trace's D. Whatever else there is, is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from .._errors import dotted
from .._jaxpr import Equation
from ._arrival import Arrival, Credit, Silent
from ._graph import Graph, View
from ._pattern import matrix
from ._reach import bits_of, indices_of, reach
from ._relations import HiddenParamOpRelation
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
    """A dependency that the gradient leaves out: in words, and the user's line that makes it."""

    text: str
    line: str | None = None
    way: Way | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


Dropped.__module__ = "braintrace"


@dataclass(frozen=True, slots=True)
class ParameterReport:
    """How one parameter is learned.

    Attributes:
        path: the parameter.
        how: 'trace' (it has memory), 'within-step' (the exact gradient of the step alone) or 'none'
            (nothing that `update` computes depends on it, nor what the last step function does: its
            gradient is zero).
        exact: whether the summed online gradient is the gradient of the whole sequence, for losses
            of what the step returns and of the states it leaves behind. What a step function does
            outside the learner call is known once a driver (`etrace_grad`, ...) has run it.
        dropped: what it leaves out; empty if exact.
        operators: the operators that consume it, with their lines.
        states: the states its traces belong to.
        trace_shapes: shapes of the stored arrays; a trace that parameters share counts for each.
        trace_bytes: their size.
        silent: why it never learns, None if it does: no gradient of what the step returns can
            arrive under this rule, which `exact` does not tell. A loss that reads the parameter
            itself (a penalty) always brings one.
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

    def __str__(self) -> str:
        what = f"{dotted(self.path)}: {self.how}"
        if self.operators:
            what += f" through {', '.join(self.operators)}"
        if self.states:
            what += f" to {', '.join(map(dotted, self.states))}"
        if self.trace_shapes:
            shapes = " + ".join(str(s) for s in self.trace_shapes)
            what += f", stored {shapes}, {self.trace_bytes:,} bytes"
        silent = [] if self.silent is None else [f"  {self.silent}"]
        if self.exact:
            return "\n".join([f"{what}; exact", *silent])
        left_out = (f"  - {d}" for d in self.dropped)
        return "\n".join([f"{what}; not exact, it leaves out", *left_out, *silent])


ParameterReport.__module__ = "braintrace"


@dataclass(frozen=True, slots=True)
class Traces:
    """What a rule stores: shapes of arrays, per relation or, if `per_parameter`, parameter leaf.

    `approximates` says in words what the rule stores in place of a trace, None if it stores the
    trace itself; `complete` that it follows all paths between states, `random_feedback` that the
    reverse pass through operators is random, `credit` where cotangents meet what is stored.
    """

    shapes: Sequence[Any]
    per_parameter: bool = False
    approximates: str | None = None
    complete: bool = False
    random_feedback: bool = False
    credit: Credit = Credit.CUT


def certify(graph: Graph, traces: Traces) -> dict[Path, ParameterReport]:
    """The report on every parameter that the step reads."""
    about = _About(graph, traces)
    found: dict[Path, list[int]] = {}
    for i, leaf in enumerate(graph.step.params):
        found.setdefault(leaf.path, []).append(i)
    return {path: _joined(path, [about.leaf(i) for i in leaves]) for path, leaves in found.items()}


def unused(path: Path) -> ParameterReport:
    """The report on a parameter that `update` never reads."""
    return ParameterReport(path, "none", True, (), (), (), (), 0)


@dataclass(frozen=True, slots=True)
class Outside:
    """What a step function does outside the learner call.

    `used` are the parameters its loss depends on there, `dropped` what the gradient of each leaves
    out, `everywhere` what is left out of the gradient of all that `update` uses.
    """

    used: frozenset[Path]
    dropped: Mapping[Path, tuple[Dropped, ...]]
    everywhere: tuple[Dropped, ...]


_NOT_SEEN = Dropped(
    "whatever a step function computes from it before the learner call (`update` does not use it; "
    "such a gradient is of the step alone)"
)


def with_step(
    parameters: Mapping[Path, ParameterReport], outside: Outside | None
) -> dict[Path, ParameterReport]:
    """The reports on a model's `update`, and on what is around it; None if that is not known."""
    found = dict(parameters)
    for path in (*outside.used, *outside.dropped) if outside else ():
        found.setdefault(path, unused(path))
    return {path: _with_step(p, outside) for path, p in found.items()}


def _with_step(p: ParameterReport, outside: Outside | None) -> ParameterReport:
    if outside is None:
        return replace(p, exact=False, dropped=(_NOT_SEEN,)) if p.how == "none" else p
    how = "within-step" if p.how == "none" and p.path in outside.used else p.how
    more = outside.dropped.get(p.path, ()) + outside.everywhere * (p.how != "none")
    return replace(p, how=how, exact=p.exact and not more, dropped=p.dropped + more)


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
        _all_silent([leaf.silent for leaf in leaves if leaf.how != "none"]),
    )


def _all_silent(leaves: Sequence[Silent | None]) -> Silent | None:
    found = [leaf for leaf in leaves if leaf is not None]
    if not found or len(found) < len(leaves):
        return None
    unless = dict.fromkeys(path for leaf in found for path in leaf.unless)
    return Silent(tuple(unless), max((leaf.instead for leaf in found), key=len))


class _About:
    def __init__(self, graph: Graph, traces: Traces):
        self.graph, self.traces, self.step = graph, traces, graph.step
        step = self.step
        seeds = {step.entry(p): 1 << i for i, p in enumerate(step.params)}
        self.used = reach(step.program, seeds)
        self.n = len(graph.tangent.components)
        self.tap_of = [i for i, tap in enumerate(graph.tangent.taps) for _ in tap]
        self.relation_of = {r.site.equation: r for r in graph.relations}
        self.arrival = Arrival(graph, traces.credit)

    def name(self, k: int) -> str:
        return dotted(self.step.hidden[k].path)

    def path_of(self, site: Site) -> Path:
        return self.step.params[next(i for v in site.leaves.values() for i in v)].path

    def weight(self, site: Site) -> str:
        return dotted(self.path_of(site))

    def way(self, source: Path, via: Site | None, leaves: Iterable[int]) -> Way:
        targets = tuple(dict.fromkeys(self.step.hidden[k].path for k in leaves))
        return Way(source, None if via is None else self.path_of(via), targets)

    def leaf(self, i: int) -> ParameterReport:
        step, graph = self.step, self.graph
        path = step.params[i].path
        sites = [s for s in graph.sites if any(i in v for v in s.leaves.values())]
        operators = tuple(dict.fromkeys(_named(s.equation) for s in sites))
        if not any(bits_of(o, self.used) >> i & 1 for o in step.program.outputs):
            return ParameterReport(path, "none", True, (), operators, (), (), 0)
        if self.traces.per_parameter:
            shapes = jax.tree.leaves(self.traces.shapes[i])
            states = tuple(step.hidden[k].path for k in graph.influenced[i])
            how = "trace" if shapes else "within-step"
            words = [Dropped(w) for w in (self.traces.approximates,) if w and shapes]
            found = self.report(path, how, words, operators, states, shapes)
            return replace(found, silent=self.arrival.silent(i, graph.influenced[i]))

        relations = [self.relation_of[s.equation] for s in sites if s.equation in self.relation_of]
        dropped = [*self.plainly(i)]
        for site in sites:
            dropped += self.from_site(site)
        by_view: dict[int, set[int]] = {}
        for r in relations:
            by_view.setdefault(graph.view_of[r.index], set()).update(self.leaves_of(r))
        if graph.crossings is None and not self.traces.complete:
            for k, met in by_view.items():
                dropped += self.from_states(sorted(met), graph.views[k])
        leaves = sorted(set().union(*by_view.values()))
        shapes = [s for r in relations for s in self.shapes(r, i)]
        behind = [s for s in graph.sites if s.x is not None and bits_of(s.x, self.used) >> i & 1]
        if self.traces.random_feedback and behind and not relations:
            dropped.append(Dropped("the derivative of the loss: its way back is random"))
        if relations and self.traces.approximates:
            dropped.insert(0, Dropped(self.traces.approximates))
        states = tuple(step.hidden[k].path for k in leaves)
        how = "trace" if relations else "within-step"
        found = self.report(path, how, dropped, operators, states, shapes)
        return replace(found, silent=self.arrival.silent(i, leaves))

    def report(self, path, how, dropped, operators, states, shapes) -> ParameterReport:
        listed = tuple(dict.fromkeys(dropped))
        states = tuple(dict.fromkeys(states))
        size = sum(int(np.prod(s.shape, dtype=np.int64)) * s.dtype.itemsize for s in shapes)
        return ParameterReport(
            path, how, not listed, listed, operators, states, tuple(s.shape for s in shapes), size
        )

    def shapes(self, r: HiddenParamOpRelation, i: int) -> list[Any]:
        trace = self.traces.shapes[r.index]
        own = [k for k, v in r.site.leaves.items() if i in v and k in trace]
        return jax.tree.leaves([trace[k] for k in own] if own else trace)

    def leaves_of(self, r: HiddenParamOpRelation) -> list[int]:
        offsets = self.graph.influence.offsets[: self.n + 1]
        elements = np.unique(r.slots.destination[r.slots.destination >= 0])
        components = np.unique(np.searchsorted(offsets, elements, side="right") - 1)
        return [self.graph.tangent.components[c].leaf for c in components.tolist()]

    # ------------------------------------------------------------------------ what is left out

    def plainly(self, i: int) -> list[Dropped]:
        """Ways to a state that cross no operator, or enter one as its input."""
        step = self.step
        states = [
            k
            for k, leaf in enumerate(step.hidden)
            if bits_of(step.exit(leaf), self.graph.links.plain) >> i & 1
        ]
        if not states:
            return []
        use = self.graph.links.plain_use.get(step.entry(step.params[i]))
        path = step.params[i].path
        text = f"{dotted(path)} -> {self.names(states)} by plain computation"
        line = use.where() if use else None
        way = self.way(path, None, states)
        return [Dropped(f"{text}, through no operator of its own", line, way)]

    def names(self, leaves: Iterable[int]) -> str:
        return ", ".join(dict.fromkeys(self.name(k) for k in leaves))

    def from_site(self, site: Site) -> list[Dropped]:
        """Ways from an operator's output to a state that are in no trace."""
        graph, eqn = self.graph, site.equation
        through = indices_of(graph.links.through[eqn])
        if not through:
            return []
        path, weight = self.path_of(site), self.weight(site)
        relation = self.relation_of.get(eqn)
        if site.closed is not None:
            why = f"{weight} -> {self.names(through)}: the policy closes the {site.closed.name}"
            return [Dropped(f"{why} around its operator", eqn.where())]
        if not site.steady:
            why = f"{weight} -> {self.names(through)}: its operand changes within a sequence"
            return [Dropped(why, eqn.where(), self.way(path, None, through))]
        if graph.crossings is not None:
            return self.beyond(site, relation, through)
        out = []
        for other in graph.links.blockers[eqn]:
            reached = indices_of(graph.links.through[other.equation])
            if reached:
                text = f"{weight} -> {self.weight(other)} -> {self.names(reached)}"
                way = self.way(path, other, reached)
                out.append(Dropped(f"{text} across steps", other.equation.where(), way))
        number = next(i for i, s in enumerate(graph.sites) if s is site)
        taps = {self.n + k for k, t in enumerate(self.tap_of) if t == number}
        view = graph.views[0 if relation is None else graph.view_of[relation.index]]
        out += self.cut_on_the_way(taps, path, view)
        if relation is None and not out:
            text = f"{weight} -> {self.names(through)}: no path keeps units apart"
            out.append(Dropped(text, eqn.where(), self.way(path, None, through)))
        return out

    def from_states(self, leaves: Sequence[int], view: View) -> list[Dropped]:
        """Ways from the states a trace belongs to, to later states, that D leaves out."""
        graph = self.graph
        components = graph.tangent.components
        out = []
        for k in leaves:
            mine = {c for c in range(self.n) if components[c].leaf == k}
            path = self.step.hidden[k].path
            out += self.cut_on_the_way(mine, path, view)
            for to, source in view.pattern.dropped:
                if source in mine:
                    target = self.name(components[to].leaf)
                    text = f"{self.name(k)} -> {target} across steps, from other units"
                    out.append(Dropped(text, None, self.way(path, None, [components[to].leaf])))
            for site in graph.sites:
                entered = any(
                    bits_of(a, graph.links.from_leaves) >> k & 1 for a in site.equation.inputs
                )
                reached = indices_of(graph.links.through[site.equation])
                if entered and reached:
                    text = f"{self.name(k)} -> {self.weight(site)} -> {self.names(reached)}"
                    way = self.way(path, site, reached)
                    out.append(Dropped(f"{text} across steps", site.equation.where(), way))
        return out

    def cut_on_the_way(self, sources: set[int], path: Path, view: View) -> list[Dropped]:
        found = view.influence
        out: dict[int, list[int]] = {}
        for c, cuts in enumerate(found.lost):
            for k in cuts:
                if found.cuts[k].sources & sources:
                    out.setdefault(k, []).append(self.graph.tangent.components[c].leaf)
        return [
            Dropped(
                f"{dotted(path)} -> {self.names(leaves)}: {found.cuts[k].reason}",
                found.cuts[k].equation.where(),
                self.way(path, None, leaves),
            )
            for k, leaves in out.items()
        ]

    def beyond(
        self, site: Site, relation: HiddenParamOpRelation | None, through: Sequence[int]
    ) -> list[Dropped]:
        """What lies further than the crossings a rule follows."""
        graph = self.graph
        offsets = graph.influence.offsets
        n = int(offsets[self.n])
        path, weight = self.path_of(site), self.weight(site)
        crossings = graph.crossings
        text = f"{weight} -> {self.names(through)} through more than {crossings} crossing(s)"
        far = Dropped(text, site.equation.where(), self.way(path, None, through))
        everything = set(range(self.n + len(self.tap_of)))
        out = self.cut_on_the_way(everything, path, graph.views[0])
        if relation is None:
            return [*out, far]
        destination = relation.slots.destination.reshape(-1, *relation.slots.destination.shape[-2:])
        lane, y, slot = np.nonzero(destination >= 0)
        pairs = np.stack([destination[lane, y, slot], y], axis=1)
        reached = matrix(pairs, (n, destination.shape[1]))
        number = graph.tapped[relation.index]
        direct = matrix(graph.views[0].taps[number].all_edges, (n, destination.shape[1]))
        more = matrix(graph.pattern.kept, (n, n)) @ reached + direct + reached
        return out if more.astype(bool).nnz == reached.nnz else [*out, far]


def _named(eqn: Equation) -> str:
    where = eqn.where()
    return f"{eqn.name} at {where}" if where else eqn.name
