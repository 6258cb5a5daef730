"""A rule of one's own, with a trace of its own: one file, and one row of the table.

Its memory is one array per parameter, the influence on a fixed random direction r of the states:
q_t = r^T dh_t/dp, kept for one step. With one state element and r = 1 it is what the last step did.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from braintrace.engine import Arrived, Block, Rule, Values, evaluate_plain, scan_steps
from braintrace.rules import ETraceConfig, LearningRule, Row, stated


def last_step() -> Rule:
    """What a parameter did to the first element of the first state in the step before."""

    def init(graph, values: Values):
        return [{"q": jnp.zeros(p.shape, p.dtype)} for p in values.params]

    def advance(graph, block: Block, traces, observed, fresh):
        def push(values, traces):
            def first(params):
                outs = evaluate_plain(graph, replace(values, params=params))
                return outs[graph.step.hidden[0].output].ravel()[0]

            return [{"q": q} for q in jax.grad(first)(values.params)]

        return scan_steps(block, push, list(traces))

    def credit(graph, arrived: Arrived):
        return tuple(arrived.entry[0][0].ravel()[0] * t["q"] for t in arrived.traces)

    return Rule(
        init,
        lambda graph: [(i, leaf.path) for i, leaf in enumerate(graph.step.params)],
        advance,
        credit,
        entry_only=True,
        one_by_one=True,
        per_parameter=True,
        approximates="the influence of every parameter: that of the last step stands for it",
    )


@stated
def one_back() -> LearningRule:
    """Credit goes back one step."""
    return LearningRule("one_back", ETraceConfig("none"), last_step())


ROW = Row("one_back", one_back, "RuleLearner", "the last step", "the loss", "")
