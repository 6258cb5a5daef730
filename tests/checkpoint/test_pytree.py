"""A learner as a pytree: orbax keeps it, weights alone go into another batch size."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import saiunit as u
from flax import nnx

import braintrace

T, B, I, N = 4, 2, 3, 4
OPTIMIZER = optax.adam(1e-2)
XS = np.random.default_rng(0).normal(size=(T, B, I))


def build(batch=B, seed=0, model=None, **options):
    brainstate.random.seed(seed)
    with brainstate.environ.context(dt=1.0 * u.ms):
        weight = lambda *shape: brainstate.random.DEFAULT.normal(size=shape) * u.mV
        cell = braintrace.nn.LIFCell(
            *(I, N), V_th=1.0 * u.mV, w_init=weight(I, N), u_init=weight(N, N), b_init=None
        )
    options = {"batch_size": batch, **options}
    return braintrace.compile(model or cell, "d_rtrl", jnp.zeros((batch, I)), **options)


def train(learner, xs=XS):
    loss = lambda x: jnp.mean((learner(x) - 0.3) ** 2)
    return learner.etrace_train(xs, step_fn=loss, optimizer=OPTIMIZER, update_every=2)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def test_orbax_brings_back_a_learner_in_the_middle_of_a_sequence(tmp_path):
    learner = build()
    train(learner)
    tree = learner.to_pytree()
    assert set(tree) == {"weights", "states", "optimizer"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "learner", tree)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "learner", zeros(tree))
    other = build(seed=1)
    other.init_optimizer(OPTIMIZER)
    other.from_pytree(read)
    np.testing.assert_array_equal(train(other), train(learner))
    for a, b in zip(*(jax.tree.leaves(x.to_pytree()) for x in (learner, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_alone_go_into_another_batch_size():
    learner, other = build(), build(batch=5, seed=1)
    before = other.to_pytree()
    other.from_pytree(learner.to_pytree(), weights_only=True)
    after = other.to_pytree()
    for a, b in zip(
        *(jax.tree.leaves(t["weights"]) for t in (learner.to_pytree(), after)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(jax.tree.leaves(t["states"]) for t in (before, after)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_units_are_part_of_the_names():
    tree = build().to_pytree()
    assert tree["weights"]["model"]["W"]["weight"]["weight [mV]"].shape == (I, N)
    assert tree["states"]["model"]["V [mV]"].shape == (B, N)


def test_tree_of_another_learner_is_refused_and_changes_nothing():
    learner, other = build(), build(batch=5, seed=1)
    train(learner)
    before = jax.tree.leaves(other.to_pytree())
    with pytest.raises(ValueError, match="another learner") as refusal:
        other.from_pytree(learner.to_pytree())
    text = str(refusal.value)
    assert "states/model/V [mV]: float64[2, 4] in the tree, float64[5, 4] here" in text
    assert "optimizer/0/mu" in text and "only in the tree" in text
    assert "  why: " in text and "weights_only=True" in text
    wrong = {"weights": {"model": {"W": {"weight": {"weight [V]": np.zeros((I, N))}}}}}
    with pytest.raises(ValueError, match=r"weight \[V\]: only in the tree"):
        other.from_pytree(wrong, weights_only=True)
    for a, b in zip(before, jax.tree.leaves(other.to_pytree()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_learner_that_is_not_compiled_is_refused():
    with pytest.raises(ValueError, match="before it is compiled"):
        braintrace.D_RTRL(braintrace.nn.Linear(I, N, 1.0)).to_pytree()


def test_mapped_learner_keeps_its_samples():
    def make(seed):
        brainstate.random.seed(seed)
        cell = braintrace.nn.ValinaRNNCell(I, N, w_init=1.0)
        return braintrace.compile(cell, "d_rtrl", jnp.zeros((B, I)), batch_size=B, vmap=True)

    learner, other = make(0), make(1)
    learner(XS[0])
    other.from_pytree(learner.to_pytree())
    np.testing.assert_array_equal(other(XS[1]), learner(XS[1]))


class Net(nnx.Module):
    def __init__(self, seed, batch=B):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(I, N, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.v = nnx.Variable(jnp.zeros((batch, N)))

    def __call__(self, x):
        self.v[...] = jnp.tanh(0.7 * self.v[...] + self.up(self.drop(x)))
        return self.v[...]


def test_learner_of_an_nnx_module_goes_on():
    compile = lambda seed, batch=B: braintrace.compile(
        Net(seed, batch), "d_rtrl", jnp.zeros((batch, I))
    )
    learner, other, wide = compile(0), compile(1), compile(1, 5)
    learner.scan(XS)
    tree = learner.to_pytree()
    assert tree["weights"]["up"]["kernel"]["value"].shape == (I, N)
    other.from_pytree(tree)
    ours, theirs = (n.grad(lambda out: jnp.sum(out**2))(XS) for n in (learner, other))
    assert np.any(tree["states"]["steps"])
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)
    wide.from_pytree(tree, weights_only=True)
    np.testing.assert_array_equal(wide.module.up.kernel[...], learner.module.up.kernel[...])
    with pytest.raises(ValueError, match=r"v/value: float64\[2, 4\] in the tree"):
        wide.from_pytree(tree)
