"""What the report promises of a parameter's gradient holds, and nothing dropped is kept silent."""

import around
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from judge import TIGHT, errors, judge, judge_around, judge_network
from layers import WHOLE, Network, by_hand, droppable, random_network, sequences, spec_of
from programs import random_program, step_fn

from braintrace.verify import bptt_grad
from interpret import interpreted
from thinned import examples

many = dict(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 2**32 - 1)


# ----------------------------------------------------------------------------- layered networks


@settings(max_examples=examples(8), **many)
@given(seeds)
def test_learner_is_the_network_cut_by_hand(seed):
    net = random_network(seed)
    note(f'--replay "{spec_of(net)}"')
    verdict = judge_network(net, certificate=False)
    assert verdict.kind == "right", verdict


@settings(max_examples=examples(6), **many)
@given(seeds)
def test_network_without_cuts_is_bptt(seed):
    model = Network(random_network(seed))
    truth = interpreted(lambda: bptt_grad(model, step_fn, *sequences()))
    worst = errors(by_hand(model, WHOLE), truth)
    assert max(worst.values()) <= TIGHT, worst


@settings(max_examples=examples(5), **many)
@given(seeds)
def test_every_cut_is_on_the_certificate(seed):
    net = random_network(seed)
    note(f'--replay "{spec_of(net)}"')
    verdict = judge_network(net)
    assert verdict.kind == "right", verdict


def test_parameters_of_both_kinds_are_drawn():
    kinds: set[bool] = set()
    for seed in range(20):
        if len(kinds) == 2:
            break
        model = Network(random_network(seed))
        wrong = errors(by_hand(model, droppable(model.net)), by_hand(model, WHOLE))
        kinds |= {error <= TIGHT for path, error in wrong.items() if path != ("out",)}
    assert kinds == {True, False}


# ------------------------------------------------------------------------------ random programs


@settings(max_examples=examples(10), **many)
@given(seeds)
def test_exact_is_bptt(seed):
    spec = random_program(seed)
    note(f'--replay "{spec}"')
    verdict = judge(spec, ("d_rtrl",))
    assert not verdict.bad, verdict


@settings(max_examples=examples(6), **many)
@given(seeds)
def test_step_functions_that_do_more_are_reported_honestly(seed):
    spec = around.random_case(seed)
    note(f'--replay "{spec}"')
    verdict = judge_around(spec)
    assert not verdict.bad, verdict


PLAIN = (((3,),), (), (("add", ("half", "old0"), ("matmul", 0, "own", "x")),), "new0")
GAIN = (((3,),), (), (("add", ("half", "old0"), ("gain", 0, "own", "x")),), "new0")


@pytest.mark.parametrize(
    "kinds, program",
    [(("encode",), PLAIN), (("feedback",), PLAIN), (("again", "read_out"), GAIN)],
    ids=["encoder", "feedback", "registered again"],
)
def test_what_a_step_function_does_is_no_secret(kinds, program):
    verdict = judge_around(("around", kinds, program))
    assert verdict.kind == "right", verdict


# A loop of unknown length with a sum over units in its body: the sum is cut, the rest of the loop
# has a derivative backward.
CUT_IN_A_WHILE = (
    ((3,), (2, 3)),
    (),
    (
        (
            "tanh",
            (
                "add",
                "old0",
                (
                    "mul",
                    ("embedding", 0, "two", "let0"),
                    ("fori_to", ("take_out", ("logsumexp", "new1")), "one"),
                ),
            ),
        ),
        ("add", ("half", "old1"), ("tanh", "x")),
    ),
    ("sum_rows", ("solve", "x")),
)


# The second has a function with a reverse derivative of its own in the loop, too.
@pytest.mark.parametrize("program", [CUT_IN_A_WHILE, random_program(263)], ids=["sum", "custom"])
def test_cut_inside_a_while(program):
    verdict = judge(program, ("window", "d_rtrl"))
    assert verdict.kind == "right", verdict
