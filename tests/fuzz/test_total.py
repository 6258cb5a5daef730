"""The compiler is total: a right gradient or a four-part error, on whatever program.

Per-weight traces are run by test_certificate.py, which also checks what the report says of them.

Replay a failure with `python benchmarks/sweep.py --rule <rule> --replay '<program>'`.
"""

import dataclasses

import numpy as np
import pytest
from claims import TABLE
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from judge import compiled, is_four_part, judge
from programs import parse, random_program, shrink

import braintrace as bt
import interpret
from braintrace._errors import message
from braintrace.rules._table import ROWS
from thinned import examples

# A seed rather than draws: hypothesis repeats its choices, and `shrink` knows programs better.
programs = st.integers(0, 2**32 - 1).map(random_program)
many = dict(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=examples(12), **many)
@given(programs)
def test_windows_are_bptt_or_refused(spec):
    note(f'--replay "{spec!r}"')
    verdict = judge(spec, ("window",))
    assert not verdict.bad, verdict


@settings(max_examples=examples(5), **many)
@given(programs)
def test_factored_traces_too(spec):
    note(f'--replay "{spec!r}"')
    verdict = judge(spec, ("pp_prop",))
    assert not verdict.bad, verdict


def test_indices_inside_a_map_have_no_factored_trace():
    looked_up = ("map", ("embedding", 0, "T", "count"), "old0")
    updates = (("add", ("half", "old0"), ("matmul", 0, "own", "x")), ("tanh", looked_up))
    spec = (((3,), ()), (), updates, "new0")
    assert judge(spec, ("pp_prop",)).kind == "refused"
    assert judge(spec, ("d_rtrl",)).kind == "right"


# ------------------------------------------------------------------------- the judge is no fool


def test_four_parts_are_told_from_other_errors():
    text = message("what.", where="file.py:3 (update)", why="why", do="do")
    assert is_four_part(ValueError(text)) and is_four_part(bt.CompilationError(text))
    assert is_four_part(TypeError(message("what.", why="why", do="do")))
    assert not is_four_part(RuntimeError(text))
    assert not is_four_part(ValueError("what."))
    assert not is_four_part(ValueError(text + "\nmore"))
    assert not is_four_part(ValueError(message("", why="why", do="do")))
    assert not is_four_part(ValueError(message("what.", why="why", do="")))
    assert not is_four_part(UnicodeDecodeError("utf8", b"", 0, 1, text))


def test_a_wrong_gradient_is_seen(monkeypatch):
    spec = (((3,),), (), (("add", ("half", "old0"), ("matmul", 0, "own", "x")),), "new0")
    assert judge(spec).kind == "right"
    halves = dataclasses.replace(TABLE["window"], chunk=2)  # they forget the recurrent paths
    monkeypatch.setitem(TABLE, "window", halves)
    looped = (((3,),), (), (("tanh", ("matmul", 0, "own", ("add", "x", "old0"))),), "new0")
    assert judge(looped, ("window",)).kind == "wrong"


def test_a_fault_of_the_interpreter_is_told_from_one_of_the_library(monkeypatch):
    spec = (((3,),), (), (("matmul", 0, "own", "x"),), ("prod", "new0"))
    assert judge(spec, ("d_rtrl",)).kind == "right"
    forgets_to_transpose = lambda values, p: values[0].reshape(p["new_sizes"])
    monkeypatch.setitem(interpret.NUMPY, "reshape", forgets_to_transpose)
    assert judge(spec, ("d_rtrl",)).kind == "misread"


def test_every_rule_has_a_claim():
    first_words = {name.split()[0] for name in TABLE}
    assert {row.name for row in ROWS} == first_words - {"window", "windows"}


def test_a_gradient_that_is_not_its_twin_is_seen(monkeypatch):
    spec = (((3,),), (), (("add", ("half", "old0"), ("matmul", 0, "own", "x")),), "new0")
    assert judge(spec, ("eprop",)).kind == "right"
    monkeypatch.setitem(TABLE, "eprop", dataclasses.replace(TABLE["eprop"], twin="no_trace"))
    verdict = judge(spec, ("eprop",))
    assert verdict.kind == "wrong" and "not that of no_trace" in verdict.detail


def test_rounding_is_told_from_a_fault(monkeypatch):
    spec = (((3,),), (), (("tanh", ("add", "old0", ("matmul", 0, "own", "x"))),), "new0")
    # Another value of tanh, for the learner and for BPTT alike.
    monkeypatch.setitem(interpret.NUMPY, "tanh", lambda values, p: np.tanh(values[0]) * (1 - 1e-6))
    verdict = judge(spec, ("rtrl",), run=compiled)
    assert verdict.kind == "right" and verdict.detail.startswith("decided by rounding")


@pytest.mark.parametrize("seed", range(20))
def test_programs_print_replay_and_shrink(seed):
    spec = random_program(seed)
    assert parse(repr(spec)) == spec and random_program(seed) == spec
    if "old0" in repr(spec[2:]):
        least = shrink(spec, lambda s: "old0" in repr(s[2:]), most=10**6)
        assert least[1] == () and sorted(map(repr, (*least[2], least[3]))) == ["'old0'", "'x'"]
