"""The traced step: its operators and states, and which element depends on which.

Dependences are found by running each movement on marks, one mark per source element; groups,
recurrent components and the entries a single-step rule cuts follow from them (DESIGN: the law).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import Const, Equation, Program, Var, bind, flatten, is_inexact, trace
from ..ops import ETPPrimitive
from ._kinds import Kind, kind_of
from ._sequence import Path, StepFn, checked_loss
from ._unroll import unrolled


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """A use of an ETP operator with a trained operand.

    `traced`: its operands are the same at every step and its output reaches a state.
    """

    equation: Equation
    trained: tuple[int, ...]
    traced: bool

    @property
    def y(self) -> Var:
        return self.equation.outputs[0]

    @property
    def x_at(self) -> int | None:
        return self.equation.primitive.x_invar_index


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
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
    """One traced call of `step_fn`, its slots, and the structure of its dependences."""

    @staticmethod
    def of(model: brainstate.nn.Module, step_fn: StepFn, slices: Any) -> Structure:
        loss = checked_loss(step_fn)
        stateful = brainstate.transform.StatefulFunction(
            lambda *s: loss(model, *s), return_only_write=False
        )
        stateful.make_jaxpr(*slices)
        key = stateful.get_arg_cache_key(*slices)
        trace = stateful.get_state_trace_by_cache(key)
        program, consts = flatten(stateful.get_jaxpr_by_cache(key))
        n_args = len(jax.tree.leaves(slices))
        kinds = [
            isinstance(s, brainstate.ParamState)
            for s in trace.states
            for _ in jax.tree.leaves(s.value)
        ]
        states = [v for v, fixed in zip(program.inputs[n_args:], kinds, strict=True) if not fixed]
        return Structure(model, *unrolled(program, consts, states), trace, n_args)

    def __init__(self, model: Any, program: Program, consts: Any, trace: Any, n_args: int):
        self.program, self.consts, self.n_args = program, consts, n_args
        self.states = dict(model.states(brainstate.ParamState).items())
        self.params: list[Slot] = []
        self.hidden: list[Slot] = []
        self.others: list[Slot] = []
        paths = {id(s): p for p, s in model.states().items()}
        read = {a for e in program.equations for a in e.inputs if isinstance(a, Var)}
        k = 0
        for state, written in zip(trace.states, trace.been_writen, strict=True):
            for value in jax.tree.leaves(state.value):
                entry, out = program.inputs[n_args + k], program.outputs[1 + k]
                path = paths.get(id(state), (id(state),))
                channels = isinstance(state, brainstate.HiddenGroupState)
                slot = Slot(path, entry, out, 1 + k, value, channels)
                passed = any(o is entry for i, o in enumerate(program.outputs) if i != 1 + k)
                remembers = isinstance(state, brainstate.HiddenState) or entry in read or passed
                if isinstance(state, brainstate.ParamState):
                    self.params.append(slot)
                elif written and remembers and entry.is_inexact:
                    self.hidden.append(slot)
                else:
                    self.others.append(slot)
                k += 1
        self.known = _constants(program, consts)
        self.kinds = {e: kind_of(e, self.known) for e in program.equations}
        self.operators = self._find_operators()
        self.traced = [o for o in self.operators if o.traced]
        self.kept = self._kept()
        self.groups = self._groups()
        self.cut = self._recurrent()

    # --------------------------------------------------------------------- structure: operators

    def _find_operators(self) -> list[Operator]:
        program = self.program
        learns = _reach(program, [s.entry for s in self.params])
        params = {s.entry for s in self.params}
        moving = _reach(program, [v for v in program.inputs if v not in params], smooth=False)
        out = []
        for eqn in program.equations:
            if not isinstance(eqn.primitive, ETPPrimitive):
                continue
            at = eqn.primitive.x_invar_index
            trained = tuple(i for i, a in enumerate(eqn.inputs) if i != at and a in learns)
            if trained:
                varying = {i for i, a in enumerate(eqn.inputs) if i != at and a in moving}
                steady = not varying & {*trained, *_read_by_derivative(eqn, trained)}
                out.append(Operator(eqn, trained, steady))
        self.operators = out
        reached = [self._reads([o.y]).any() for o in out]
        return [
            Operator(o.equation, o.trained, o.traced and bool(r))
            for o, r in zip(out, reached, strict=True)
        ]

    def _reads(self, sources: Sequence[Var]) -> np.ndarray:
        """Which source elements each exit element reads, along the kept paths: (exits, sources)."""
        cut = {o.equation for o in self.operators}
        total = sum(v.size for v in sources)
        reads: dict[Var, np.ndarray] = {}
        start = 0
        for v in sources:
            own = np.zeros((v.size, total), bool)
            own[:, start : start + v.size] = np.eye(v.size, dtype=bool)
            reads[v] = own.reshape((*v.shape, total))
            start += v.size
        for eqn in self.program.equations:
            if eqn in cut or not any(a in reads for a in eqn.inputs):
                continue
            if self.kinds[eqn] is Kind.POINTWISE:
                for v in (v for v in eqn.outputs if v.is_inexact):
                    shape = (*v.shape, total)
                    met = [np.broadcast_to(reads[a], shape) for a in eqn.inputs if a in reads]
                    reads[v] = np.logical_or.reduce(met)
            elif self.kinds[eqn] is Kind.MOVES:
                for a in (a for a in eqn.inputs if a in reads):
                    for v, marks in zip(eqn.outputs, self._moved(eqn, a, reads[a]), strict=True):
                        reads[v] = reads.get(v, False) | marks
        none = lambda s: np.zeros((s.entry.size, total), bool)
        return np.concatenate(
            [reads[s.exit].reshape(-1, total) if s.exit in reads else none(s) for s in self.hidden]
        )

    def _moved(self, eqn: Equation, source: Var, marks: np.ndarray) -> list[np.ndarray]:
        """Run a movement on the marks of one operand, one source element at a time."""
        # What is not moved leaves no mark; the other factor of an outer product lets all pass.
        fill = jnp.ones if eqn.name == "dot_general" else jnp.zeros

        def move(column):
            values = []
            for a in eqn.inputs:
                value: Any = a.value if isinstance(a, Const) else self.known.get(a)
                if a is source:
                    values.append(column)
                elif _says_where(a):
                    values.append(value)
                else:
                    values.append(fill(np.shape(value) if isinstance(a, Const) else a.shape))
            return [jnp.nan_to_num(o) for o in bind(eqn, values)]

        out = jax.vmap(move, in_axes=-1, out_axes=-1)(marks.astype(float))
        return [np.asarray(o) != 0 for o in out]

    # ------------------------------------------------------------------------ structure: states

    def _kept(self) -> np.ndarray:
        """Pairs (exit element, entry element) of D: the own position, else a single other one."""
        reads = self._reads([s.entry for s in self.hidden])
        shapes = [s.varshape for s in self.hidden]
        kind = np.concatenate(
            [np.full(s.entry.size, shapes.index(s.varshape)) for s in self.hidden]
        )
        position = np.concatenate([s.positions for s in self.hidden])
        kept = np.zeros_like(reads)
        for e in range(len(reads)):
            for k in set(kind[reads[e]].tolist()):
                met = reads[e] & (kind == k)
                own = met & (position == position[e]) & (kind[e] == k)
                if own.any():
                    kept[e] |= own
                elif len(set(position[met].tolist())) == 1:
                    kept[e] |= met
        return kept

    def leaf_of(self) -> np.ndarray:
        return np.concatenate([np.full(s.entry.size, k) for k, s in enumerate(self.hidden)])

    def _groups(self) -> list[list[int]]:
        """Hidden slots of equal shape that kept pairs connect."""
        leaf = self.leaf_of()
        label = list(range(len(self.hidden)))
        for e, s in np.argwhere(self.kept):
            a, b = label[leaf[e]], label[leaf[s]]
            if self.hidden[leaf[e]].varshape == self.hidden[leaf[s]].varshape:
                label = [min(a, b) if n in (a, b) else n for n in label]
        return [[k for k, n in enumerate(label) if n == g] for g in sorted(set(label))]

    def _recurrent(self) -> list[set[Equation]]:
        """Per group the operators that its entry must not pass through: they lead back to it."""
        program, n = self.program, len(self.groups)
        from_entry = [_reach(program, [self.hidden[k].entry for k in g]) for g in self.groups]
        exits = [[self.hidden[k].exit for k in g] for g in self.groups]
        meets = lambda found, j: any(e in found for e in exits[j])
        path = np.array([[meets(from_entry[i], j) for j in range(n)] for i in range(n)], bool)
        for _ in range(n):
            path |= path @ path
        loop = (path & path.T) | np.eye(n, dtype=bool)
        out: list[set[Equation]] = [set() for _ in range(n)]
        for o in self.operators:
            fed = _reach(program, [o.y])
            for i in range(n):
                enters = o.x_at is not None and o.equation.inputs[o.x_at] in from_entry[i]
                if enters and any(loop[i, j] and meets(fed, j) for j in range(n)):
                    out[i].add(o.equation)
        return out


def _says_where(atom: Any) -> bool:
    dtype = jnp.result_type(atom.value) if isinstance(atom, Const) else atom.dtype
    return not is_inexact(dtype)  # an index or a shape, not a quantity


def _constants(program: Program, consts: Sequence[Any]) -> dict[Var, Any]:
    """The values that depend on no input of the program."""
    known: dict[Var, Any] = dict(zip(program.consts, consts, strict=True))
    for eqn in program.equations:
        if all(isinstance(a, Const) or a in known for a in eqn.inputs):
            values = [a.value if isinstance(a, Const) else known[a] for a in eqn.inputs]
            known.update(zip(eqn.outputs, bind(eqn, values), strict=True))
    return known


def _reach(program: Program, sources: Sequence[Var], smooth: bool = True) -> set[Any]:
    """The values that depend on the sources; `smooth` along paths that carry a derivative."""
    found: set[Any] = set(sources)
    for eqn in program.equations:
        if smooth and eqn.name == "stop_gradient":
            continue
        if any(
            a in found and (not smooth or a.is_inexact) for a in eqn.inputs if isinstance(a, Var)
        ):
            found.update(v for v in eqn.outputs if not smooth or v.is_inexact)
    return found


def _read_by_derivative(eqn: Equation, trained: Sequence[int]) -> set[int]:
    """The operands whose value the derivative by the trained operands reads."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in eqn.inputs]

    def pushed(*values):
        def moved(*weights):
            full = list(values[: len(shapes)])
            for i, w in zip(trained, weights, strict=True):
                full[i] = w
            return bind(eqn, full)[0]

        point = tuple(values[i] for i in trained)
        return jax.jvp(moved, point, values[len(shapes) :])[1]

    program, _ = trace(pushed, *shapes, *(shapes[i] for i in trained))
    found = {v: {i} for i, v in enumerate(program.inputs[: len(shapes)])}
    for e in program.equations:
        read = set().union(*(found.get(a, ()) for a in e.inputs if isinstance(a, Var)))
        found.update((out, read) for out in e.outputs)
    out = program.outputs[0]
    return found.get(out, set()) if isinstance(out, Var) else set()
