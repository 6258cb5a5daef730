"""Whether a gradient can arrive at a parameter: is there a path to it from what the step returns?

A trace counts only where a cotangent meets it. Of `h = f(W x, g)`, `g = k(V h)` with the loss on g,
single-step cuts the entry of h into V if g also feeds back to h: the trace of W lives in h, and
nothing the step returns reads h in any other way. W has a trace, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from .._errors import dotted, warn
from ..program import Atom, Equation, Var, deep_equations, is_inexact
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
        instead: what brings one: rules by name, or 'windows'; empty if none does.
        flat: the function, with its line, through which alone what the step returns depends on the
            parameter, and whose derivative is zero: a spike without a surrogate gradient.
    """

    unless: tuple[Path, ...]
    instead: tuple[str, ...]
    flat: str | None = None

    def __str__(self) -> str:
        why = "nothing the step returns ever depends on it"
        if self.flat:
            why = f"what the step returns depends on it through {self.flat} alone, whose "
            why += "derivative is zero (a spike needs a surrogate gradient)"
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
        self.results = read or self.without_derivative()
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
        instead = self.instead(everywhere, leaves)
        return Silent(tuple(unless), instead, None if instead else self.flat(i))

    def without_derivative(self) -> _Mask:
        """The results that a loss may read if none has a derivative by a parameter.

        Those that parameters have an effect on; if there are none, it can only read the states.
        """
        step = self.step
        seeds = step.entry_bits((*step.params, *step.hidden))
        moved = union_of(self.outputs(seeds, len(seeds), differentiable=False))
        atoms = enumerate(step.program.outputs[: step.n_outs])
        floating = union_of(1 << j for j, a in atoms if is_inexact(a.dtype))
        return moved & floating or (1 << len(step.program.outputs)) - 1

    def flat(self, i: int) -> str | None:
        """Where the effect of parameter leaf i on what the step returns loses its derivative."""
        step, program = self.step, self.step.program
        sources = (step.params[i], *(step.hidden[k] for k in self.graph.influenced[i]))
        smooth = reach(program, {step.entry(leaf): 1 for leaf in sources})
        ends = [
            eqn
            for eqn in deep_equations(program)
            if not eqn.bodies
            and eqn.name != "stop_gradient"  # that is asked for
            and any(bits_of(a, smooth) for a in eqn.inputs if is_inexact(a.dtype))
            and not any(bits_of(o, smooth) for o in eqn.outputs)
        ]
        after = {o: 1 << n for n, eqn in enumerate(ends) for o in eqn.outputs}
        reached = self.outputs(after, len(ends), differentiable=False)
        leaves = (*step.hidden, *step.others)
        seeds = {step.entry(leaf): 1 << k for k, leaf in enumerate(leaves)}
        onward = self.outputs(seeds, len(leaves), differentiable=False)
        for eqn, mask in zip(ends, reached, strict=True):
            before = 0
            while before != mask:  # from step to step
                before = mask
                exits = enumerate(leaves)
                mask |= union_of(onward[k] for k, leaf in exits if mask >> leaf.output & 1)
            if mask & self.results:
                return eqn.name + (f" at {where}" if (where := eqn.where()) else "")
        return None

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

        def met(k: int) -> bool:
            lost = {step.exit(m) for j, m in enumerate(step.hidden)
                    if shares_trace[j] >> k & 1 and not own >> j & 1}  # fmt: skip
            passes = lambda eqn: lost.isdisjoint(eqn.outputs)
            (reached,) = self.outputs({step.entry(step.hidden[k]): 1}, 1, through=passes)
            return bool(reached & self.results)

        return any(map(met, leaves))

    def from_entries(self, cut: bool) -> list[_Mask]:
        """Per hidden leaf the outputs that its entry reaches, by paths that no operator cuts."""
        step, links = self.step, self.graph.links
        alike: dict[frozenset[Equation], list[int]] = {}  # leaves that the same operators cut
        for k in range(len(step.hidden)):
            by = (e for e, mask in links.cut_entries.items() if cut and mask >> k & 1)
            alike.setdefault(frozenset(by), []).append(k)
        out = [0] * len(step.hidden)

        def read(closed: frozenset[Equation], eqn: Equation) -> Sequence[Atom]:
            skip = links.x_positions[eqn] if eqn in closed else None
            return [a for i, a in enumerate(eqn.inputs) if i != skip]

        for closed, leaves in alike.items():
            seeds = {step.entry(step.hidden[k]): 1 << k for k in leaves}
            reached = self.outputs(seeds, len(out), read=partial(read, closed))
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


def warn_of_zero_derivatives(graph: Graph) -> None:
    """Warn of parameters that act on what the step returns, but along no derivative."""
    arrival = Arrival(graph, Credit.FULL)
    by_line: dict[str, list[str]] = {}
    for i, leaf in enumerate(graph.step.params):
        silent = arrival.silent(i, ())
        if silent is not None and silent.flat:
            by_line.setdefault(silent.flat, []).append(leaf.name)
    for line, names in by_line.items():
        warn(
            f"the gradient of {', '.join(names)} is zero.",
            where=line.partition(" at ")[2] or None,
            why=f"what the step returns depends on it through {line.partition(' at ')[0]} alone, "
            "whose derivative is zero",
            do="give the spike a surrogate gradient (a custom_jvp, or those of braintrace.nn), "
            "or let the loss read the states as well",
        )
