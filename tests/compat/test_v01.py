"""The names of version 0.1 work as operators of today: same numbers, same traces."""

import inspect
import pickle
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import braintrace
from braintrace.compat import _v01

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)))
NAMES = """
    MatMulOp ElemWiseOp ConvOp SpMatMulOp LoraOp ETraceOp ETraceParam ElemWiseParam NonTempParam
    FakeETraceParam FakeElemWiseParam
""".split()


def old(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(braintrace, name)


def draw(*shape, seed=1):
    return jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=shape))


MASK = jnp.asarray([[1.0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1]])
OPERATORS = {
    "masked": (
        old("MatMulOp")(MASK, jnp.tanh),
        {"weight": draw(3, 4), "bias": draw(4)},
        lambda x, w: x @ jnp.tanh(w["weight"] * MASK) + w["bias"],
    ),
    "mask_last": (
        old("MatMulOp")(MASK, jnp.cos, True),
        {"weight": draw(3, 4)},
        lambda x, w: x @ (jnp.cos(w["weight"]) * MASK),
    ),
    "lora": (
        old("LoraOp")(0.7),
        {"B": draw(3, 2), "A": draw(2, 4), "bias": draw(4)},
        lambda x, w: 0.7 * x @ w["B"] @ w["A"] + w["bias"],
    ),
    "sparse": (
        old("SpMatMulOp")(scipy.sparse.csr_matrix(np.asarray(MASK)), jnp.exp),
        {"weight": draw(8), "bias": draw(4)},
        lambda x, w: (
            x @ jnp.zeros((3, 4)).at[np.nonzero(np.asarray(MASK))].set(jnp.exp(w["weight"]))
            + w["bias"]
        ),
    ),
    "conv": (
        old("ConvOp")(None, (1,), "SAME", weight_mask=2.0, weight_fn=jnp.sin),
        {"weight": draw(2, 3, 1), "bias": draw(2)},
        lambda x, w: (
            jnp.einsum("bcs,oc->bos", x, jnp.sin(2 * w["weight"])[..., 0]) + w["bias"][:, None]
        ),
    ),
}


class Old(brainstate.nn.Module):
    """A leaky layer driven through every operator, and a read-out outside of the graph."""

    def __init__(self):
        super().__init__()
        for name, (op, weights, _) in OPERATORS.items():
            setattr(self, name, old("ETraceParam")(weights, op))
        self.leak = old("ElemWiseParam")(draw(4), jax.nn.sigmoid)
        self.readout = old("NonTempParam")({"weight": draw(4, 2)}, old("MatMulOp")(), grad="full")
        self.gain = old("FakeElemWiseParam")(draw(4), jnp.exp)
        self.turn = old("FakeETraceParam")({"weight": draw(4, 4)}, old("MatMulOp")())

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((2, 4)))
        self.c = brainstate.HiddenState(jnp.zeros((2, 2, 1)))

    def update(self, x):
        drive = sum(getattr(self, k).execute(x) for k in OPERATORS if k != "conv")
        self.h.value = self.leak.execute() * self.h.value + self.gain.execute() * drive
        self.c.value = jnp.tanh(0.7 * self.c.value + self.conv.execute(x[..., None]))
        out = self.readout.execute(self.turn.execute(self.h.value))
        return jnp.concatenate([out, self.c.value[..., 0]], -1)


def test_parameters_of_the_old_kind_are_traced_and_their_gradient_is_that_of_bptt():
    learner = braintrace.compile(Old(), "d_rtrl", X[0], strict=True)
    found = {r.path: r.primitive.name for r in learner.graph.hidden_param_op_relations}
    assert found == {
        ("masked",): "etp_mm",
        ("mask_last",): "etp_mm",
        ("lora",): "etp_lora_mm",
        ("sparse",): "etp_sp_mm",
        ("conv",): "etp_conv",
        ("leak",): "etp_elemwise",
    }
    paths = {path for path, _ in learner.param_states.items()}
    assert paths == {("readout",), *found}  # what is fake is not a parameter
    step = lambda net, x: jnp.sum(jnp.sin(net(x)))
    compared = braintrace.verify.compare(learner, step, X)
    assert compared.max_error < 1e-12
    grads = learner.etrace_grad(X, step_fn=lambda x: step(learner, x))
    assert all(jnp.abs(a).max() > 1e-3 for a in jax.tree.leaves(grads))
    readout = learner.report.parameters[("readout",)]
    assert readout.how == "within-step" and readout.exact


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_computes_its_formula_with_and_without_the_compiler_seeing_it(name):
    op, weights, formula = OPERATORS[name]
    x = X[0][..., None] if name == "conv" else X[0]
    expected = formula(x, weights)
    np.testing.assert_allclose(op(x, weights), expected, atol=1e-12)
    np.testing.assert_allclose(op.raw_xw_to_y(x, weights), expected, atol=1e-12)
    seen = [str(jax.make_jaxpr(f)(x, weights)).count("etp_") for f in (op, op.raw_xw_to_y)]
    assert seen[0] and not seen[1]
    got = op.xy_to_dw(x, jnp.cos(expected), weights)
    wanted = jax.grad(lambda w: jnp.sum(jnp.sin(formula(x, w))))(weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), got, wanted)


def test_parameter_outside_of_the_graph_is_learned_within_the_step():
    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = old("ETraceParam")({"weight": draw(3, 4)}, old("MatMulOp")())
            self.outside = old("NonTempParam")(draw(3, 4), lambda x, w: x @ w)

        def init_state(self, **kwargs):
            self.h = brainstate.HiddenState(jnp.zeros((2, 4)))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + self.inside.execute(x) + self.outside.execute(x)
            return self.h.value

    report = braintrace.compile(Net(), "d_rtrl", X[0]).report.parameters
    assert report[("inside",)].how == "trace"
    assert report[("outside",)].how == "within-step" and not report[("outside",)].exact


@pytest.mark.parametrize("name", NAMES)
def test_name_is_found_with_a_warning_that_says_what_to_use(name):
    with pytest.warns(DeprecationWarning, match=rf"braintrace\.{name} .* use ") as caught:
        value = getattr(braintrace, name)
    assert caught[0].filename == __file__
    assert name not in {*dir(braintrace), *braintrace.__all__}
    assert value.__module__ == "braintrace" and value.__name__ == name
    assert inspect.getdoc(value) and pickle.loads(pickle.dumps(value)) is value


def test_names_are_those_of_version_01():
    assert sorted(_v01.INSTEAD) == sorted(NAMES)


def test_mistakes_are_named():
    op, weights = old("MatMulOp")(), {"weight": draw(3, 4)}
    with pytest.raises(TypeError, match=r"MatMulOp.*list"):
        op(X[0], [draw(3, 4)])
    with pytest.raises(ValueError, match=r"MatMulOp.*no weight"):
        op(X[0], {"bias": draw(4)})
    with pytest.raises(ValueError, match=r"LoraOp.*no A"):
        old("LoraOp")()(X[0], {"B": draw(3, 2)})
    with pytest.raises(TypeError, match="int as sparse_mat"):
        old("SpMatMulOp")(3)
    with pytest.raises(TypeError, match=r"ETraceParam.*function"):
        old("ETraceParam")(weights, lambda x, w: x)
    with pytest.raises(ValueError, match="grad='half'"):
        old("ETraceParam")(weights, op, "half")
    with pytest.raises(NotImplementedError, match="does not define xw_to_y"):
        old("ETraceOp")()(X[0], weights)
    with pytest.raises(NotImplementedError, match="dt_to_t is not defined"):
        op.dt_to_t(draw(4), weights)
    kinds = [old("ETraceParam")(weights, op, g).gradient for g in (None, "full", "approx")]
    assert kinds == ["adaptive", "full", "approx"]


def test_old_helpers():
    pulled = _v01.general_y2w(lambda x, w: x @ w, X[0], jnp.ones((2, 4)), draw(3, 4))
    np.testing.assert_allclose(pulled, X[0].T @ np.ones((2, 4)), atol=1e-12)
    with pytest.warns(DeprecationWarning, match="does nothing"):
        with _v01.stop_param_gradients():
            pass
