"""One step with zeros added to its new states: their cotangents are the learning signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import Graph
from ._evaluate import evaluate_single
from ._feedback import back_operands
from ._rule import ExitCotangents, Rule, SignalInputs
from ._signals import signal_source
from ._values import TimeAxes, Values

Array = jax.Array
SignalsOf = Callable[[Sequence[Array], Any], list[Array]]


def run_with_exits(
    graph: Graph,
    rule: Rule,
    values: Values,
    exits: Sequence[Array],
    extra: tuple[bool, ...],
    names: Any,
) -> tuple[list[Any], Values, SignalsOf, Any]:
    """Run one step with `exits` added to its new states, as others read them.

    Args:
        graph: the analysed step.
        rule: the rule, whose random feedback is in the reverse pass.
        values: the arrays of the step.
        exits: zeros, one per hidden leaf.
        extra: as in `TimeAxes`, of what the rule is called with.
        names: its structure.

    Returns:
        results, values after the step, a function from the cotangents of `exits` and the last
        item to what the rule makes of them, and that item: arrays.
    """
    backs = back_operands(graph, rule.feedback)
    outs = evaluate_single(graph, values, {}, {}, exits, ExitCotangents.READ, backs)
    step = graph.step
    kinds = (step.hidden, step.others)
    hidden, others = (tuple(outs[leaf.output] for leaf in kind) for kind in kinds)
    after = replace(values, hidden=hidden, others=others)
    one = lambda arrays: tuple(jnp.expand_dims(a, 0) for a in arrays)
    none = lambda arrays: tuple(False for _ in arrays)
    axes = TimeAxes(1, none(values.consts), none(values.args), None, extra, names)
    path = replace(values, hidden=one(values.hidden), others=one(values.others))
    source = signal_source(graph, rule, values, path, axes, backs)

    def signals(cotangents: Sequence[Array], read: Any) -> list[Array]:
        if source.signal is None:
            return list(cotangents)
        states, extra = read
        inputs = SignalInputs(graph.groups, one(cotangents), states, extra)
        return [jnp.asarray(a)[0] for a in source.signal(inputs)]

    return outs[: step.n_outs], after, signals, (source.states, source.extra)
