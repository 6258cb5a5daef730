"""The references themselves: against each other, against hand-written numbers, and their errors."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import EXACT, RECURRENT, Net, step_fn

import braintrace as bt
from braintrace.verify import bptt_grad, compare, finite_difference_grad
from braintrace.verify._compare import comparison, online_grad
from oracle import compare_to_rule, dense, reference_grad

SMOOTH = ["three_states", "complex_state", "operand_expressions", "lstm", "excitation_inhibition"]


@pytest.mark.parametrize("name", SMOOTH)
def test_bptt_is_what_finite_differences_see(name):
    c = {**EXACT, **RECURRENT}[name]()
    args = (c.model, step_fn, *c.sequences)
    assert comparison(finite_difference_grad(*args), bptt_grad(*args)).max_error < 1e-6


def linear():
    """h' = 0.5 h + w x with loss h'^2 / 2, states and weight scalars in disguise."""

    def update(m, x):
        m.h.value = 0.5 * m.h.value + bt.matmul(x, m.w.value)
        return m.h.value

    return Net(update, {"w": jnp.array([[2.0]])}, {"h": jnp.array([1.0])})


def test_bptt_and_d_rtrl_of_a_linear_unit_by_hand():
    # h: 2.5, 5.25; dh/dw: 1, 2.5; gradient 2.5 * 1 + 5.25 * 2.5
    xs, loss = jnp.array([[1.0], [2.0]]), lambda net, x: 0.5 * (net(x) ** 2).sum()
    for grads in (
        bptt_grad(linear(), loss, xs),
        reference_grad("d_rtrl", linear(), loss, xs),
        finite_difference_grad(linear(), loss, xs),
    ):
        np.testing.assert_allclose(grads["w",], [[15.625]], rtol=1e-8)
    mean = bptt_grad(linear(), loss, xs, reduction="mean")
    np.testing.assert_allclose(mean["w",], [[7.8125]])


def test_pp_prop_of_a_linear_unit_by_hand():
    # a = 0.8. Step 1: eps_x = 1, c = 0.2 * 2.5, over 0.2: 2.5.
    # Step 2: eps_x = 0.8 + 2 = 2.8; lam = 5.25 * 0.5, eps_f = 0.2, ct = 5.25:
    #         c = 0.8 * 2.625 * 0.2 + 0.2 * 5.25 = 1.47, over 0.36: 2.8 * 1.47 / 0.36.
    xs, loss = jnp.array([[1.0], [2.0]]), lambda net, x: 0.5 * (net(x) ** 2).sum()
    truth = 2.5 + 2.8 * 1.47 / 0.36
    found = reference_grad("pp_prop", linear(), loss, xs, decay_or_rank=0.8)
    np.testing.assert_allclose(found["w",], [[truth]])
    rank = reference_grad("pp_prop", linear(), loss, xs, decay_or_rank=9)  # (9 - 1) / (9 + 1)
    np.testing.assert_allclose(rank["w",], [[truth]])


def test_recurrent_entries_are_cut_by_hand():
    # h' = w h, loss h'^2 / 2 from h = 1, w = 2: h is 2, 4. In-step 2 * 1 + 4 * 2; D and lam are
    # zero, the only way back is through the operator. A window of two is the derivative of
    # w^2 / 2 + w^4 / 2 = w + 2 w^3.
    def update(m, x):
        m.h.value = bt.matmul(m.h.value, m.w.value)
        return m.h.value

    make = lambda: Net(update, {"w": jnp.array([[2.0]])}, {"h": jnp.array([1.0])})
    xs, loss = jnp.zeros((2, 1)), lambda net, x: 0.5 * (net(x) ** 2).sum()
    np.testing.assert_allclose(reference_grad("d_rtrl", make(), loss, xs)["w",], [[10.0]])
    # One step at a time with nothing cut: lam_2 = 4 * 2 meets the trace h = 1: 8 more.
    windows = reference_grad("d_rtrl", make(), loss, xs, vjp_method="multi-step")
    np.testing.assert_allclose(windows["w",], [[18.0]])
    whole = reference_grad("d_rtrl", make(), loss, xs, vjp_method="multi-step", chunk_size=2)
    np.testing.assert_allclose(whole["w",], [[18.0]])
    np.testing.assert_allclose(bptt_grad(make(), loss, xs)["w",], [[18.0]])


def test_dense_structure_names_groups():
    c = RECURRENT["excitation_inhibition"]()
    assert dense(c.model, step_fn, *c.sequences).groups == ((("e",),), (("i",),))
    c = RECURRENT["lstm"]()
    assert len(dense(c.model, step_fn, *c.sequences).groups) == 1


def test_references_leave_model_and_learner_as_they_were():
    c = RECURRENT["gru"]()
    learner = bt.D_RTRL(c.model)
    learner.compile_graph(c.x0)
    learner(c.x0)
    states = [*c.model.states().values(), *learner.states().values(), brainstate.random.DEFAULT]
    before = [jax.tree.map(np.asarray, jax.tree.leaves(s.value)) for s in states[:-1]]
    for against in ("bptt", "finite"):
        compare(learner, step_fn, *c.sequences, against=against)
    compare_to_rule(learner, step_fn, *c.sequences)
    after = [jax.tree.map(np.asarray, jax.tree.leaves(s.value)) for s in states[:-1]]
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert [a.dtype for x in before for a in x] == [a.dtype for x in after for a in x]


def test_a_gradient_leaves_no_trace_that_only_its_step_function_has():
    """A second one begins with the same random numbers, also where the first made the trace."""
    c = RECURRENT["gru"]()
    learner = bt.UORO(c.model)
    learner.compile_graph(c.x0)
    own = set(learner.etraces)
    c.model.back = back = brainstate.ShortTermState(jnp.zeros(()))

    def step(net, x, *targets):
        loss = step_fn(net, x + 0.1 * back.value, *targets)
        back.value = jnp.tanh(loss)
        return loss

    first, second = (online_grad(learner, step, *c.sequences) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert set(learner.etraces) == own


def test_states_are_restored_after_a_failure():
    model = linear()

    def bad(net, x):
        net(x)
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="own"):
        finite_difference_grad(model, bad, jnp.ones((2, 1)))
    assert model.h.value == 1.0


def test_finite_differences_of_chosen_entries():
    c = EXACT["plain_readout"]()
    grads = finite_difference_grad(c.model, step_fn, *c.sequences, entries={("w",): [0, 5]})
    assert np.isfinite(np.asarray(grads["w",]).ravel()).nonzero()[0].tolist() == [0, 5]
    assert np.isnan(np.asarray(grads["out",])).all()


def test_gradients_of_chosen_weights():
    c = EXACT["plain_readout"]()
    assert set(bptt_grad(c.model, step_fn, *c.sequences, weights=c.model.w)) == {("w",)}
    chosen = {("w",): c.model.w}
    assert set(bptt_grad(c.model, step_fn, *c.sequences, weights=chosen)) == {("w",)}


def test_comparison_prints_a_table_and_tells_errors():
    c = RECURRENT["vanilla"]()
    learner = bt.D_RTRL(c.model)
    learner.compile_graph(c.x0)
    result = compare(learner, step_fn, *c.sequences)
    assert 0 < result.max_error < 2 and result.errors.keys() == result.cosines.keys()
    head, row = str(result).splitlines()
    assert head.split()[:3] == ["parameter", "error", "cosine"] and row.startswith("W.weight")
    truth = {("a",): jnp.zeros(2), ("b",): jnp.ones(2)}
    found = {("a",): jnp.full(2, 1e-17), ("b",): jnp.ones(2)}
    assert comparison(found, truth).max_error < 1e-9
    assert comparison({**found, ("a",): jnp.full(2, 1e-3)}, truth).max_error > 1


def test_compare_runs_windows():
    c = RECURRENT["vanilla"]()
    learner = bt.D_RTRL(c.model, vjp_method="multi-step")
    learner.compile_graph(c.x0)
    result = compare_to_rule(learner, step_fn, *c.sequences, chunk_size=3)
    assert result.max_error < 1e-9


def refuse(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert all(w in text for w in (*words, "why:", "do:")), text


XS = jnp.ones((2, 1))
loss = lambda net, x: net(x).sum()


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: bptt_grad(3, loss, XS), TypeError, "int"),
        (lambda: bptt_grad(linear(), None, XS), TypeError, "NoneType"),
        (lambda: bptt_grad(linear(), loss), ValueError, "no sequence"),
        (lambda: bptt_grad(linear(), loss, XS, jnp.ones((3, 1))), ValueError, "[2, 3]"),
        (lambda: bptt_grad(linear(), loss, jnp.ones((0, 1))), ValueError, "zero steps"),
        (lambda: bptt_grad(linear(), loss, XS, reduction="max"), ValueError, "max"),
        (lambda: bptt_grad(linear(), lambda net, x: net(x), XS), ValueError, "float64[1]"),
        (lambda: bptt_grad(linear(), loss, XS, weights=linear().w), ValueError, "belong"),
        (lambda: bptt_grad(linear(), lambda x: x.sum(), XS), TypeError, "learner.etrace_grad"),
        (lambda: compare(linear(), loss, XS), TypeError, "Net"),
        (lambda: bptt_grad(linear(), loss, jnp.ones((2, 3))), ValueError, "(xs, not xs[0])"),
        (lambda: finite_difference_grad(linear(), loss, XS, entries={"q": [0]}), ValueError, "q"),
    ],
)
def test_mistakes_are_named(call, error, word):
    refuse(call, error, word)


def test_compare_refuses_unknown_references():
    learner = bt.D_RTRL(linear())
    learner.compile_graph(XS[0])
    refuse(lambda: compare(learner, loss, XS, against="luck"), ValueError, "luck")


@pytest.mark.parametrize(
    ("rule", "options", "error", "word"),
    [
        ("kalman", {}, ValueError, "kalman"),
        ("snap", {}, TypeError, "n"),
        ("snap", {"n": 0}, ValueError, "n=0"),
        (bt.D_RTRL, {"decay": 1}, TypeError, "d_rtrl takes"),
        ("pp_prop", {}, TypeError, "decay_or_rank"),
        ("ottt", {"leak": 0.5, "mode": "B"}, ValueError, "'B'"),
        ("otpe", {"leak": 0.5, "mode": "A"}, ValueError, "'A'"),
        ("d_rtrl", {"chunk_size": 2}, ValueError, "2"),
        ("d_rtrl", {"chunk_size": 0}, ValueError, "0"),
        ("d_rtrl", {"vjp_method": "x"}, ValueError, "'x'"),
    ],
)
def test_mistakes_with_rules_are_errors(rule, options, error, word):
    with pytest.raises(error, match=word):
        reference_grad(rule, linear(), loss, XS, **options)
