"""What a drawing of the compiled graph shows: parameters, operators, states, and the links between.

Parameters are on the left, the operators that consume them in the middle, state groups on the
right, and below these what needs no memory. A solid link is in the gradient, a dashed one is left
out of it. Renderers read nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from .._errors import dotted
from ..graph import Graph, ParameterReport, Path
from ._skeleton import skeleton


class Standing(Enum):
    """How a parameter stands, also in brief, how bad that is, its colour in a terminal, and what it
    means."""

    # fmt: off
    EXACT = ("trace, exact", "exact", 1, "32",
             "has memory; its gradient is that of back-propagation through time")
    APPROXIMATE = ("trace, not exact", "not exact", 3, "33",
                   "has memory; the dashed links are left out, or the trace is approximated")
    STEP = "within-step, exact", "step, exact", 2, "34", "needs no memory: it reaches no state"
    SHORT = ("within-step, not exact", "step, not exact", 4, "35",
             "the gradient of the step alone, which leaves something out")
    SILENT = ("no gradient arrives", "no gradient", 5, "31",
              "it never learns: no path from it to what the step returns is kept")
    UNTOUCHED = "untouched", "untouched", 0, "90", "nothing the step computes depends on it"
    # fmt: on

    def __init__(self, label: str, brief: str, severity: int, colour: str, meaning: str):
        self.label, self.brief, self.severity = label, brief, severity
        self.colour, self.meaning = colour, meaning


class Column(IntEnum):
    """From left to right; STEP, what ends without memory, is below the states."""

    PARAMETER = 0
    OPERATOR = 1
    STATE = 2
    STEP = 3


@dataclass(frozen=True, slots=True)
class Use:
    """Operators that consume the same parameters at the same line; `count` of them."""

    operator: str
    line: str | None
    parameters: tuple[Path, ...]
    groups: tuple[int, ...] | None  # of states with their traces; None if parameters have these
    count: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    """A box: its lines, a note below, and the whole story as `text`; in a mixture its rule."""

    key: str
    column: Column
    lines: tuple[str, ...]
    note: str
    text: str
    standing: Standing | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """A link between boxes; `parameters` are the keys of the boxes of those it is about."""

    source: str
    target: str
    standing: Standing
    left_out: bool
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of a compiled graph; `title` names the rule and the model."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    counts: Mapping[Standing, int]
    title: str = ""

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of a mixture."""
        return tuple(dict.fromkeys(n.rule for n in self.nodes if n.rule))

    @property
    def summary(self) -> str:
        """How many parameters there are of each standing, in one line."""
        total = sum(self.counts.values())
        parts = [f"{n} {standing.label}" for standing, n in self.counts.items() if n]
        return f"{total} parameter{'s' * (total != 1)}: {'; '.join(parts)}"


def uses_of(graph: Graph, per_parameter: bool) -> tuple[Use, ...]:
    """The trained operators of a step; `per_parameter` says that traces belong to parameters."""
    relation_of = {r.site.equation: r for r in graph.relations}
    uses: Counter[tuple[str, str | None, tuple[Path, ...], tuple[int, ...] | None]] = Counter()
    for site in graph.sites:
        leaves = [i for v in site.leaves.values() for i in v if graph.owns(i)]
        if not leaves:
            continue
        paths = tuple(dict.fromkeys(graph.step.params[i].path for i in leaves))
        relation = relation_of.get(site.equation)
        groups = () if relation is None else tuple(g.index for g in relation.hidden_groups)
        of = None if per_parameter else groups
        uses[site.equation.name, site.equation.where(), paths, of] += 1
    return tuple(Use(*key, count=count) for key, count in uses.items())


def standing_of(p: ParameterReport) -> Standing:
    """How a parameter stands."""
    if p.silent is not None:
        return Standing.SILENT
    if p.how == "none":
        return Standing.UNTOUCHED
    if p.how == "trace":
        return Standing.EXACT if p.exact else Standing.APPROXIMATE
    return Standing.STEP if p.exact else Standing.SHORT


def draw(
    parameters: Mapping[Path, ParameterReport],
    groups: Sequence[tuple[int, Sequence[Path]]],
    uses: Sequence[Use],
    title: str = "",
) -> Picture:
    """The drawing of the reports on the parameters."""
    drawing = _Drawing(parameters, groups, uses)
    for p in parameters.values():
        drawing.solid(p)
    for p in parameters.values():
        drawing.dashed(p)
    drawing.links = skeleton(drawing.links)
    standings = [standing_of(p) for p in parameters.values()]
    return Picture(
        tuple(drawing.nodes()),
        tuple(drawing.edges()),
        {s: standings.count(s) for s in Standing},
        title,
    )


class _Drawing:
    def __init__(self, parameters, groups, uses):
        self.parameters, self.groups, self.uses = parameters, groups, uses
        self.key_of = {path: f"p{i}" for i, path in enumerate(parameters)}
        self.group_of = {path: f"g{i}" for i, paths in groups for path in paths}
        self.links: dict[tuple[str, str, bool], dict[str, Standing]] = {}
        self.onward: dict[tuple[str, str], list[str]] = {}  # solid links that left-out paths end in

    def link(self, source: str, target: str, p: ParameterReport, left_out: bool = False) -> None:
        about = self.links.setdefault((source, target, left_out), {})
        about[self.key_of[p.path]] = standing_of(p)

    def operators(self, path: Path) -> dict[str, tuple[int, ...] | None]:
        """The boxes that a parameter goes through, and the groups of their traces if they say."""
        used = {f"o{i}": u.groups for i, u in enumerate(self.uses) if path in u.parameters}
        return used or {"plain": None}

    def solid(self, p: ParameterReport) -> None:
        for operator, groups in self.operators(p.path).items():
            if p.how == "none" and operator == "plain":
                continue
            self.link(self.key_of[p.path], operator, p)
            ends = self.to(p.states) if groups is None else [f"g{i}" for i in groups]
            if p.how != "trace" or not (ends or operator == "plain"):
                ends = ["step"] * (p.how != "none")
            for end in ends:
                self.link(operator, end, p)

    def to(self, states: Iterable[Path]) -> list[str]:
        return list(dict.fromkeys(self.group_of[s] for s in states if s in self.group_of))

    def dashed(self, p: ParameterReport) -> None:
        for way in (d.way for d in p.dropped if d.way is not None):
            is_parameter = way.source in self.parameters
            starts = [*self.operators(way.source)] if is_parameter else self.to([way.source])
            if way.via is not None:
                through = self.operators(way.via)
                for start in starts:
                    for operator in through:
                        self.link(start, operator, p, left_out=True)
                starts = [o for o in through if not self.traced(o)]
                for end in ((o, g) for o in through for g in self.traced(o)):
                    if end[1] in self.to(way.targets):
                        self.onward.setdefault(end, []).append(self.key_of[p.path])
            for start in starts:
                for group in self.to(way.targets):
                    self.link(start, group, p, left_out=True)

    def traced(self, operator: str) -> list[str]:
        """The groups an operator has a trace to."""
        targets = [t for source, t, left_out in self.links if source == operator and not left_out]
        return [t for t in targets if t.startswith("g")]

    def nodes(self) -> Iterable[Node]:
        for path, p in self.parameters.items():
            size = f" · {p.trace_bytes:,} bytes" if p.trace_bytes else ""
            standing, lines = standing_of(p), (dotted(path),)
            note = f"{standing.label}{size}" + (f" · {p.rule}" if p.rule else "")
            yield Node(self.key_of[path], Column.PARAMETER, lines, note, str(p), standing, p.rule)
        for i, use in enumerate(self.uses):
            name = use.operator + (f" × {use.count}" if use.count > 1 else "")
            where = use.line or "(no line)"
            text = f"{name} at {where}\nconsumes {', '.join(map(dotted, use.parameters))}"
            yield Node(f"o{i}", Column.OPERATOR, (name,), re.split(r"[\\/]", where)[-1], text)
        ends = {end for source, target, _ in self.links for end in (source, target)}
        if "plain" in ends:
            text = "Plain computation: the parameter enters the step through no operator."
            yield Node("plain", Column.OPERATOR, ("plain computation",), "no operator", text)
        for i, paths in self.groups:
            states = tuple(map(dotted, paths))
            many = "states that act on each other unit by unit" if len(states) > 1 else "state"
            text = "\n".join([f"Group {i}: {many}", *(f"  {name}" for name in states)])
            yield Node(f"g{i}", Column.STATE, states, f"group {i}", text)
        if "step" in ends:
            text = "Within the step: the gradient of one step alone, by reverse mode; no trace."
            yield Node("step", Column.STEP, ("within the step",), "no trace", text)

    def edges(self) -> Iterable[Edge]:
        for (source, target, left_out), about in self.links.items():
            also = () if left_out else self.onward.get((source, target), ())
            worst = max(about.values(), key=lambda s: s.severity)
            keys = tuple(dict.fromkeys([*about, *also]))
            yield Edge(source, target, worst, left_out, keys)
