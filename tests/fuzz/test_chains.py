"""Overlapping traces, masks and custom derivatives: rules are their definitions."""

import pytest
from chains import RULES, judge_chain, random_chain

from braintrace import graph

# Traces on the first two and on the last two groups; the last reads the first one.
OVERLAPPING = (
    (0.9, (0,), (), "none"),
    (0.9, (0, 1), (), "none"),
    (0.9, (1,), ((0, "new"),), "penalised"),
)
SPEC = ("chain", OVERLAPPING, (2,), (1, 0, 0, 2), 2)


@pytest.mark.parametrize("seed", range(3))
def test_rules_are_their_definitions(seed):
    rules = [list(RULES)[(3 * seed + i) % len(RULES)] for i in range(3)]
    verdict = judge_chain(random_chain(seed), tuple(rules), seconds=600)
    assert verdict.kind == "right", (verdict, random_chain(seed))


def test_a_closure_of_traces_is_seen(monkeypatch):
    assert judge_chain(SPEC, ("otpe",), seconds=600).kind == "right"
    pairwise = graph._graph._sharing
    closed = lambda *a: tuple(graph.strongly_connected(pairwise(*a)))
    monkeypatch.setattr(graph._graph, "_sharing", closed)
    assert judge_chain(SPEC, ("otpe",), seconds=600).kind == "wrong"


def test_a_penalty_that_counts_twice_is_seen(monkeypatch):
    monkeypatch.setattr(graph._graph, "explicit", lambda *a: None)
    assert judge_chain(SPEC, (), seconds=600).kind == "wrong"
