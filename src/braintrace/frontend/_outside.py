"""What a step function does outside the learner call, and what the gradient misses of it.

The certificate of a learner is about `update`. A step function may do more: compute the learner's
input from parameters, or keep results in a state of its own. Reverse mode follows that within a
step only, so whatever of it reaches a later step is named here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from .._errors import dotted
from ..graph import IN_THE_STEP, Dropped, Outside, Path, bits_of, indices_of, reach
from ..program import Atom, Equation, Program, Var, deep_equations
from ._brainstate import States
from ._function import StateLeaf, Traced
from ._placeholder import is_placeholder, operands

_UNSEEN = Dropped(
    "whatever step_fn does with it outside the learner call: the call stands inside a derivative, "
    "a vmap or a function with its own derivative, which hides it"
)


def outside(
    traced: Traced | None,
    states: States,
    weights: States,
    private: Collection[int],
) -> Outside:
    """What a step function does outside the learner call, for which a placeholder stands in it.

    `states` are those of the model, `weights` its parameters and whatever else is differentiated,
    by path; `private` the ids of the learner's own states.
    """
    calls = (
        [] if traced is None else [e for e in deep_equations(traced.program) if is_placeholder(e)]
    )
    if traced is None or not calls:
        return Outside(frozenset(), {path: (_UNSEEN,) for path in weights}, ())
    result = _Walk(traced, calls, states, weights).result()
    if any(leaf.written and id(leaf.state) in private for leaf in traced.leaves):
        more = Dropped("what step_fn itself does to the learner's traces")
        return replace(result, everywhere=(*result.everywhere, more))
    return result


class _Walk:
    """Bit n of a set of sources is leaf n of the step function, the last one what calls compute."""

    def __init__(self, traced: Traced, calls: list[Equation], states: States, weights: States):
        self.traced, self.calls = traced, calls
        self.path_of = {id(s): p for p, s in {**states, **weights}.items()}
        self.number = {(id(leaf.state), leaf.index): n for n, leaf in enumerate(traced.leaves)}
        self.states = states
        ids = {id(s) for s in weights.values()}
        self.trained = [n for n, leaf in enumerate(traced.leaves) if id(leaf.state) in ids]
        self.new = len(traced.leaves)
        seeds = {
            leaf.entry: 1 << n
            for n, leaf in enumerate(traced.leaves)
            if leaf.written or n in self.trained
        }
        seeds |= {out: 1 << self.new for call in calls for out in call.outputs}
        seeds = {var: bit for var, bit in seeds.items() if var.is_inexact}
        self.bits = reach(traced.program, seeds, through=lambda e: not is_placeholder(e))
        self.same = self.unchanged()
        self.hidden = {n for call in calls for n in self.leaves_of(call, "hidden")}
        self.stale = self.outdated()

    def leaves_of(self, call: Equation, kind: str) -> list[int]:
        """The numbers of the leaves that a call takes as `params`, `hidden` or `others`."""
        leaves = getattr(call.params["marker"].graph.step, kind)
        return [self.number[id(self.states[leaf.path]), leaf.index] for leaf in leaves]

    def unchanged(self) -> dict[Var, int]:
        """For every value the leaf that it is, as `update` leaves it; several bits: it is none."""
        computed = list(self.traced.arguments)
        for program in _programs(self.traced.program):
            plain = [e for e in program.equations if not e.bodies and not is_placeholder(e)]
            computed += [*program.consts, *(v for e in plain for v in e.outputs)]
        seeds = dict.fromkeys(computed, 1 << self.new)
        seeds |= {leaf.entry: 1 << n for n, leaf in enumerate(self.traced.leaves)}
        for call in self.calls:
            numbers = [*self.leaves_of(call, "hidden"), *self.leaves_of(call, "others")]
            outs = call.outputs[len(call.outputs) - len(numbers) :]
            seeds |= {out: 1 << n for out, n in zip(outs, numbers, strict=True)}
        return reach(self.traced.program, seeds, through=lambda e: bool(e.bodies))

    def outdated(self) -> set[Var]:
        """Values of hidden states that are used again after a call has gone on from them."""
        outdated: set[Var] = set()
        ends = {leaf.exit for leaf in self.traced.leaves if isinstance(leaf.exit, Var)}
        for program in _programs(self.traced.program):
            before: set[Var] = set()
            for eqn in program.equations:
                inside = (e for body in eqn.bodies for e in deep_equations(body.program))
                if is_placeholder(eqn) or any(map(is_placeholder, inside)):
                    taken = {a for a in eqn.inputs if isinstance(a, Var)}
                    outdated |= taken & before
                    before |= taken
            outdated |= before & ends
        return outdated

    def is_its_own(self, n: int, value: Atom) -> bool:
        """Whether a call gets leaf n as the last call left it, and the next step as this call."""
        leaf = self.traced.leaves[n]
        if not leaf.entry.is_inexact:
            return True
        if n in self.hidden and (value in self.stale or leaf.exit in self.stale):
            return False
        return bits_of(value, self.same) == bits_of(leaf.exit, self.same) == 1 << n

    def result(self) -> Outside:
        leaves, taken = self.traced.leaves, 0
        everywhere: list[Dropped] = []
        dropped: dict[Path, tuple[Dropped, ...]] = {}
        for call in self.calls:
            values = operands(call, call.inputs)
            taken |= self.of((*values.consts, *values.args))
            for kind in ("params", "others", "hidden"):
                for n, value in zip(self.leaves_of(call, kind), getattr(values, kind), strict=True):
                    if self.is_its_own(n, value):
                        continue
                    taken |= self.of([value])
                    if kind == "hidden":
                        text = f"what step_fn itself does to {self.name(leaves[n])}"
                        everywhere.append(_in_step_fn(text, self.line(leaves[n].exit)))
        later, reached = self.later(taken | self.of(self.traced.results[:1]))
        if taken >> self.new & 1:
            text = "the learner's own results -> its input, in step_fn"
            everywhere.append(_in_step_fn(text, self.calls[0].where()))
        for n, lost in later.items():
            if lost >> self.new & 1:
                text = f"the learner's results -> {self.name(leaves[n])} -> later steps, in step_fn"
                everywhere.append(_in_step_fn(text, self.line(leaves[n].exit)))
        for i in self.trained:
            path = self.path_of[id(leaves[i].state)]
            line = next((e.where() for e in self.reading(leaves[i].entry)), None)
            through = ["the learner's input"] if taken >> i & 1 else []
            through += [self.name(leaves[n]) for n, lost in later.items() if lost >> i & 1]
            lost_paths = [f"{dotted(path)} -> {way} -> later steps, in step_fn" for way in through]
            dropped[path] = (*dropped.get(path, ()), *(_in_step_fn(t, line) for t in lost_paths))
        used = [self.path_of[id(leaves[i].state)] for i in self.trained if reached >> i & 1]
        dropped = {path: tuple(dict.fromkeys(d)) for path, d in dropped.items() if d}
        return Outside(frozenset(used), dropped, tuple(dict.fromkeys(everywhere)))

    def later(self, reached: int) -> tuple[dict[int, int], int]:
        """Per state whose entry counts, what it depends on; and all that counts, at any step."""
        later: dict[int, int] = {}
        leaves = self.traced.leaves
        while more := [n for n in indices_of(reached) if n not in later and n < self.new]:
            later |= {n: self.of([leaves[n].exit]) if leaves[n].written else 0 for n in more}
            for n in more:
                reached |= later[n]
        return later, reached

    def of(self, atoms: Iterable[Atom]) -> int:
        mask = 0
        for atom in atoms:
            mask |= bits_of(atom, self.bits)
        return mask

    def name(self, leaf: StateLeaf) -> str:
        path = self.path_of.get(id(leaf.state))
        return dotted(path) if path else f"a {type(leaf.state).__name__} of its own"

    def reading(self, var: Var) -> Iterable[Equation]:
        used = (e for e in self.traced.program.equations if not is_placeholder(e))
        return (e for e in used if any(a is var for a in e.inputs))

    def line(self, value: Atom) -> str | None:
        writers = (e for e in self.traced.program.equations if any(o is value for o in e.outputs))
        return next((e.where() for e in writers), None)


def _in_step_fn(text: str, line: str | None) -> Dropped:
    return Dropped(text, line, do=IN_THE_STEP)


def _programs(program: Program) -> Iterable[Program]:
    yield program
    for eqn in program.equations:
        for body in eqn.bodies:
            yield from _programs(body.program)
