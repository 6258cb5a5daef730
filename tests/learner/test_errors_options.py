"""Mistakes of users in the choice of rules and their options."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace

from .designed import X, assert_designed
from .reference import (
    leaky,
)


def test_unknown_rule_name():
    with pytest.raises(ValueError) as error:
        braintrace.compile(leaky(), "backprop", X)
    assert_designed(error, "'backprop'", "d_rtrl", "pp_prop")


@pytest.mark.parametrize("name", ["d_rtrl", "D_RTRL", " D_rtrl ", "pp_prop", "ES_D_RTRL"])
def test_known_rule_names_in_any_case(name):
    options = {} if "d_rtrl" == name.strip().lower() else {"decay_or_rank": 0.5}
    algo = braintrace.compile(leaky(), name, X, **options)
    assert isinstance(algo, braintrace.pp_prop if options else braintrace.D_RTRL)


@pytest.mark.parametrize("rule", [42, None, dict, brainstate.nn.Module], ids=str)
def test_rule_that_is_no_rule(rule):
    with pytest.raises(TypeError) as error:
        braintrace.compile(leaky(), rule, X)
    assert_designed(error, "not a rule", "d_rtrl")


def test_compile_without_inputs():
    with pytest.raises(ValueError) as error:
        braintrace.compile(leaky(), "d_rtrl")
    assert_designed(error, "example inputs")


def test_unknown_and_missing_options_of_a_rule():
    with pytest.raises(TypeError) as error:
        braintrace.compile(leaky(), "d_rtrl", X, speed=1)
    assert_designed(error, "D_RTRL", "speed", "vjp_method", "trace_dtype")
    with pytest.raises(TypeError) as error:
        braintrace.compile(leaky(), "pp_prop", X)
    assert_designed(error, "pp_prop", "decay_or_rank")


@pytest.mark.parametrize("verbose", [3, -1, "yes", True, None], ids=str)
def test_unknown_verbosity(verbose):
    with pytest.raises(ValueError) as error:
        braintrace.compile(leaky(), "d_rtrl", X, verbose=verbose)
    assert_designed(error, "verbose")


def test_unknown_vjp_method():
    with pytest.raises(ValueError) as error:
        braintrace.compile(leaky(), "d_rtrl", X, vjp_method="bptt")
    assert_designed(error, "'bptt'", "'single-step'", "'multi-step'")


@pytest.mark.parametrize("dtype", [jnp.int32, bool, "nonsense"], ids=str)
def test_trace_dtype_that_is_not_floating(dtype):
    with pytest.raises(TypeError) as error:
        braintrace.compile(leaky(), "d_rtrl", X, trace_dtype=dtype)
    assert_designed(error, "trace_dtype")


DECAYS = {
    "one": (1.0, ValueError),
    "negative": (-0.1, ValueError),
    "nan": (float("nan"), ValueError),
    "rank zero": (0, ValueError),
    "triple": ((0.1, 0.2, 0.3), ValueError),
    "string": ("0.9", TypeError),
    "boolean": (True, TypeError),
    "None": (None, TypeError),
}


@pytest.mark.parametrize("value, kind", DECAYS.values(), ids=DECAYS)
def test_decay_or_rank_out_of_range(value, kind):
    with pytest.raises(kind) as error:
        braintrace.compile(leaky(), "pp_prop", X, decay_or_rank=value)
    assert_designed(error, "decay_or_rank")


@pytest.mark.parametrize(
    "value, decay",
    [(0.5, 0.5), (np.float32(0.5), 0.5), (0.0, 0.0), (19, 0.9), (np.int64(3), 0.5), (1, 0.0)],
)
def test_decay_or_rank_takes_any_number(value, decay):
    algo = braintrace.compile(leaky(), "pp_prop", X, decay_or_rank=value)
    assert algo.decay == pytest.approx(decay)


def test_decay_of_two_factors_is_asked_for_by_name():
    algo = braintrace.compile(leaky(), "pp_prop", X, decay_or_rank=(0.1, 0.2))
    assert (algo.decay_x, algo.decay_f) == (0.1, 0.2)
    with pytest.raises(AttributeError, match="decay_x"):
        _ = algo.decay


@pytest.mark.parametrize(
    "value, kind", [(1.5, ValueError), ("x", TypeError), (True, TypeError), (0, ValueError)]
)
def test_grad_expon_decay_out_of_range(value, kind):
    with pytest.raises(kind) as error:
        braintrace.GradExpon(jnp.zeros(2), value)
    assert_designed(error, "tau_or_decay")


def test_order_of_crossings_needs_crossings():
    with pytest.raises(braintrace.NotSupportedError) as error:
        braintrace.compile_etrace_graph(leaky(), X, sparse_n=2)
    assert_designed(error, "sparse_n=2", "include_recurrent_mixing=True")
