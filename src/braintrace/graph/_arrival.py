"""Whether a gradient can arrive at a parameter: is there a path to it from what the step returns?

A trace counts only where a cotangent meets it. Of `h = f(W x, g)`, `g = k(V h)` with the loss on g,
single-step cuts the entry of h into V if g also feeds back to h: the trace of W lives in h, and
nothing the step returns reads h in any other way. W has a trace, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .._errors import dotted
from ..program import Atom, Equation, Var
from ._graph import Graph
from ._reach import bits_of, indices_of, reach, union_of
from ._slots import TAKE_WINDOWS
from ._step import Path


class Credit(Enum):
    """Where the cotangents of a loss meet the traces of a rule."""

    CUT = "at the states that enter a step, recurrent entries into operators cut"
    EXITS = "there, and at the states that leave a step"
    UNCUT = "at the states that enter and leave a step, nothing cut"
    FULL = "everywhere: in windows nothing is cut, and RTRL follows every path"
    STEP = "nowhere: what the rule stores meets the gradient within the step only"
    OTHER = "a signal of the rule's own, or a random estimate, that needs no path"


@dataclass(frozen=True, slots=True)
class Silent:
    """Why a parameter never learns: no gradient of what the step returns can arrive.

    Attributes:
        unless: the states that bring a gradient if the loss reads them directly.
        instead: what brings one: rules by name, or 'windows'; empty if nothing that the step
            returns ever depends on the parameter.
    """

    unless: tuple[Path, ...]
    instead: tuple[str, ...]

    def __str__(self) -> str:
        why = "nothing the step returns ever depends on it"
        if self.instead:
            why = "this rule leaves out every path from it to what the step returns"
        if self.unless:
            names = ", ".join(map(dotted, self.unless))
            why += f"; only a loss that reads {names} directly brings one"
        if not self.instead:
            return f"no gradient can arrive: {why}"
        *rules, last = [_WINDOWS if rule == "windows" else rule for rule in self.instead]
        return f"no gradient can arrive: {why}. With {', '.join(rules)} or {last} one does"


Silent.__module__ = "braintrace"
_WINDOWS = f"windows ({TAKE_WINDOWS})"
_Mask = int  # of the outputs of the step


class Arrival:
    """Answers for the parameters of one graph, under a rule with this kind of credit."""

    def __init__(self, graph: Graph, credit: Credit):
        self.graph, self.credit, self.step = graph, credit, graph.step
        step = self.step
        self.within = self.outputs(step.entry_bits(step.params), len(step.params))
        self.entries = self.from_entries(cut=False)
        read = union_of((*self.within, *self.entries)) & (1 << step.n_outs) - 1
        # Where no result has a derivative, a loss can only read the states.
        self.results = read or (1 << len(step.program.outputs)) - 1
        cut = credit in (Credit.CUT, Credit.EXITS)
        self.met = self.from_entries(cut=True) if cut else self.entries
        if credit in (Credit.EXITS, Credit.UNCUT):
            exits: dict[Var, int] = {}
            for k, leaf in enumerate(step.hidden):
                if isinstance(step.exit(leaf), Var):
                    exits[step.exit(leaf)] = exits.get(step.exit(leaf), 0) | 1 << k
            leaving = self.outputs(exits, len(step.hidden))
            self.met = [a | b for a, b in zip(self.met, leaving, strict=True)]

    def silent(self, i: int, leaves: Sequence[int]) -> Silent | None:
        """The verdict on parameter leaf i with traces in these hidden leaves, None if it learns."""
        if self.credit is Credit.OTHER:
            return None
        everywhere = self.graph.influenced[i]
        met = {Credit.FULL: everywhere, Credit.STEP: ()}.get(self.credit, leaves)
        mask = self.within[i] | union_of(self.met[k] for k in met)
        if mask & self.results:
            return None
        states = (*self.step.hidden, *self.step.others)
        unless = dict.fromkeys(s.path for s in states if mask >> s.output & 1)
        return Silent(tuple(unless), self.instead(everywhere, leaves))

    def instead(self, everywhere: Iterable[int], leaves: Sequence[int]) -> tuple[str, ...]:
        if not union_of(self.entries[k] for k in everywhere) & self.results:
            return ()
        ours = self.credit in (Credit.UNCUT, Credit.FULL)
        snap = ("snap",) if not ours and self.met_by_snap(leaves) else ()
        return (*snap, "rtrl", "windows")

    def met_by_snap(self, leaves: Sequence[int]) -> bool:
        """Whether SnAp meets these traces: it cuts no entry, but D must have what they share."""
        step, shares_trace = self.step, self.graph.shares_trace
        own = union_of(1 << k for k in leaves)
        for k in leaves:
            lost = [step.exit(m) for j, m in enumerate(step.hidden)
                    if shares_trace[j] >> k & 1 and not own >> j & 1]  # fmt: skip
            passes = lambda eqn, lost=lost: not any(o in lost for o in eqn.outputs)
            (reached,) = self.outputs({step.entry(step.hidden[k]): 1}, 1, through=passes)
            if reached & self.results:
                return True
        return False

    def from_entries(self, cut: bool) -> list[_Mask]:
        """Per hidden leaf the outputs that its entry reaches, by paths that no operator cuts."""
        step, links = self.step, self.graph.links
        alike: dict[frozenset[Equation], list[int]] = {}  # leaves that the same operators cut
        for k in range(len(step.hidden)):
            by = (e for e, mask in links.cut_entries.items() if cut and mask >> k & 1)
            alike.setdefault(frozenset(by), []).append(k)
        out = [0] * len(step.hidden)
        for closed, leaves in alike.items():

            def read(eqn: Equation, closed: frozenset = closed) -> Sequence[Atom]:
                skip = links.x_positions[eqn] if eqn in closed else None
                return [a for i, a in enumerate(eqn.inputs) if i != skip]

            seeds = {step.entry(step.hidden[k]): 1 << k for k in leaves}
            reached = self.outputs(seeds, len(out), read=read)
            out = [a | b for a, b in zip(out, reached, strict=True)]
        return out

    def outputs(self, seeds: Mapping[Var, int], n: int, **how: Any) -> list[_Mask]:
        """Per seed, the outputs of the step that depend on it."""
        bits = reach(self.step.program, seeds, **how)
        out = [0] * n
        for j, atom in enumerate(self.step.program.outputs):
            for i in indices_of(bits_of(atom, bits)):
                out[i] |= 1 << j
        return out
