"""Every layer without a state of its own: what it computes, and that it is learned online.

A model has the layer twice, before a leaky state and as the read-out of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax import lax
from jax.experimental.sparse import BCOO

import braintrace as bt
from braintrace import nn
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad

T, BATCH = 4, 2
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


MASK = jnp.asarray(RNG.integers(0, 2, (3, 3)), bool)
SIGN = jnp.asarray([[1.0], [-1.0], [1.0]])
MATRIX = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0], [4.0, 5.0, 0.0]])
KERNEL_MASK = jnp.asarray(RNG.integers(0, 2, (3, 2, 2)))


@dataclass(frozen=True)
class Case:
    """A layer that keeps the shape of its input, and the same for one sample in plain JAX."""

    make: Callable[[], Any]
    formula: Callable[[Any, jax.Array], jax.Array]
    sample: tuple[int, ...] = (3,)
    integers: int = 0

    def draw(self, *lead):
        if self.integers:
            return jnp.asarray(RNG.integers(0, self.integers, (*lead, *self.sample)))
        return normal(*lead, *self.sample)


def scaled(p, x):
    centred = p["weight"] - p["weight"].mean(0)
    standard = centred / jnp.sqrt(jnp.maximum((centred**2).sum(0), 1e-4))
    return (x @ (standard * MASK)) * p["gain"][0] + p["bias"]


def sparse(p, x):
    dense = jnp.zeros((3, 3)).at[np.nonzero(MATRIX)].set(p["weight"][: np.count_nonzero(MATRIX)])
    return x @ dense + p.get("bias", 0)


def convolved(numbers, **window):
    def formula(p, x):
        y = lax.conv_general_dilated(x[None], p["kernel"], dimension_numbers=numbers, **window)[0]
        return y + p.get("bias", 0)

    return formula


def conv1d(p, x):
    kernel = p["weight"] * KERNEL_MASK
    formula = convolved(("NWC", "WIO", "NWC"), window_strides=(1,), padding="SAME")
    return formula({"kernel": kernel, "bias": p["bias"]}, x)


def conv2d(p, x):
    window = dict(window_strides=(1, 1), padding=((1, 1), (2, 0)), rhs_dilation=(1, 2))
    formula = convolved(("NCHW", "HWIO", "NCHW"), feature_group_count=2, **window)
    return formula({"kernel": p["weight"], "bias": p["bias"][0]}, x)


def conv3d(p, x):
    window = dict(window_strides=(1, 1, 1), padding=[(0, 1)] * 3)
    return convolved(("NDHWC", "DHWIO", "NDHWC"), **window)({"kernel": p["weight"]}, x)


def lora(p, x):
    return x @ p["lora_a"] @ p["lora_b"] / 2


ONE = brainstate.nn.init.Normal(1.0)
CASES = {
    "signed": Case(
        lambda: nn.SignedWLinear(3, 3, w_sign=SIGN), lambda w, x: x @ (jnp.abs(w) * SIGN)
    ),
    "scaled": Case(lambda: nn.ScaledWSLinear(3, 3, w_mask=MASK), scaled),
    "sparse_csr": Case(
        lambda: nn.SparseLinear(scipy.sparse.csr_matrix(MATRIX), b_init=ONE), sparse
    ),
    "sparse_padded": Case(lambda: nn.SparseLinear(BCOO.fromdense(MATRIX, nse=7)), sparse),
    "lora": Case(lambda: nn.LoRA(3, 2, 3), lora),
    "grouped": Case(
        lambda: nn.GroupedLinear(2, 3, 3, b_init=ONE),
        lambda p, x: jnp.einsum("gk,gkn->gn", x, p["weight"]) + p["bias"],
        (2, 3),
    ),
    "embedding": Case(lambda: nn.Embedding(4, 3), lambda w, i: w[i], (), 4),
    "padded_words": Case(
        lambda: nn.Embedding(4, (2, 2), padding_idx=1),
        lambda w, i: jnp.where((i == 1)[:, None, None], 0.0, w[i]),
        (2,),
        4,
    ),
    "conv1d": Case(lambda: nn.Conv1d((4, 2), 2, 3, b_init=ONE, w_mask=KERNEL_MASK), conv1d, (4, 2)),
    "conv2d": Case(
        lambda: nn.Conv2d(
            (2, 3, 4),
            2,
            (3, 2),
            padding=((1, 1), (2, 0)),
            rhs_dilation=(1, 2),
            groups=2,
            b_init=ONE,
            channel_first=True,
        ),
        conv2d,
        (2, 3, 4),
    ),
    "conv3d": Case(lambda: nn.Conv3d((2, 2, 3, 1), 1, 2, padding=((0, 1),)), conv3d, (2, 2, 3, 1)),
}


def randomised(module):
    """Every parameter away from its initial value: gains of one and biases of zero hide errors."""
    for state in module.states(brainstate.ParamState).values():
        state.value = jax.tree.map(lambda a: normal(*a.shape), state.value)
    return module


class Net(brainstate.nn.Module):
    """h = tanh(0.8 h + layer(x)), read out by the same kind of layer; or by several, summed."""

    def __init__(self, names, size):
        super().__init__()
        self.size = size
        self.layers = {name: CASES[name].make() for name in names}
        self.outs = {name: CASES[name].make() for name in names}

    def init_state(self, batch_size=None, **kwargs):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.full((*lead, *self.size), 0.1))

    def update(self, x):
        h = jnp.tanh(0.8 * self.h.value + sum(layer(x) for layer in self.layers.values()))
        self.h.value = h
        if jnp.issubdtype(x.dtype, jnp.integer):
            return sum(out(x) for out in self.outs.values()) * h
        return sum(out(h) for out in self.outs.values())


def step(net, x, target):
    return 0.5 * jnp.sum((net(x) - target) ** 2)


@pytest.mark.parametrize("name", CASES)
def test_layer_follows_its_formula_with_any_leading_axes(name):
    case = CASES[name]
    layer = randomised(case.make())
    x = case.draw(2, BATCH)
    formula = lambda x: case.formula(layer.weight.value, x)
    want = jax.jit(jax.vmap(jax.vmap(formula)))(x)
    one, batch, more = jax.jit(lambda x: (layer(x[0, 0]), layer(x[0]), layer(x)))(x)
    np.testing.assert_allclose(one, want[0, 0], rtol=1e-12)
    np.testing.assert_allclose(batch, want[0], rtol=1e-12)
    np.testing.assert_allclose(more, want, rtol=1e-12)
    assert want.shape[2:] == (*(case.sample if case.integers else ()), *layer.out_size)


VECTORS = ("signed", "scaled", "sparse_csr", "lora")
MODELS = [VECTORS, ("grouped",), ("padded_words",), ("conv1d",), ("conv2d",), ("conv3d",)]


@pytest.mark.parametrize("names", MODELS, ids="+".join)
def test_layer_is_learned_exactly_before_a_state_and_after_it(names):
    case = CASES[names[0]]
    xs = case.draw(T, BATCH)
    size = case.make()(xs[0, 0]).shape
    targets = normal(T, BATCH, *size)
    net = randomised(Net(names, size))

    learner = bt.compile(net, "d_rtrl", xs[0], batch_size=BATCH)
    truth = bptt_grad(net, step, xs, targets)
    assert len(truth) == 2 * len(names)
    assert all(np.abs(a).max() > 1e-3 for a in jax.tree.leaves(truth))
    assert comparison(online_grad(learner, step, xs, targets), truth).max_error < 1e-9
    assert all(p.exact for p in learner.report.parameters.values())

    mapped = bt.compile(net, "d_rtrl", xs[0], batch_size=BATCH, vmap=True)
    found = mapped.etrace_grad(
        xs, targets, step_fn=lambda x, t: step(mapped, x, t), reduction="sum"
    )
    assert comparison(dict(found), truth).max_error < 1e-9
