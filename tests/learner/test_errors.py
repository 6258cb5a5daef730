"""Mistakes of users: each gets an error with what, where, why and what to do, or a result."""

import copy
import pickle
import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from jax import lax
from jax.experimental import io_callback

import braintrace

from .reference import (
    Leaky,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    squares,
    values,
)

X = jnp.ones(2)
XS = normal(0, 4, 2)


def text_of(error: BaseException) -> str:
    """The message with the notes attached to it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def assert_designed(error: pytest.ExceptionInfo, *parts: str, here: bool = False) -> None:
    """Why and do are there, the parts are named, and this file's line if `here`."""
    assert not isinstance(error.value, AssertionError)
    text = text_of(error.value)
    for part in ("why:", "do:", *parts):
        assert part in text, f"{part!r} is missing in:\n{text}"
    if here:
        assert "where:" in text and "test_errors.py:" in text, text


class Step(brainstate.nn.Module):
    """A model made of one update function."""

    def __init__(self, update, state=None, weight=None):
        super().__init__()
        self.rule = update
        self.w = brainstate.ParamState(normal(0, 2, 3) if weight is None else weight)
        self.h = brainstate.HiddenState(jnp.zeros(3) if state is None else state)

    def update(self, x):
        return self.rule(self, x)


def integrate(model, x):
    model.h.value = 0.5 * model.h.value + braintrace.matmul(x, model.w.value)
    return model.h.value


# ---------------------------------------------------------------------------- shapes and types


def test_wrong_input_size_at_compile_time():
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), jnp.ones(5))
    assert_designed(error, "matmul", "(5,)", "(2, 3)")


@pytest.mark.parametrize("bad, shown", [(jnp.ones(5), "[5]"), (jnp.ones((3, 2)), "[3, 2]")])
def test_wrong_input_shape_at_call_time(bad, shown):
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(bad)
    assert_designed(error, "compiled for (float64[2])", shown)


@pytest.mark.parametrize(
    "args, kwargs",
    [((), {}), ((X, X), {}), (([1.0, 2.0],), {}), ((None,), {}), ((X,), {"gain": 1.0})],
    ids=["none", "two", "list", "None", "keyword"],
)
def test_wrong_arguments_at_call_time(args, kwargs):
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(*args, **kwargs)
    assert_designed(error, "compiled for (float64[2])", "called with")


def test_compiling_again_for_other_shapes_is_refused():
    algo = learner_of(leaky(), X)
    with pytest.raises(ValueError) as error:
        algo.compile_graph(jnp.ones(3))
    assert_designed(error, "compiled for (float64[2])", "float64[3]")


@pytest.mark.parametrize("dtype", [int, bool, jnp.float32, jnp.int8])
def test_inputs_of_another_real_type_are_promoted(dtype):
    want = online(learner_of(leaky(), X), [X])
    assert_close(online(learner_of(leaky(), X.astype(dtype)), [X.astype(dtype)]), want)
    assert_close(online(learner_of(leaky(), X), [X.astype(dtype)]), want)


def test_numpy_inputs_and_python_scalars_are_numbers():
    assert_close(learner_of(leaky(), np.ones(2))(np.ones(2)), leaky()(X))

    def scaled(model, x):
        model.h.value = 0.5 * model.h.value + x * braintrace.matmul(X, model.w.value)
        return model.h.value

    for value in (2.0, 2, np.float32(2.0), jnp.asarray(2.0)):
        algo = learner_of(Step(scaled), value)
        assert_close(algo(value), 2 * (X @ normal(0, 2, 3)))


def test_scalar_into_a_matrix_product():
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), 1.0)
    assert_designed(error, "matmul", "0 axes")


def test_complex_input_into_a_real_state():
    with pytest.raises(ValueError) as error:
        learner_of(Step(integrate), X)(X * 1j)
    assert_designed(error, "state h", "float64[3]", "complex128[3]", here=True)


@pytest.mark.parametrize("when", ["compile", "call"])
def test_input_that_is_no_array(when):
    algo = braintrace.D_RTRL(leaky())
    if when == "call":
        algo.compile_graph(X)
    with pytest.raises((TypeError, ValueError)) as error:
        algo("abc") if when == "call" else algo.compile_graph("abc")
    assert_designed(error, "str")


@pytest.mark.parametrize(
    "update, shown",
    [
        (lambda h: jnp.ones(4), "float64[4]"),
        (lambda h: jnp.ones((1, 3)), "float64[1, 3]"),
        (lambda h: h.astype(jnp.float32), "float32[3]"),
    ],
    ids=["size", "batch", "dtype"],
)
def test_state_that_changes_shape_or_type(update, shown):
    def rule(model, x):
        integrate(model, x)
        model.h.value = update(model.h.value)

    with pytest.raises(ValueError) as error:
        learner_of(Step(rule), X)
    assert_designed(error, "state h enters the step as float64[3]", shown, here=True)


# ---------------------------------------------------------------------------- compiling, calling


def test_call_before_compile():
    with pytest.raises(ValueError) as error:
        braintrace.D_RTRL(leaky())(X)
    assert_designed(error, "D_RTRL", "before it is compiled", "compile_graph", "braintrace.compile")


@pytest.mark.parametrize("name", ["graph", "hidden_states"])
def test_inspection_before_compile(name):
    with pytest.raises(ValueError) as error:
        getattr(braintrace.D_RTRL(leaky()), name)
    assert_designed(error, "not compiled", "compile_graph")


def test_report_before_compile():
    with pytest.raises(RuntimeError, match="not compiled yet: call compile_graph"):
        _ = braintrace.D_RTRL(leaky()).report


@pytest.mark.parametrize("method", ["etrace_grad", "etrace_evolve"])
def test_sequence_before_compile(method):
    algo = braintrace.D_RTRL(leaky())
    with pytest.raises(ValueError) as error:
        if method == "etrace_grad":
            algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)))
        else:
            algo.etrace_evolve(XS)
    assert_designed(error, "before it is compiled")


def test_states_that_were_never_initialised():
    with pytest.raises(Exception) as error:
        learner_of(braintrace.nn.GRUCell(2, 3), X)
    assert_designed(error, "init_all_states")


@pytest.mark.parametrize("cell", [braintrace.nn.GRUCell, Leaky], ids=["gru", "leaky"])
def test_batched_input_with_unbatched_states(cell):
    model = cell(2, 3)
    with pytest.raises((TypeError, ValueError)) as error:
        braintrace.compile(model, "d_rtrl", jnp.ones((4, 2)))
    assert_designed(error, "batch_size")


@pytest.mark.parametrize("model", [lambda x: x, 3, None], ids=["function", "int", "None"])
def test_model_that_is_no_module(model):
    for build in (
        lambda: braintrace.D_RTRL(model),
        lambda: braintrace.compile(model, "d_rtrl", X),
        lambda: braintrace.compile_etrace_graph(model, X),
        lambda: braintrace.extract_module_info(model, X),
    ):
        with pytest.raises(TypeError) as error:
            build()
        assert_designed(error, "brainstate.nn.Module", type(model).__name__)


def test_model_without_state():
    with pytest.raises(braintrace.CompilationError) as error:
        learner_of(braintrace.nn.Linear(2, 3), X)
    assert_designed(error, "no hidden state", "HiddenState", "init_all_states")


def test_model_without_operator():
    def plain(model, x):
        model.h.value = 0.5 * model.h.value + x @ model.w.value

    with pytest.raises(braintrace.CompilationError) as error:
        learner_of(Step(plain), X)
    assert_designed(error, "no weight reaches a hidden state", "no ETP operator", "matmul(x, w)")
    assert_designed(error, "eligibility trace propagation", "braintrace.nn.Linear", "'rtrl'")
    assert len(re.findall(r"test_errors.py:\d+ \(.*plain\)", text_of(error.value))) == 3
    braintrace.RTRL(Step(plain)).compile_graph(X)  # as it says


def test_model_whose_operator_only_reads_out():
    def readout(model, x):
        model.h.value = 0.5 * model.h.value + x.sum()
        return braintrace.matmul(x, model.w.value)

    with pytest.raises(braintrace.CompilationError) as error:
        learner_of(Step(readout), X)
    assert_designed(error, "no weight reaches a hidden state", "reaches no hidden state")
    assert "test_errors.py:" in text_of(error.value)


def test_model_whose_tail_mixes_units():
    def mixed(model, x):
        model.h.value = 0.5 * model.h.value + jnp.cumsum(braintrace.matmul(x, model.w.value))

    with pytest.raises(braintrace.CompilationError) as error:
        learner_of(Step(mixed), X)
    assert_designed(error, "w", "mixes units", "test_errors.py:")


def in_cond(model, x):
    y = lax.cond(x[0] > 0, lambda: braintrace.matmul(x, model.w.value), lambda: jnp.zeros(3))
    model.h.value = 0.5 * model.h.value + y


def in_loop(model, x):
    w = model.w.value
    y = lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + braintrace.matmul(x, w)), (0, jnp.zeros(3))
    )[1]
    model.h.value = 0.5 * model.h.value + y


def test_operator_inside_a_branch_is_traced():
    assert learner_of(Step(in_cond), X).report.parameters["w",].how == "trace"


def test_operator_inside_a_while_loop_is_refused():
    with pytest.raises(braintrace.NotSupportedError) as error:
        learner_of(Step(in_loop), X)
    assert_designed(error, "inside a while_loop", "test_errors.py:", "lax.scan")


def test_parameter_written_in_the_step():
    def writing(model, x):
        model.w.value = 0.9 * model.w.value
        return integrate(model, x)

    model = Step(writing)
    before = values(model)
    with pytest.raises(braintrace.NotSupportedError) as error:
        learner_of(model, X)
    assert_designed(error, "writes the parameter w", "HiddenState", here=True)
    assert_close(values(model), before, 0)


def test_parameter_that_is_an_unused_one_is_no_error():
    class Extra(Leaky):
        def __init__(self):
            super().__init__()
            self.spare = brainstate.ParamState(jnp.ones(2))

    model = Extra()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, X)
    assert not np.asarray(online(algo, [X])[("spare",)]).any()


def test_changed_structure_of_the_weights_is_refused():
    def switched(model, x):
        y = braintrace.matmul(x, model.w.value) if model.flag else x @ model.w.value
        model.h.value = 0.5 * model.h.value + y

    model = Step(switched)
    model.flag = True
    algo = learner_of(model, X)
    model.flag = False
    with pytest.raises(braintrace.CompilationError) as error:
        algo(X)
    assert_designed(error, "other states than when it was compiled", "new learner")


@pytest.mark.parametrize(
    "change", [lambda y: y[::-1], lambda y: y + jnp.roll(y, 1)], ids=["reversed", "spread"]
)
def test_changed_destinations_of_a_weight_are_refused_or_exact(change):
    def switched(model, x):
        y = braintrace.matmul(x, model.w.value)
        model.h.value = 0.5 * model.h.value + (change(y) if model.flag else y)
        return model.h.value

    def make():
        model = Step(switched)
        model.flag = False
        return model

    model, twin = make(), make()
    algo = learner_of(model, X)
    algo(XS[0]), twin(XS[0])
    model.flag = twin.flag = True
    w = twin.w.value
    h0 = XS[0] @ w

    def loss(w):
        old = XS[0] @ w
        return squares(0.5 * old + change(XS[1] @ w))

    try:
        got = online(algo, [XS[1]])
    except braintrace.CompilationError as error:
        assert "why:" in str(error) and "do:" in str(error)
        assert_close(model.h.value, h0)
    else:
        assert_close(got[("w",)], jax.grad(loss)(w))


# ----------------------------------------------------------------------------------- batch size


def test_changed_batch_size():
    with pytest.raises(ValueError) as error:
        learner_of(leaky(2), jnp.ones((2, 2)))(jnp.ones((3, 2)))
    assert_designed(error, "float64[2, 2]", "float64[3, 2]", "reset(batch_size=")


def test_changed_batch_size_of_the_model_alone():
    model = leaky(2)
    algo = learner_of(model, jnp.ones((2, 2)))
    brainstate.nn.init_all_states(model, batch_size=4)
    with pytest.raises((TypeError, ValueError)) as error:
        algo(jnp.ones((2, 2)))
    assert_designed(error, "batch")
    with pytest.raises(ValueError) as error:
        algo(jnp.ones((4, 2)))
    assert_designed(error, "reset(batch_size=")


def test_changed_batch_size_of_a_mapped_learner():
    algo = braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), batch_size=3, vmap=True)
    with pytest.raises(ValueError) as error:
        algo(jnp.ones((4, 2)))
    assert_designed(error, "3", "4", "batch")


@pytest.mark.parametrize("how", ["reset", "reset_state"])
def test_batch_size_for_a_learner_without_batch(how):
    with pytest.raises(ValueError) as error:
        getattr(learner_of(leaky(), X), how)(batch_size=4)
    assert_designed(error, "no batch axis")


def test_empty_batch_is_refused_or_gives_zeros():
    try:
        got = online(learner_of(leaky(0), jnp.zeros((0, 2))), jnp.zeros((2, 0, 2)))
    except (ValueError, braintrace.CompilationError) as error:
        assert "why:" in str(error) and "do:" in str(error)
        assert "mixes units" not in str(error)
    else:
        assert all(not np.asarray(g).any() for g in jax.tree.leaves(got))


@pytest.mark.parametrize("size", ["3", -3, 2.5], ids=str)
def test_batch_size_that_is_no_count(size):
    with pytest.raises((TypeError, ValueError)) as error:
        braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), batch_size=size)
    assert_designed(error, "batch_size")


def test_vmap_without_batch_size():
    with pytest.raises(ValueError) as error:
        braintrace.compile(Leaky(), "d_rtrl", jnp.ones((3, 2)), vmap=True)
    assert_designed(error, "vmap=True without batch_size")


@pytest.mark.parametrize("bad", [jnp.ones((4, 2)), jnp.ones(())], ids=["mismatch", "scalar"])
def test_vmap_with_inputs_of_another_batch(bad):
    with pytest.raises(ValueError) as error:
        braintrace.compile(Leaky(), "d_rtrl", bad, vmap=True, batch_size=3)
    assert_designed(error, str(bad.shape), "3", "axis 0")


# ------------------------------------------------------------------------------------ sequences


def drive(algo=None, sequences=(XS,), **options):
    algo = algo or learner_of(leaky(), X)
    options.setdefault("step_fn", lambda x, *rest: squares(algo(x)))
    return algo.etrace_grad(*sequences, **options)


SEQUENCES = {
    "none": ((), "no sequence"),
    "empty tree": ((XS, {}), "empty pytree"),
    "scalar": ((XS, 1.0), "scalar"),
    "lengths": ((XS, XS[:2]), "[2, 4]"),
    "zero": ((XS[:0],), "zero steps"),
}


@pytest.mark.parametrize("sequences, part", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("method", ["etrace_grad", "etrace_evolve"])
def test_sequences_that_do_not_fit(sequences, part, method):
    with pytest.raises(ValueError) as error:
        if method == "etrace_grad":
            drive(sequences=sequences)
        else:
            learner_of(leaky(), X).etrace_evolve(*sequences)
    assert_designed(error, part)


def test_sequence_already_wrapped():
    for wrap in (braintrace.MultiStepData, braintrace.SingleStepData):
        with pytest.raises(TypeError) as error:
            drive(sequences=(wrap(XS),))
        assert_designed(error, "wrapped", "step_fn")


@pytest.mark.parametrize("data", [1.0, [1.0, 2.0]], ids=["scalar", "list"])
def test_window_of_scalars(data):
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(braintrace.MultiStepData(data))
    assert_designed(error, "MultiStepData holds a scalar", "SingleStepData")


def test_windows_of_different_lengths():
    with pytest.raises(ValueError) as error:
        learner_of(leaky(), X)(braintrace.MultiStepData((XS, XS[:2])))
    assert_designed(error, "different lengths", "2", "4", "lockstep")


@pytest.mark.parametrize("when", ["compile", "call"])
def test_window_of_zero_steps(when):
    algo = braintrace.D_RTRL(leaky())
    if when == "call":
        algo.compile_graph(X)
    window = braintrace.MultiStepData(XS[:0])
    with pytest.raises(ValueError) as error:
        algo(window) if when == "call" else algo.compile_graph(window)
    assert_designed(error, "zero steps")


OPTIONS = {
    "mask": (ValueError, {"mask": jnp.ones(3)}, "mask has shape (3,)"),
    "reduction": (ValueError, {"reduction": "max"}, "unknown reduction 'max'"),
    "loss_output": (ValueError, {"loss_output": "x"}, "unknown loss_output 'x'"),
    "zero window": (ValueError, {"chunk_size": 0}, "chunk_size=0"),
    "boolean window": (TypeError, {"chunk_size": True}, "chunk_size is a bool"),
    "float window": (TypeError, {"chunk_size": 2.0}, "chunk_size is a float"),
    "window": (ValueError, {"chunk_size": 2}, "multi-step"),
    "no step_fn": (TypeError, {"step_fn": None}, "step_fn"),
    "step_fn": (TypeError, {"step_fn": 3}, "step_fn"),
    "weights": (TypeError, {"weights": 3}, "weights"),
    "weights by name": (
        TypeError,
        {"weights": ["W"]},
        "choose among learner.param_states: b, v, w",
    ),
    "nearly a name": (TypeError, {"weights": "vv"}, "did you mean v?"),
    "NaN mask": (ValueError, {"mask": jnp.asarray([1, jnp.nan, 0, 1])}, "first at step 1"),
    "infinite mask": (ValueError, {"mask": [1, 1, 1, np.inf]}, "mask is not a finite number"),
    "network first": (TypeError, {"step_fn": lambda net, x: squares(net(x))}, "verify.compare"),
    "no weights": ((TypeError, ValueError), {"weights": []}, "weights"),
}


@pytest.mark.parametrize("kind, options, part", OPTIONS.values(), ids=OPTIONS)
def test_unknown_options_of_etrace_grad(kind, options, part):
    with pytest.raises(kind) as error:
        drive(**options)
    assert_designed(error, part)


def test_weights_that_are_none():
    algo = learner_of(leaky(), X)
    own = {
        "h": brainstate.HiddenState(jnp.zeros(2)),
        "count": brainstate.ParamState(jnp.zeros(2, int)),
        "unread": brainstate.ParamState(jnp.zeros(2)),
    }
    parts = {"h": "h (a HiddenState of float", "count": "of int", "unread": "weights holds unread"}
    for name, state in {**own, "h": algo.model4compile.h}.items():
        with pytest.raises(ValueError) as error:
            drive(algo, weights={name: state, "w": algo.model4compile.w})
        assert_designed(error, parts[name], "choose among learner.param_states: b, v, w")
    with pytest.raises(ValueError, match="no weight"):
        algo.init_optimizer(optax.sgd(0.1), [algo.model4compile.h])


def test_mask_with_nan_inside_of_jit_is_a_gradient_of_nan():
    algo = learner_of(leaky(), X)
    gradient = brainstate.transform.jit(lambda mask: drive(algo, mask=mask))
    found = gradient(jnp.asarray([1, jnp.nan, 0, 1]))
    assert all(np.isnan(g).all() for g in jax.tree.leaves(found))


LOSSES = {
    "shape": (lambda out: out, False, "shape (2,)"),
    "integer": (lambda out: squares(out).astype(int), False, "int"),
    "complex": (lambda out: squares(out) * 1j, False, "complex"),
    "None": (lambda out: None, False, "None"),
    "unit": (lambda out: squares(out) * u.mV, False, "mV"),
    "missing aux": (squares, True, "has_aux"),
    "surplus aux": (lambda out: (squares(out), out), False, "has_aux"),
}


@pytest.mark.parametrize("loss, has_aux, part", LOSSES.values(), ids=LOSSES)
def test_loss_that_is_no_real_number(loss, has_aux, part):
    algo = learner_of(leaky(), X)
    with pytest.raises((TypeError, ValueError)) as error:
        algo.etrace_grad(XS, step_fn=lambda x: loss(algo(x)), has_aux=has_aux)
    assert_designed(error, part)


def test_window_losses_must_be_one_per_step():
    algo = learner_of(leaky(), X, vjp_method="multi-step")
    with pytest.raises(ValueError) as error:
        algo.etrace_grad(
            XS, step_fn=lambda x: squares(algo(braintrace.MultiStepData(x))), chunk_size=2
        )
    assert_designed(error, "shape ()", "(2,)")


# ------------------------------------------------------------------------------------------ NaN


def test_nan_input_gives_nan_and_reset_clears_it():
    algo = learner_of(leaky(), X)
    want = online(learner_of(leaky(), X), XS)
    assert np.isnan(np.asarray(algo(jnp.full(2, jnp.nan)))).all()
    algo.reset()
    assert_close(online(algo, XS), want)


def test_nan_of_a_masked_last_step_does_not_reach_the_gradient():
    padded = XS.at[3].set(jnp.nan)
    algo = learner_of(leaky(), X)
    got = drive(algo, (padded,), mask=jnp.asarray([1.0, 1.0, 1.0, 0.0]), reduction="sum")
    assert_close(got, bptt(leaky(), XS[:3]))


# ------------------------------------------------------------------------------- rules, options


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


# ---------------------------------------------------------------------------------------- units


def test_input_with_another_unit_than_compiled():
    volts = Step(integrate, state=jnp.zeros(3) * u.mV)
    algo = learner_of(volts, X * u.mV)
    for bad, shown in ((X, "float64[2])"), (X * u.volt, "float64[2] V")):
        with pytest.raises(ValueError) as error:
            algo(bad)
        assert_designed(error, "float64[2] mV", shown)


def test_input_with_a_unit_into_a_plain_state():
    with pytest.raises(Exception) as error:
        learner_of(Step(integrate), X * u.mV)
    assert_designed(error, "mV", here=True)


def lose_unit(model, x):
    model.h.value = braintrace.matmul(x, model.w.value)


def test_state_that_loses_its_unit():
    with pytest.raises(ValueError) as error:
        learner_of(Step(lose_unit, state=jnp.zeros(3) * u.mV), X)
    assert_designed(error, "h", "mV", here=True)


def test_state_that_loses_its_unit_keeps_its_value():
    model = Step(lose_unit, state=jnp.zeros(3) * u.mV)
    with pytest.raises(ValueError):
        learner_of(model, X)
    assert not isinstance(u.get_mantissa(model.h.value), jax.core.Tracer)
    assert u.get_unit(model.h.value) == u.mV


def test_state_that_changes_the_scale_of_its_unit_is_refused_or_converted():
    def rescaled(model, x):
        model.h.value = (0.5 * model.h.value + braintrace.matmul(x, model.w.value)).in_unit(u.volt)

    model = Step(rescaled, state=jnp.zeros(3) * u.mV)
    try:
        algo = learner_of(model, X * u.mV)
    except ValueError as error:
        assert "why:" in text_of(error) and "mV" in text_of(error)
    else:
        algo(X * u.mV)
        assert_close(model.h.value.to_decimal(u.mV), X @ normal(0, 2, 3))


def test_windows_of_a_mapped_learner_are_refused():
    mapped = braintrace.compile(
        Leaky(), "d_rtrl", jnp.ones((3, 2)), batch_size=3, vmap=True, vjp_method="multi-step"
    )
    with pytest.raises(braintrace.NotSupportedError) as error:
        mapped.etrace_grad(jnp.ones((4, 3, 2)), step_fn=lambda x: x, chunk_size=2)
    assert_designed(error, "takes no windows")
    with pytest.raises(braintrace.NotSupportedError) as error:
        mapped(braintrace.MultiStepData(jnp.ones((4, 3, 2))))
    assert_designed(error, "takes no windows")


def test_value_of_a_side_effect_that_reaches_a_state_is_refused():
    def listening(model, x):
        heard = io_callback(lambda: np.ones(3), jax.ShapeDtypeStruct((3,), float))
        model.h.value = heard * model.h.value + braintrace.matmul(x, model.w.value)

    with pytest.raises(braintrace.NotSupportedError) as error:
        learner_of(Step(listening), X)
    assert_designed(error, "side effect", here=True)


class Gained(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((2, 3)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(3))

    def update(self, x, *, gain=1.0):
        self.h.value = 0.5 * self.h.value + gain * braintrace.matmul(x, self.w.value)
        return self.h.value


def test_keywords_of_update_are_told_to_compile():
    x = jnp.ones(2)
    learner = braintrace.compile(Gained(), "d_rtrl", x, kwargs={"gain": 1.0})
    np.testing.assert_allclose(learner(x, gain=2.0), 4.0)
    found = learner.etrace_grad(
        jnp.ones((4, 2)), step_fn=lambda x: jnp.sum(learner(x, gain=3.0)), reduction="sum"
    )
    assert bool((found["w",] > 0).all())
    with pytest.raises(ValueError, match="kwargs=") as error:
        braintrace.compile(Gained(), "d_rtrl", x)(x, gain=2.0)
    assert_designed(error, "keywords of `update`")
    with pytest.raises(braintrace.NotSupportedError) as error:
        braintrace.compile(
            Gained(), "d_rtrl", x[None], batch_size=1, vmap=True, kwargs={"gain": jnp.ones(1)}
        )
    assert_designed(error, "gain")


def test_step_function_must_call_the_learner():
    cell = Gained()
    learner = braintrace.compile(cell, "d_rtrl", jnp.ones(2))
    xs = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="does not call the learner") as error:
        learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(cell(x)))
    assert_designed(error, "learner(x)")
    with pytest.raises(ValueError, match="does not call the learner"):
        learner.etrace_train(xs, step_fn=lambda x: jnp.sum(cell(x)), optimizer=optax.sgd(0.1))
    once = brainstate.transform.jit(lambda x: jnp.sum(learner(x)))
    learner.etrace_grad(xs, step_fn=once)
    learner.etrace_grad(xs, step_fn=once)  # traced before


# ------------------------------------------------------------------- what JAX alone cannot know

BATCH = jnp.ones((3, 2))


def test_states_of_64_bits_while_jax_computes_in_32():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    before = values(learner)
    with jax.enable_x64(False):
        xs = jnp.ones((4, 2))
        for call in (
            lambda: learner(xs[0]),
            lambda: learner.etrace_grad(xs, step_fn=lambda x: squares(learner(x))),
            lambda: braintrace.D_RTRL(learner.model4compile).compile_graph(xs[0]),
        ):
            with pytest.raises(ValueError) as error:
                call()
            assert_designed(error, "float64", "jax_enable_x64 is switched off")
        narrow = braintrace.compile(Leaky(), "d_rtrl", xs[0])
        assert narrow(xs[0]).dtype == jnp.float32
    narrow(xs[0])  # and 32 bits stay 32 bits
    assert all(a is b for a, b in zip(values(learner).values(), before.values(), strict=True))


@pytest.mark.parametrize("vmap", [False, True])
def test_learner_cannot_be_pickled_and_can_be_copied(vmap):
    options = {"vmap": True, "batch_size": 3} if vmap else {}
    x = BATCH if vmap else X
    learner = braintrace.compile(Leaky(), "d_rtrl", x, **options)
    with pytest.raises(TypeError) as error:
        pickle.dumps(learner)
    assert_designed(error, "cannot be pickled", "learner.save", "learner.load")
    learner(x)
    twin, shared = copy.deepcopy(learner), copy.copy(learner)
    want = twin(2 * x)  # with states of its own
    np.testing.assert_array_equal(learner(2 * x), want)
    assert not np.array_equal(shared(2 * x), want)  # with those of the learner: a step later


def fast_square(value):
    return sum((g**2).sum() for g in jax.tree.leaves(value))


SECOND = {
    "hessian": lambda f, theta: brainstate.transform.hessian(f, theta)(),
    "gradient of a gradient": lambda f, theta: brainstate.transform.grad(
        lambda: fast_square(brainstate.transform.grad(f, theta)()), theta
    )(),
}


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_second_derivative_through_a_learner_is_refused(rule, second):
    learner = braintrace.compile(Leaky(), rule, X)
    with pytest.raises(braintrace.NotSupportedError) as error:
        second(lambda: squares(learner(X)), learner.param_states)
    assert_designed(error, "differentiated once more", "the model itself")


def test_gradient_of_a_sequence_is_refused_as_a_function_of_the_inputs():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    total = lambda xs: fast_square(learner.etrace_grad(xs, step_fn=lambda x: squares(learner(x))))
    with pytest.raises(braintrace.NotSupportedError) as error:
        brainstate.transform.grad(total)(XS)
    assert_designed(error, "differentiated once more")


def test_gradient_is_a_function_of_the_parameters_of_the_loss():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    scale = brainstate.ParamState(jnp.asarray(2.0))

    def total():
        learner.reset()
        grads = learner.etrace_grad(
            XS, step_fn=lambda x: squares(learner(x) * scale.value), weights=learner.param_states
        )
        return fast_square(grads)

    got = brainstate.transform.grad(total, scale)()
    # The gradient goes with the square of the scale, its square with the fourth power.
    np.testing.assert_allclose(got, 4 * total() / scale.value, rtol=1e-9)


RAW = {
    "checkpoint": lambda f: jax.checkpoint(f),
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_learner_inside_of_a_transformation_of_jax_is_refused(raw):
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    loss = lambda x: squares(raw(learner)(x))
    for call in (
        lambda: brainstate.transform.grad(loss, learner.param_states)(X),
        lambda: learner.etrace_grad(XS, step_fn=loss),
        lambda: learner.etrace_grad(XS, step_fn=loss, block_size=1),
    ):
        with pytest.raises(braintrace.NotSupportedError) as error:
            call()
        assert_designed(error, "inside of a transformation of JAX", "brainstate.transform")
    assert_close(online(learner, XS), bptt(leaky(), XS))  # nothing has leaked into the states


def test_learner_inside_of_a_checkpoint_of_brainstate():
    learner = braintrace.compile(Leaky(), "d_rtrl", X)
    again = brainstate.transform.checkpoint(learner)
    total = lambda: brainstate.transform.for_loop(lambda x: squares(again(x)), XS).sum()
    got = brainstate.transform.jit(brainstate.transform.grad(total, learner.param_states))()
    assert_close(got, bptt(leaky(), XS))
