"""Readers of traces: their length, and a few of their entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ..._online import read_entries, spread_places
from ...learner import Learner
from ._recording import Name, Path, lookup, path_of


@dataclass(frozen=True, slots=True)
class LearnerTrace:
    """Reads the trace of one parameter: `()` returns its length and the entries at `places`."""

    read: Callable[[], list[Array]]
    places: tuple[tuple[int, tuple[int, ...]], ...]
    labels: tuple[str, ...]

    def __call__(self) -> tuple[Array, Array]:
        return read_entries(self.read(), self.places)


def trace_readers(
    learner: Learner, wanted: Iterable[Name] | None, entries: int, sample: int | None
) -> dict[Path, LearnerTrace]:
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
) -> LearnerTrace:
    arrays = read()
    shapes = [a.shape for a in arrays.values()]
    places, labels = spread_places(list(arrays), shapes, entries, batch, sample or 0)
    return LearnerTrace(lambda: list(read().values()), places, labels)
