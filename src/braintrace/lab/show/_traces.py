"""Readers of traces: their length, and a few of their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...learner import Learner
from ._recording import Name, Path, PyTree, lookup, path_of


@dataclass(frozen=True, slots=True)
class TraceReader:
    """Reads the trace of one parameter: `()` returns its length and the entries at `places`."""

    read: Callable[[], list[Array]]
    places: tuple[tuple[int, tuple[int, ...]], ...]
    labels: tuple[str, ...]

    def __call__(self) -> tuple[Array, Array]:
        arrays = self.read()
        entries = [arrays[k][index] for k, index in self.places]
        return norm(arrays), jnp.stack(entries) if entries else jnp.zeros((0,))


def norm(tree: PyTree) -> Array:
    """The Euclidean length of all arrays as one vector."""
    return jnp.sqrt(sum(jnp.sum(jnp.abs(a) ** 2) for a in jax.tree.leaves(tree)))


def trace_readers(
    learner: Learner, wanted: Iterable[Name] | None, entries: int, sample: int | None
) -> dict[Path, TraceReader]:
    """Readers of the traces of parameters, by path; default of all that have one."""
    parameters = learner.report.parameters.values()
    paths = {p.path: p.path for p in parameters if p.trace_shapes}
    if wanted is not None:
        kind = "parameter with a trace"
        paths = {path_of(w): lookup(paths, w, kind, "the learner") for w in wanted}
    return {
        path: _reader(partial(_arrays, learner, of), learner.batch_size, entries, sample)
        for path, of in paths.items()
    }


def _arrays(learner: Learner, path: Path) -> dict[str, Array]:
    """The arrays of the trace of one parameter, by name."""
    traces = learner.get_etrace_of(path)
    keys = {f"{r.index}": r.trainable_paths for r in learner.graph.hidden_param_op_relations}
    out = {}
    for name, trace in traces.items():
        operands = keys.get(name.split(":")[0], {})
        own = {k for k, p in operands.items() if p == path and k in trace}
        for leaf, array in jax.tree_util.tree_flatten_with_path(trace)[0]:
            top = getattr(leaf[0], "key", None)
            if jnp.issubdtype(array.dtype, jnp.inexact) and (not own or top in own):
                label = jax.tree_util.keystr(leaf, simple=True, separator=".")
                out[label if len(traces) == 1 else f"{name}.{label}"] = array
    return out


def _reader(
    read: Callable[[], dict[str, Array]], batch: int | None, entries: int, sample: int | None
) -> TraceReader:
    arrays = read()
    names, shapes = list(arrays), [a.shape for a in arrays.values()]
    # Entries of one sample: those of several are the same weights once more.
    first = [(sample or 0,) if batch is not None and s[:1] == (batch,) else () for s in shapes]
    rest = [s[len(f) :] for s, f in zip(shapes, first, strict=True)]
    ends = np.cumsum([0, *(int(np.prod(s)) for s in rest)])
    places, labels = [], []
    for i in _spread(entries, int(ends[-1])):
        k = int(np.searchsorted(ends, i, side="right")) - 1
        index = first[k] + tuple(int(n) for n in np.unravel_index(i - ends[k], rest[k]))
        places.append((k, index))
        labels.append(f"{names[k]}[{', '.join(map(str, index))}]")
    return TraceReader(lambda: list(read().values()), tuple(places), tuple(labels))


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
