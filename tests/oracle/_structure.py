"""The traced step: its operators and states, and which element depends on which.

Dependences are those of marks, one per source element (see `_marks`); what is held constant,
groups, recurrent components, the entries a single-step rule cuts and the slots of SnAp follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import numpy as np
from scipy.sparse import csgraph

from braintrace.program import Equation, Program, Var, inner_equations
from braintrace.verify._sequence import Path, StepFn, traced_step

from ._kinds import Kind, constant_values, kind_of, summands
from ._marks import OWN, kept_links, propagate, sources, structure, times
from ._operators import Operator, fold, operators_of, reach
from ._unroll import unroll

MOST = 64  # elements that are summed within a channel, and state elements of one


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """One array of a state: its path, entry, exit and value, and whether its last axis counts
    variables of one unit."""

    path: Path
    entry: Var
    exit: Any
    output: int
    value: Any
    channels: bool = False

    @property
    def varshape(self) -> tuple[int, ...]:
        return self.entry.shape[:-1] if self.channels else self.entry.shape

    @property
    def positions(self) -> np.ndarray:
        n = self.entry.shape[-1] if self.channels else 1
        return np.arange(self.entry.size) // n


class Structure:
    """One traced call of `step_fn`, its states, and the structure of its dependences.

    `operators` are all uses, `steady` those whose weights are the same at every step, and `traced`
    (the first of `steady`) those of them that reach a state along kept paths.
    """

    def __init__(
        self, model: brainstate.nn.Module, step_fn: StepFn, slices: Any, folds: bool = True
    ):
        program, consts, trace = traced_step(model, step_fn, slices)
        self.n_args = len(jax.tree.leaves(slices))
        self.states = dict(model.states(brainstate.ParamState).items())
        is_param = [
            isinstance(s, brainstate.ParamState)
            for s in trace.states
            for _ in jax.tree.leaves(s.value)
        ]
        entries = zip(program.inputs[self.n_args :], is_param, strict=True)
        unrolled = unroll(program, consts, [v for v, param in entries if param])
        self._leaves(model, program, unrolled.program.outputs[1:], trace)
        if folds:
            hidden = self.hidden
            unrolled = fold(unrolled, [s.entry for s in hidden], [s.exit for s in hidden])
        self.program, self.consts, self.origin = unrolled.program, unrolled.consts, unrolled.origin
        self.loops = any(  # no reverse mode
            e.name == "while" or any(i.primitive.name == "while" for i in inner_equations(e))
            for e in self.program.equations
        )
        self.constants = constant_values(self.program, self.consts)
        self.operators = operators_of(unrolled)
        self._matrices: dict[tuple[Equation, int, bool], list[Any]] = {}
        self.held = self._held()
        steady = [o for o in self.operators if o.steady]
        self.channels = [o for o in steady if self._within_channel(o)]
        self.traced = [o for o in steady if o in self.channels or self.reads([o.y]).any()]
        self.steady = [*self.traced, *(o for o in steady if o not in self.traced)]
        self.kept = self._kept_pairs(self.reads([s.entry for s in self.hidden]))
        self.groups = self._groups()
        self.cut = self._recurrent()

    def _leaves(self, model: Any, program: Program, exits: Sequence[Any], trace: Any) -> None:
        """Sort the arrays of all states into parameters, hidden states and others."""
        self.params: list[Leaf] = []
        self.hidden: list[Leaf] = []
        self.others: list[Leaf] = []
        paths = {id(s): p for p, s in model.states().items()}
        read = {a for e in program.equations for a in e.inputs if isinstance(a, Var)}
        leaves = [
            (state, written, value)
            for state, written in zip(trace.states, trace.been_writen, strict=True)
            for value in jax.tree.leaves(state.value)
        ]
        for k, (state, written, value) in enumerate(leaves):
            entry, output = program.inputs[self.n_args + k], 1 + k
            path = paths.get(id(state), (id(state),))
            channels = isinstance(state, brainstate.HiddenGroupState)
            leaf = Leaf(path, entry, exits[k], output, value, channels)
            passed = any(o is entry for i, o in enumerate(program.outputs) if i != output)
            remembers = isinstance(state, brainstate.HiddenState) or entry in read or passed
            if isinstance(state, brainstate.ParamState):
                self.params.append(leaf)
            elif written and remembers and entry.is_inexact:
                self.hidden.append(leaf)
            else:
                self.others.append(leaf)

    # ------------------------------------------------------------------------ structure: paths

    @cached_property
    def kinds(self) -> dict[tuple[Equation, int], Kind]:
        """The kind of every operand that depends on a state or an operator."""
        starts = [*(s.entry for s in self.hidden), *(o.y for o in self.operators)]
        varying = reach(self.program, starts)
        cut = {o.equation for o in self.operators}
        return {
            (e, i): kind_of(e, i, self.constants, varying)
            for e in self.program.equations
            for i, a in enumerate(e.inputs)
            if a in varying and e not in cut
        }

    def _held(self) -> set[tuple[Equation, int]]:
        """The operands that kept paths do not pass: those mixed, and those of sums over units.

        A sum is kept if its result reaches, now or later, at most one position of each state
        shape. Sums that would not even if all the others were cut are cut; if there are none, the
        last one that does not.
        """
        mixed = {p for p, kind in self.kinds.items() if kind is Kind.MIXES}
        sums = [p for p, kind in self.kinds.items() if kind is Kind.SUMS]
        cut: list[Var] = []

        results = list(dict.fromkeys(e.outputs[0] for e, _ in sums))

        def holding(results: list[Var]) -> set[tuple[Equation, int]]:
            return mixed | {(e, i) for e, i in sums if e.outputs[0] in results}

        while True:
            self.held = holding(cut)
            bad = self._spreading([v for v in results if v not in cut])
            if not bad:
                return self.held
            self.held = holding([*cut, *bad])
            cut += self._spreading(bad) or bad[-1:]

    def _spreading(self, results: list[Var]) -> list[Var]:
        """Those whose elements reach, now or later, several positions of one state shape."""
        reads = self.reads([*(s.entry for s in self.hidden), *results])
        n = len(reads)
        reached = closure(self._kept_pairs(reads[:, :n]), reads[:, n:])
        ends = np.cumsum([0, *(v.size for v in results)])
        return [
            v
            for v, a, b in zip(results, ends, ends[1:], strict=False)
            if any(self._spread(column) for column in reached[:, a:b].T)
        ]

    def _spread(self, column: np.ndarray) -> bool:
        """Whether several positions of one state shape are marked."""
        kind, position = self.places
        return any(len(set(position[column & (kind == k)].tolist())) > 1 for k in set(kind))

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Per state element the number of its state's shape, and its position in it."""
        shapes = [s.varshape for s in self.hidden]
        kind = [np.full(s.entry.size, shapes.index(s.varshape)) for s in self.hidden]
        none = [np.zeros(0, int)]
        return np.concatenate(kind or none), np.concatenate(
            [s.positions for s in self.hidden] or none
        )

    def _within_channel(self, o: Operator) -> bool:
        """Whether sums and products are kept for an operator, since they stay within a channel.

        So it is if something would be held, nothing but sums and products of a few elements, and
        each output element reaches a few state elements which no other one reaches; or, for an
        operator that would reach no state, if those that meet are one of several channels.
        """
        step = self.reads([s.entry for s in self.hidden], all_paths=True, crossing=False)
        reached = closure(step, self.reads([o.y], all_paths=True, crossing=False))
        if not reached.any() or reached.sum(0).max() > MOST:
            return False
        if reached.sum(1).max() > 1:
            by_weight = [structure(o.equation, k, self.constants)[0] for k in o.trained]
            copies = max(1 if m is OWN else m.sum(0).max() for m in by_weight)
            columns = reached[:, reached.any(0)].T.astype(float)
            parts = csgraph.connected_components(columns @ columns.T)[0]
            if self.reads([o.y]).any() or parts <= copies:
                return False
        varying: set[Any] = {o.y}
        varying |= {self.hidden[k].entry for k in set(self.leaf_of()[reached.any(1)].tolist())}
        operators = {p.equation for p in self.operators}
        for e in self.program.equations:
            if e not in operators and e.name != "stop_gradient" and varying & set(e.inputs):
                varying.update(v for v in e.outputs if v.is_inexact)
        held = [e for e, i in self.held if e.inputs[i] in varying]
        return bool(held) and all(summands(e) <= MOST for e in held)

    def reads(
        self, variables: Sequence[Var], all_paths: bool = False, crossing: bool | None = None
    ) -> np.ndarray:
        """Which elements of the variables each exit element reads, along the kept paths or along
        `all_paths`, `crossing` operators or not: (exits, elements)."""
        crossing = all_paths if crossing is None else crossing
        cut = set() if crossing else {o.equation for o in self.operators}

        def links(eqn: Equation, i: int) -> list[Any]:
            if eqn in cut or (not all_paths and (eqn, i) in self.held):
                return [None] * len(eqn.outputs)
            if (eqn, i, all_paths) not in self._matrices:
                self._matrices[eqn, i, all_paths] = (
                    structure(eqn, i, self.constants)
                    if all_paths
                    else kept_links(eqn, i, self.kinds[eqn, i], self.constants)
                )
            return self._matrices[eqn, i, all_paths]

        start = sources(variables)
        total = sum(v.size for v in variables)
        marks = propagate(self.program, start, links)
        none = [np.zeros((0, total), bool)]
        return np.concatenate(
            [marks.get(s.exit, np.zeros((s.entry.size, total), bool)) for s in self.hidden] or none
        )

    # ------------------------------------------------------------------------ structure: states

    def _kept_pairs(self, reads: np.ndarray) -> np.ndarray:
        """The pairs (exit element, entry element) of D, of what each exit reads: its own position,
        else a single other one, else a tree, positions that exits of this shape read at this
        position only."""
        kind, position = self.places
        kept = np.zeros_like(reads)
        for e in range(len(reads)):
            for k in set(kind[reads[e]].tolist()):
                met = reads[e] & (kind == k)
                own = met & (position == position[e]) & (kind[e] == k)
                positions = set(position[met].tolist())
                if own.any():
                    kept[e] |= own
                elif len(positions) == 1:
                    kept[e] |= met
                else:
                    leaves = (kind == k) & np.isin(position, list(positions))
                    readers = reads[:, leaves].any(1) & (kind == kind[e])
                    if len(set(position[readers].tolist())) == 1:
                        kept[e] |= met
        return kept

    def leaf_of(self) -> np.ndarray:
        return np.concatenate([np.full(s.entry.size, k) for k, s in enumerate(self.hidden)])

    def _groups(self) -> list[list[int]]:
        """Hidden leaves of equal shape that kept pairs connect."""
        leaf = self.leaf_of()
        label = list(range(len(self.hidden)))
        for e, s in np.argwhere(self.kept):
            a, b = label[leaf[e]], label[leaf[s]]
            if self.hidden[leaf[e]].varshape == self.hidden[leaf[s]].varshape:
                label = [min(a, b) if n in (a, b) else n for n in label]
        return [[k for k, n in enumerate(label) if n == g] for g in sorted(set(label))]

    def _recurrent(self) -> list[set[Equation]]:
        """Per group the operators that its entry must not pass through: they lead back to it.

        The copies of an operator in a body are one operator.
        """
        program, n = self.program, len(self.groups)
        from_entry = [reach(program, [self.hidden[k].entry for k in g]) for g in self.groups]
        exits = [[self.hidden[k].exit for k in g] for g in self.groups]
        meets = lambda values, j: any(e in values for e in exits[j])
        path = np.array([[meets(from_entry[i], j) for j in range(n)] for i in range(n)], bool)
        for _ in range(n):
            path |= path @ path
        loop = (path & path.T) | np.eye(n, dtype=bool)
        copies: dict[Equation, list[Operator]] = {}
        for o in self.operators:
            copies.setdefault(self.origin[o.equation], []).append(o)
        out: list[set[Equation]] = [set() for _ in range(n)]
        for uses in copies.values():
            fed = reach(program, [o.y for o in uses])
            inputs = [o.equation.inputs[o.x_at] for o in uses if o.x_at is not None]
            for i in range(n):
                enters = any(a in from_entry[i] for a in inputs)
                if enters and any(loop[i, j] and meets(fed, j) for j in range(n)):
                    out[i].update(o.equation for o in uses)
        return out

    def slots(self, n: int) -> list[np.ndarray]:
        """SnAp(n): per steady operator which state elements each output element reaches along
        kept paths and at most n - 1 others: (states, elements of y)."""
        entries = [s.entry for s in self.hidden]
        everything = self.reads(entries, all_paths=True)
        out = []
        for o in self.steady:
            reached = closure(self.kept, self.reads([o.y]))
            direct = self.reads([o.y], all_paths=True)
            for _ in range(n - 1):
                reached = closure(self.kept, reached | direct | times(everything, reached))
            out.append(reached)
        return out


def closure(step: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """What is reached now, and what pairs (later element, element) of a step lead to from there."""
    while not ((more := reached | times(step, reached)) == reached).all():
        reached = more
    return reached
