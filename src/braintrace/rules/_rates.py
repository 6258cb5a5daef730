"""Firing rates that a rule regularises: states of its own step, stored with its traces.

The step has them as its last hidden leaves, with their penalty (`graph.with_filters`); a rule
stores their values between calls, after its traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ..engine import Arrived, Block, Fresh, Rule, Values, states_after
from ..graph import Graph, RateLoss

Trace = Any


def with_rates(rule: Rule, loss: RateLoss) -> Rule:
    """The rule on a step with firing rates, whose penalty has the derivative of this loss."""
    own = _WithRates(rule)
    added = "equality to BPTT: the gradient of a loss of firing rates is added"
    words = [rule.approximates] if rule.approximates else []
    return replace(
        rule,
        init=own.init,
        traced=own.traced,
        observe=own.observe,
        advance=own.advance,
        credit=own.credit,
        names=own.names,
        pending=None,  # a rate is rewritten at every step
        backward=None,  # and known from the first block on
        approximates="; ".join([*words, added]),
        constants={**rule.constants, **loss._asdict()},
    )


@dataclass(frozen=True, eq=False, slots=True)
class _WithRates:
    rule: Rule

    def init(self, graph: Graph, values: Values) -> list[Trace]:
        entries = [graph.step.entry(leaf) for leaf in graph.step.rate_leaves]
        return [*self.rule.init(graph, values), *(jnp.zeros(v.shape, v.dtype) for v in entries)]

    def traced(self, graph: Graph) -> list[tuple[int, Any]]:
        first = len(graph.relations)
        rates = [(first + i, leaf.path) for i, leaf in enumerate(graph.step.rate_leaves)]
        return [*self.rule.traced(graph), *rates]

    def names(self, graph: Graph) -> list[Any]:
        return [*self.rule.named(graph), *(f"rate {i}" for i in range(graph.step.rates))]

    def observe(self, graph: Graph, block: Block, traces: Sequence[Trace]) -> Any:
        return self.rule.observe(graph, block, _traces(graph, traces))

    def advance(
        self, graph: Graph, block: Block, traces: Sequence[Trace], observed: Any, fresh: Fresh
    ) -> list[Trace]:
        after = self.rule.advance(graph, block, _traces(graph, traces), observed, fresh)
        states = states_after(graph, block.path, block.axes)
        rates = states[len(states) - graph.step.rates :]
        return [*after, *(a[-1] for a in rates)]

    def credit(self, graph: Graph, arrived: Arrived) -> Any:
        traces = _traces(graph, arrived.traces)
        return self.rule.credit(graph, arrived._replace(traces=traces))


def _traces(graph: Graph, traces: Sequence[Trace]) -> list[Trace]:
    return list(traces[: len(traces) - graph.step.rates])
