"""What training records, every so many steps: chosen states, and traces of chosen weights.

    steps        1 2 3 4 5 6 7 8          update_every=2, every=4: states after 4 and 8,
    updates        u   u   u   u          and the traces that these updates leave
    records            r       r

A loop of updates runs inside a loop of records, whose results are the states after its last update
and a few numbers of the traces: no more is stored than is returned. Where records are closer than
updates, the states of all steps of one update are results of it, and are thinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import dotted, type_error, value_error
from ..graph import Leaf
from ..program import PyTree
from ..rules import check_count
from ._plan import Plan

Path = tuple[Any, ...]
Name: TypeAlias = str | Path  # a path, or its keys joined by dots
Place: TypeAlias = tuple[int, tuple[int, ...]]  # the number of an array, and an index in it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    """What training records, and how often; its arrays are a `braintrace.show.Recording`.

    Nothing else is stored: a recording of n states and m traces takes `length / every` times their
    chosen numbers. The spikes of a cell of `braintrace.nn` are those of its recorded membrane,
    `cell.spikes(recording.states["V",])`.

    Args:
        states: names of states, as the report prints them.
        traces: names of parameters; of the trace of each its length and some entries are recorded,
            as the updates leave them, so `every` is a multiple of `update_every`.
        every: steps between two records; a multiple of `update_every`, or a divisor.
        entries: how many entries of each trace, evenly spread.

    Example:
        >>> import jax.numpy as jnp, optax, braintrace
        >>> step = lambda w, h, x: (h := jnp.tanh(0.9 * h + x @ w), h)
        >>> net, opt = braintrace.online(step, 'd_rtrl'), optax.sgd(0.1)
        >>> w, xs = jnp.ones((3, 4)), jnp.ones((100, 3))
        >>> record = braintrace.Record(states=('state',), traces=('params',), every=10)
        >>> train = net.train(lambda h: jnp.mean(h**2), opt, update_every=5, record=record)
        >>> *_, recording = train(w, opt.init(w), net.init(w, jnp.zeros(4), xs[0]), xs)
        >>> recording.states['state',].shape, recording.steps.tolist()[:3]
        ((10, 4), [10, 20, 30])
    """

    states: tuple[Name, ...] = ()
    traces: tuple[Name, ...] = ()
    every: int = 1
    entries: int = 8

    def __post_init__(self) -> None:
        for name in ("states", "traces"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        check_count("every", self.every, "steps")


@dataclass(frozen=True, slots=True, eq=False)
class TraceRecord:
    """The eligibility trace of one parameter over time.

    A label names an array of the trace and an index in it: `weight[0, 2, 1, 0]` of a matrix is
    sample 0, row 2, column 1, and the first of the state elements that the output affects (its
    slots). See `docs/how-to/pictures.md`.

    Attributes:
        norm: its length after every step, over all samples, (T,).
        entries: some of its entries after every step, (T, n).
        labels: which these are: the array of the trace, and the index in it.
    """

    norm: Array
    entries: Array
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The record of a learner: of every step, or of every so many. Leading axes count them.

    Attributes:
        length: the number of records.
        outputs: what the learner returned.
        states: the states after each step, by path.
        groups: the paths of states that share their traces.
        traces: the eligibility traces after each step, by the path of the parameter.
        losses: the loss of each step; None without a `step_fn`, and while training, which returns
            them.
        signals: the learning signal `∂L_t/∂h_t`, by the path of the state; empty without a
            `step_fn`, and while training.
        gradients: the length of the online gradient of each step, by the path of the parameter;
            as signals.
        steps: the step of each record, counted from 1.
    """

    length: int
    outputs: PyTree
    states: Mapping[Path, PyTree]
    groups: tuple[tuple[Path, ...], ...]
    traces: Mapping[Path, TraceRecord]
    losses: Array | None
    signals: Mapping[Path, Array]
    gradients: Mapping[Path, Array]
    steps: np.ndarray | None = None

    @property
    def after(self) -> np.ndarray:
        """The step of each record, counted from 1."""
        return np.arange(1, self.length + 1) if self.steps is None else self.steps


@dataclass(frozen=True, slots=True)
class TraceReader:
    """Reads the trace of one parameter: its length, and its entries at `places`.

    Attributes:
        arrays: of all traces, the number of each and of a leaf of it.
        places: numbers among these arrays, and indices.
        labels: what these are called.
    """

    arrays: tuple[tuple[int, int], ...]
    places: tuple[Place, ...]
    labels: tuple[str, ...]

    def __call__(self, traces: Sequence[PyTree]) -> tuple[Array, Array]:
        found = [jax.tree.leaves(traces[i])[k] for i, k in self.arrays]
        return read_entries(found, self.places)


@dataclass(frozen=True, slots=True)
class Recorder:
    """What is recorded of a plan; equal ones record the same.

    Attributes:
        every: steps between two records.
        within: whether several records are within an update.
        states: numbers among the hidden states and the others.
        state_paths, trace_paths: of what.
        traces: readers.
    """

    every: int
    within: bool
    states: tuple[int, ...]
    state_paths: tuple[Path, ...]
    traces: tuple[TraceReader, ...]
    trace_paths: tuple[Path, ...]

    def of_states(self, hidden: Sequence[Array], others: Sequence[Array]) -> tuple[Array, ...]:
        """The chosen ones of the states."""
        arrays = (*hidden, *others)
        return tuple(arrays[i] for i in self.states)

    def of_traces(self, traces: Sequence[PyTree]) -> tuple[tuple[Array, Array], ...]:
        """The length and some entries of each."""
        return tuple(read(traces) for read in self.traces)

    def after(
        self, length: int, of_steps: PyTree, states: tuple[Any, Any], traces: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree]:
        """The records of so many steps: of the states after them and the traces at the end.

        `of_steps` are the chosen states after every step, if records are within an update.
        """
        if self.within:
            return jax.tree.map(lambda a: a[self.every - 1 :: self.every], of_steps), ()
        end = self.of_states(*states), self.of_traces(traces)
        return jax.tree.map(lambda a: a[None][: length // self.every], end)

    def recording(self, seen: tuple[PyTree, PyTree], groups: Any) -> Recording:
        """What was seen, by path."""
        states, traces = seen
        leaves = jax.tree.leaves(seen)
        length = leaves[0].shape[0] if leaves else 0
        triples = zip(self.trace_paths, traces, self.traces, strict=True)
        return Recording(
            length=length,
            outputs=None,
            states=dict(zip(self.state_paths, states, strict=True)),
            groups=groups,
            traces={p: TraceRecord(n, some, r.labels) for p, (n, some), r in triples},
            losses=None,
            signals={},
            gradients={},
            steps=self.every * np.arange(1, length + 1),
        )


def recorder_of(plan: Plan, record: Record, update_every: int, batch: int | None) -> Recorder:
    """What a record asks for, found in a plan. Entries of traces are those of one sample."""
    if not isinstance(record, Record):
        raise type_error(
            f"record has type {type(record).__name__}.",
            why="it says what is recorded, and how often",
            do="pass braintrace.Record(states=('V',), every=10)",
        )
    every, step = record.every, plan.graph.step
    if every % update_every and update_every % every:
        raise value_error(
            f"every={every} with update_every={update_every}.",
            why="a record is at the end of an update, or several are within one",
            do=f"choose a multiple of {update_every}, or a divisor",
        )
    if record.traces and every % update_every:
        raise value_error(
            f"traces every {every} steps, with an update every {update_every}.",
            why="the steps of an update are one block, and traces are there where it ends",
            do=f"record every {update_every} steps, or leave out traces",
        )
    leaves = {_path(leaf, step.stored): i for i, leaf in enumerate((*step.stored, *step.others))}
    states = {p: i for name in record.states for p, i in [find(leaves, name, "state")]}
    owned = _arrays_of(plan)
    readers = {
        p: _reader(found, record.entries, batch)
        for name in record.traces
        for p, found in [find(owned, name, "parameter with a trace")]
    }
    return Recorder(
        every,
        every < update_every,
        tuple(states.values()),
        tuple(states),
        tuple(readers.values()),
        tuple(readers),
    )


def find(items: Mapping[Path, T], name: Name, kind: str) -> tuple[Path, T]:
    """The path and the item of a name."""
    wanted = name if isinstance(name, str) else dotted(tuple(name))
    for path, value in items.items():
        if wanted in (dotted(path), dotted(tuple(path))):
            return path, value
    raise value_error(
        f"the step has no {kind} {wanted!r}.",
        why=f"there are {', '.join(map(dotted, items))}" if items else "there are none",
        do="name one of these" if items else "leave it out",
    )


def read_entries(arrays: Sequence[Array], places: Iterable[Place]) -> tuple[Array, Array]:
    """The length of arrays as one vector, and their entries at these places."""
    entries = [arrays[k][index] for k, index in places]
    return norm(arrays), jnp.stack(entries) if entries else jnp.zeros((0,))


def norm(tree: PyTree) -> Array:
    """The Euclidean length of all arrays as one vector."""
    return jnp.sqrt(sum(jnp.sum(jnp.abs(a) ** 2) for a in jax.tree.leaves(tree)))


def spread_places(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    count: int,
    batch: int | None,
    sample: int = 0,
) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """Places in arrays of these names and shapes, evenly spread, and their labels.

    They are those of one sample: those of several are the same weights once more.
    """
    first = [(sample,) if batch is not None and s[:1] == (batch,) else () for s in shapes]
    rest = [s[len(f) :] for s, f in zip(shapes, first, strict=True)]
    ends = np.cumsum([0, *(int(np.prod(s)) for s in rest)])
    places, labels = [], []
    for i in _spread(count, int(ends[-1])):
        k = int(np.searchsorted(ends, i, side="right")) - 1
        index = first[k] + tuple(int(n) for n in np.unravel_index(i - ends[k], rest[k]))
        places.append((k, index))
        labels.append(f"{names[k]}[{', '.join(map(str, index))}]")
    return tuple(places), tuple(labels)


def _spread(count: int, size: int) -> list[int]:
    """Indices below `size`, evenly spaced and, in an array, at all places of its axes."""
    if count >= size:
        return list(range(size))
    indices: set[int] = set()
    golden, k = (5**0.5 - 1) / 2, 0
    while len(indices) < count:
        indices.add(int(size * ((0.5 + golden * k) % 1)))
        k += 1
    return sorted(indices)


def _path(leaf: Leaf, leaves: Sequence[Leaf]) -> Path:
    """The path of a leaf; of a state of several arrays with its number."""
    alone = sum(other.path == leaf.path for other in leaves) < 2
    return leaf.path if alone else (*leaf.path, leaf.index)


@dataclass(frozen=True, slots=True)
class _TraceArray:
    """An array of a trace: the number of the trace, that of its leaf, a name, a shape."""

    trace: int
    leaf: int
    name: str
    shape: tuple[int, ...]


def _arrays_of(plan: Plan) -> dict[Path, list[_TraceArray]]:
    """The arrays of the traces of every parameter that has one."""
    record, graph = plan.rule.record, plan.graph
    pairs = zip(graph.parts, record.parts, strict=True)
    owners: list[dict[str, Path]] = []  # of every trace, the parameters by operand
    for part, rule in [(g, p.rule) for g, p in pairs] or [(graph, record)]:
        if rule.per_parameter:
            owners += [{"": path} for _, path in rule.traced(part)]
        else:
            owners += [dict(r.trainable_paths) for r in part.relations]
    found: dict[Path, list[_TraceArray]] = {}
    for i, (trace, operands) in enumerate(zip(plan.trace_shapes, owners, strict=True)):
        leaves = jax.tree_util.tree_flatten_with_path(trace)[0]
        for path in dict.fromkeys(operands.values()):
            own = {k for k, p in operands.items() if p == path}
            for k, (keys, a) in enumerate(leaves):
                top = getattr(keys[0], "key", None) if keys else None
                shared = top not in operands
                if jnp.issubdtype(a.dtype, jnp.inexact) and (shared or top in own):
                    name = jax.tree_util.keystr(keys, simple=True, separator=".") or "trace"
                    found.setdefault(path, []).append(_TraceArray(i, k, name, a.shape))
    return found


def _reader(arrays: Sequence[_TraceArray], entries: int, batch: int | None) -> TraceReader:
    several = len({a.trace for a in arrays}) > 1
    names = [f"{a.trace}:{a.name}" if several else a.name for a in arrays]
    places, labels = spread_places(names, [a.shape for a in arrays], entries, batch)
    return TraceReader(tuple((a.trace, a.leaf) for a in arrays), places, labels)
