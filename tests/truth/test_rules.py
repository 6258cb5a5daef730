"""The rules as learners: each against its reference, and the same battery for all of them."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import EXACT, OPERATORS, RECURRENT, Draw, T, matmul, net, spike, step_fn

import braintrace as bt
from braintrace.verify._compare import _window_losses, comparison
from braintrace.verify._dense import dense
from braintrace.verify._options import definition
from braintrace.verify._rules import rule_on

TIGHT = 1e-9
QUICK = {"xla_cpu_use_fusion_emitters": False}
LIVE: dict = {}


@models.case(LIVE)
def alif(draw):
    params = {"w": draw(3, 4, scale=1.5), "r": draw(4, 4), "out": draw(4, 2), "b": draw(2)}

    @net(params, {"z": draw(2, 4), "v": draw(2, 4), "a": abs(draw(2, 4))})
    def model(m, x):
        y = matmul(x, m.w.value) + matmul(m.z.value, m.r.value)
        v = 0.9 * m.v.value - 0.3 * m.z.value + y
        m.z.value = spike(v - 0.3 - 0.5 * m.a.value)
        m.a.value = 0.8 * m.a.value + m.z.value
        m.v.value = v
        return matmul(m.z.value + 0.1 * m.v.value, m.out.value, m.b.value)

    return model, (2, 3)


ALL = {**EXACT, **RECURRENT, **OPERATORS, **LIVE}


@dataclass(frozen=True)
class Rule:
    """A learner by name, its options, and what it is called with besides the input."""

    name: str
    options: dict = field(default_factory=dict)
    called_with: str | None = None
    windows: bool = True


RULES = {
    "eprop": Rule("eprop", {"kappa_filter_decay": 0.6}),
    "eprop unfiltered": Rule("eprop"),
    "rflo": Rule("rflo", {"random_feedback_key": None}),
    "rflo leak": Rule("rflo", {"leak": 0.7, "random_feedback_key": None}),
    "ostl_recurrent": Rule("ostl_recurrent"),
    "ostl_feedforward": Rule("ostl_feedforward", {"decay_or_rank": 0.3}),
    "ottt": Rule("ottt", {"leak": 0.7}),
    "ottt O": Rule("ottt", {"leak": 0.7, "mode": "O"}),
    "otpe": Rule("otpe", {"leak": 0.7}),
    "otpe clipped": Rule("otpe", {"leak": 0.7, "trace_clip_abs": 0.5}),
    "otpe approx": Rule("otpe", {"leak": 0.7, "mode": "approx"}),
    "osttp": Rule("osttp", called_with="y_target", windows=False),
    "three_factor": Rule("three_factor", called_with="modulator", windows=False),
    "decolle": Rule("decolle", called_with="y_target", windows=False),
    "stllr": Rule("stllr", {"leak_pre": 0.7, "leak_post": 0.6, "alpha_post": -0.5}, windows=False),
    "no_trace": Rule("no_trace"),
}


# ----------------------------------------------------------------------------------- the pieces

build = cache(lambda name: ALL[name]())


def case(name):
    brainstate.random.seed(1)
    return build(name)


@cache
def seen(name):
    c = case(name)
    return dense(c.model, step_fn, *c.sequences)


def batch_of(name):
    """The leading axes of the states that count samples."""
    return {"alif": (2,), "learnable_decay": (2,), "sparse_batched": (2,), "conv": (2, 3)}.get(
        name, ()
    )


@cache
def given(name, rule):
    """What a rule needs on a model: (learner's options, reference's options, its sequence)."""
    draw, r = Draw(f"{name} {rule}"), RULES[rule]
    step = seen(name).structure
    widths = [step.hidden[g[0]].varshape[-1] for g in step.groups]
    hidden = {k: v for k, v in r.options.items() if k != "random_feedback_key"}
    if r.name == "osttp":
        y, matrices = draw(T, *batch_of(name), 2), [draw(2, n) for n in widths]
        return {"B_list": matrices}, {"B_list": matrices, "y_target": y}, y
    if r.name == "decolle":
        y, matrices = draw(T, *batch_of(name), 2), [draw(n, 2) for n in widths]
        reference = {"readouts": matrices, "y_target": y}
        return {"n_target": 2, "readouts": matrices}, reference, y
    if r.name == "three_factor":
        m = draw(T)
        return {}, {"modulator": m}, m
    return r.options, hidden, None


def truth(name, rule, window=None):
    """The reference of a rule on a model."""
    kind, options = definition(RULES[rule].name, given(name, rule)[1])
    return rule_on(seen(name), kind, window, **options)


def learner_of(name, rule, **options):
    c = case(name)
    found = bt.compile.__globals__["_rule"](RULES[rule].name)(
        c.model, **given(name, rule)[0], **options
    )
    found.compile_graph(c.x0)
    return found


def gradient(learner, name, rule, chunk_size=None, mask=None, **options):
    """The summed gradient of the case's sequence, compiled fast."""
    extra = given(name, rule)[2]
    keyword = RULES[rule].called_with
    sequences = case(name).sequences if extra is None else (*case(name).sequences, extra)

    def loss(x, target, *more):
        call = lambda v: learner(v, **{keyword: m for m in more})
        return step_fn(call, x, target)

    window = lambda *slices: _window_losses(learner, step_fn, slices)
    step = window if (chunk_size or 1) > 1 else loss

    def run(sequences, mask):
        return dict(
            learner.etrace_grad(
                *sequences,
                step_fn=step,
                chunk_size=chunk_size,
                mask=mask,
                reduction="sum",
                **options,
            )
        )

    saved = {k: s.value for k, s in case(name).model.states().items()}
    try:
        return brainstate.transform.jit(run, compiler_options=QUICK)(sequences, mask)
    finally:
        for k, s in case(name).model.states().items():
            s.value = saved[k]


def assert_equal(found, truth, tolerance=TIGHT):
    result = comparison(found, truth)
    assert result.max_error <= tolerance, f"\n{result}"


def different(found, truth):
    return comparison(found, truth).max_error > 1e-3


# ------------------------------------------------------------------------ against the references

CORE = ["alif", "lstm", "stacked_layers", "hidden_group_state", "operator_readout"]
FURTHER = ["gru", "conv", "learnable_decay", "sparse_batched", "operators_inside_bodies"]
FURTHER += ["loss_reads_before_reset", "delay_line", "weight_used_twice"]
OWN_TRACES = ["eprop", "rflo leak", "otpe", "otpe approx", "ottt", "stllr", "three_factor"]
SINGLE = [(m, r) for m in CORE for r in RULES] + [(m, r) for m in FURTHER for r in OWN_TRACES]


@pytest.mark.parametrize("name, rule", SINGLE)
def test_single_step(name, rule):
    found = gradient(learner_of(name, rule), name, rule)
    assert_equal(found, truth(name, rule))
