"""The traces of a learner by relation and hidden group, with one slot per state of a unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import message
from ..graph import HiddenGroup, HiddenParamOpRelation, Path
from ..program import PyTree
from ._etrace_graph import ETraceGraph, etrace_graph
from ._executors import LearnerExecutor

Array = jax.Array
_KINDS = {
    "per_param": "a trace of every weight: read etrace_bwg",
    "io_factorized": "two filtered factors per operator: read etrace_xs and etrace_dfs",
}


@dataclass(frozen=True, slots=True)
class TraceView:
    """A trace as it is now; `value` cannot be assigned."""

    value: PyTree


class Learner:
    """What a learner shows of its traces and its compiled graph."""

    @property
    def graph(self: Any) -> ETraceGraph:
        """The compiled graph."""
        own = vars(self._compiled())  # kept there: variables are compared by identity
        return own.setdefault("graph", etrace_graph(own["info"], own["plan"].graph))

    @property
    def executor(self: Any) -> LearnerExecutor:
        """The compiled graph behind the names of published executors."""
        return LearnerExecutor(self)

    graph_executor = executor

    @property
    def etrace_bwg(self: Any) -> Mapping[tuple[int, int], TraceView]:
        """Traces of every weight, by `(id(relation.y_var), group.index)`.

        Each is a dict of arrays (*free, *weight.shape, S): `free` are the output axes that the
        weight does not have, such as the batch; S are the states of a unit of the group, more where
        a weight is followed to several units.

        Raises:
            AttributeError: the rule stores something else.
        """
        self._check_stored("etrace_bwg", "per_param")
        return MappingProxyType(
            {
                (id(r.y_var), g.index): TraceView(
                    {k: _of_group(r, g, eps, k) for k, eps in trace.items()}
                )
                for r, trace in self._by_relation()
                for g in r.hidden_groups
            }
        )

    @property
    def etrace_xs(self: Any) -> Mapping[int, TraceView]:
        """Filtered inputs of the operators, by `id(relation.x_var)`.

        Raises:
            AttributeError: the rule stores something else.
        """
        self._check_stored("etrace_xs", "io_factorized")
        pairs = self._by_relation()
        return MappingProxyType({id(r.x_var): TraceView(t["x"]) for r, t in pairs if "x" in t})

    @property
    def etrace_dfs(self: Any) -> Mapping[tuple[int, str], TraceView]:
        """Filtered tails of the operators, by `(id(relation.y_var), "hidden_group_i")`.

        Each is an array (*y.shape, S), S the states of a unit of the group.

        Raises:
            AttributeError: the rule stores something else.
        """
        self._check_stored("etrace_dfs", "io_factorized")
        return MappingProxyType(
            {
                (id(r.y_var), f"hidden_group_{g.index}"): TraceView(_of_group(r, g, t["f"]))
                for r, t in self._by_relation()
                for g in r.hidden_groups
            }
        )

    def _by_relation(self: Any) -> list[tuple[HiddenParamOpRelation, PyTree]]:
        relations = self._compiled().plan.graph.relations
        return list(zip(relations, self._own_traces(), strict=True))

    def _own_traces(self: Any) -> list[PyTree]:
        """The traces of the model's own step, in the order of its relations or parameters."""
        own = self._compiled()
        return own.traces([self.etraces[name].value for name in own.names])

    def _traces_by_path(self: Any) -> list[tuple[str, list[Path], PyTree]]:
        """What the traces are called, the parameters that each is of, and they themselves."""
        graph, rule = self._compiled().plan.graph, self.learning_rule.record
        paths: list[list[Path]] = [[path] for _, path in rule.traced(graph)]
        if not rule.per_parameter:
            paths = [list(r.trainable_paths.values()) for r in graph.relations]
        return [
            (f"{i}:{'.'.join(map(str, of[0] if of else ()))}", of, trace)
            for i, (of, trace) in enumerate(zip(paths, self._own_traces(), strict=True))
        ]

    def _check_stored(self: Any, name: str, kind: str) -> None:
        stored = self.config.trace_factorization
        if stored != kind:
            raise AttributeError(
                message(
                    f"{type(self).__name__} has no {name}.",
                    why=f"its rule stores {_KINDS.get(stored, 'something else')}",
                    do="read what it stores in learner.etraces, or learner.get_etrace_of(weight)",
                )
            )


def _of_group(
    r: HiddenParamOpRelation, g: HiddenGroup, eps: Array, key: str | None = None
) -> Array:
    """The slots that belong to a group, state by state; zeros for a state that has none.

    `key` is the weight that the trace is of; None for one of the operator's output.
    """
    slots = r.slots
    offsets = np.cumsum([0, *slots.at[0].sizes])
    number = np.searchsorted(offsets, slots.destination, side="right") - 1  # -1 for no element

    def only(k: int, here: np.ndarray) -> Array:
        if np.array_equal(here, number[..., k] >= 0):
            return eps[..., k]
        mask = jnp.asarray(here.reshape(slots.shape), eps.dtype)
        return eps[..., k] * (
            mask if key is None else r.operator.spread(key, mask, len(slots.lanes))
        )

    columns = []
    for component in g.components:
        here = number == component
        slots_here = np.flatnonzero(here.any(axis=(0, 1)))
        columns += [only(int(k), here[..., k]) for k in slots_here]
        if not len(slots_here):
            columns.append(jnp.zeros_like(eps[..., 0]))
    return jnp.stack(columns, -1)
