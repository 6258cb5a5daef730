"""Mistakes of users at compile time and in single calls: messages that say what to do."""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace

from .designed import XS, Step, X, assert_designed, integrate, text_of
from .reference import (
    Leaky,
    assert_close,
    leaky,
    learner_of,
    normal,
    online,
    squares,
    values,
)


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
    assert_designed(error, "before it is compiled", "compile_graph")


def test_report_before_compile():
    with pytest.raises(RuntimeError) as error:
        _ = braintrace.D_RTRL(leaky()).report
    assert_designed(error, "before it is compiled", "braintrace.compile")


def test_misspelt_rule_names_the_rule_that_may_be_meant():
    with pytest.raises(ValueError) as error:
        braintrace.compile(leaky(), "drtrl", X)
    assert_designed(error, "unknown rule 'drtrl'", "did you mean 'd_rtrl'")


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
    builds = [
        lambda: braintrace.D_RTRL(model),
        lambda: braintrace.compile_etrace_graph(model, X),
        lambda: braintrace.extract_module_info(model, X),
    ]
    if not callable(model):
        builds.append(lambda: braintrace.compile(model, "d_rtrl", X))
    for build in builds:
        with pytest.raises(TypeError) as error:
            build()
        assert_designed(error, "brainstate.nn.Module", type(model).__name__)
        assert_designed(error, "braintrace.online(step, rule)", "bring-your-own-cell.md")


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
    assert_designed(error, "unmarked=True", "bring-your-own-cell.md")
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


@pytest.mark.parametrize(
    "example, options",
    [
        (jnp.ones((3, 2)), {}),  # batch_size is missing
        (jnp.ones(2), {"batch_size": 3}),  # the batch is missing
        (jnp.ones((5, 3, 2)), {"batch_size": 3}),  # a sequence
        (jnp.ones((3, 2)).tolist(), {"batch_size": 3}),  # lists
    ],
)
def test_example_that_does_not_fit_says_which_one_would(example, options):
    with pytest.raises((TypeError, ValueError)) as error:
        braintrace.compile(braintrace.nn.GRUCell(2, 4), "d_rtrl", example, **options)
    assert_designed(error, "could not be traced on inputs", "xs[0]", "batch_size=")
