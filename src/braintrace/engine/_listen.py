"""One step with zeros added to its new states: their cotangents are the learning signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..graph import Graph
from ..rules import Heard, Rule, Whole
from ._evaluate import Values, evaluate_single
from ._feedback import back_operands
from ._signals import heard_by
from ._time import Span

Array = jax.Array
Made = Callable[[Sequence[Array], Any], list[Array]]


def listen(
    graph: Graph,
    rule: Rule | Whole,
    values: Values,
    exits: Sequence[Array],
    extra: tuple[bool, ...],
    names: Any,
) -> tuple[list[Any], Values, Made, Any]:
    """Run one step on states that hear the loss.

    Args:
        graph: the analysed step.
        rule: the rule, whose random feedback is on the way back.
        values: the arrays of the step.
        exits: zeros, one per hidden leaf.
        extra: as in `Span`, of what the rule is given besides.
        names: its structure.

    Returns:
        results, values after the step, a function from the cotangents of `exits` and the last
        item to what the rule makes of them, and that item: arrays.
    """
    feedback = rule.feedback if isinstance(rule, Rule) else None
    backs = back_operands(graph, feedback)
    outs = evaluate_single(graph, values, {}, {}, exits, "seen", backs)
    step = graph.step
    kinds = (step.hidden, step.others)
    hidden, others = (tuple(outs[leaf.output] for leaf in kind) for kind in kinds)
    after = replace(values, hidden=hidden, others=others)
    if not isinstance(rule, Rule):
        return outs[: step.n_outs], after, lambda cotangents, told: list(cotangents), ()

    one = lambda arrays: tuple(jnp.expand_dims(a, 0) for a in arrays)
    none = lambda arrays: tuple(False for _ in arrays)
    span = Span(1, none(values.consts), none(values.args), None, extra, names)
    path = replace(values, hidden=one(values.hidden), others=one(values.others))
    hearing = heard_by(graph, rule, values, path, span, backs)

    def made(cotangents: Sequence[Array], told: Any) -> list[Array]:
        if hearing.signal is None:
            return list(cotangents)
        states, extra = told
        heard = Heard(graph.groups, one(cotangents), states, extra)
        return [jnp.asarray(a)[0] for a in hearing.signal(heard)]

    return outs[: step.n_outs], after, made, (hearing.states, hearing.extra)
