import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace as bt
from braintrace.nn import Embedding
from braintrace.verify._compare import comparison
from gradients import bptt_grad, online_grad

INDICES = jnp.array([[0, 3], [1, 1], [1, 2]])
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))


class Leaky(brainstate.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = Embedding(4, 3, TABLE, **options)
        self.scale = brainstate.ParamState(jnp.full(3, 0.7))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, i):
        drive = bt.element_wise(self.scale.value) * self.table(i)
        self.h.value = jnp.tanh(0.8 * self.h.value + drive)
        return self.h.value


def step(net, i):
    return jnp.sum(net(i) ** 3)


def test_padding_row_is_zero_and_gets_no_gradient():
    net = Leaky(padding_idx=1)
    assert not net.table.weight.value[1].any()
    net.table.weight.value = TABLE  # an optimizer with momentum may move the stored row
    np.testing.assert_array_equal(net.table(jnp.array([1, 2])), [[0, 0, 0], TABLE[2]])
    learner = bt.compile(net, "rtrl", INDICES[0], batch_size=2)
    truth = bptt_grad(net, step, INDICES)
    assert not truth["table", "weight"][1].any() and truth["table", "weight"][0].all()
    assert comparison(online_grad(learner, step, INDICES), truth).max_error < 1e-9


def test_frozen_table_is_no_parameter():
    net = Leaky(freeze=True)
    np.testing.assert_array_equal(net.table.weight.value, TABLE)
    assert list(net.states(brainstate.ParamState)) == [("scale",)]
    learner = bt.compile(net, "d_rtrl", INDICES[0], batch_size=2)
    truth = bptt_grad(net, step, INDICES)
    assert set(truth) == {("scale",)} and truth["scale",].all()
    assert comparison(online_grad(learner, step, INDICES), truth).max_error < 1e-9


def test_embedding_takes_one_index_or_any_array_of_them():
    layer = Embedding(5, (2, 3), padding_idx=0)
    assert layer.out_size == (2, 3) and layer.weight.value.shape == (5, 2, 3)
    assert layer(3).shape == (2, 3)
    indices = np.arange(12).reshape(2, 2, 3) % 5
    np.testing.assert_array_equal(layer(indices), layer.weight.value[indices])


def test_embedding_keeps_the_unit_of_its_table():
    layer = Embedding(4, 3, TABLE * u.mV, padding_idx=1)
    rows = layer(jnp.array([[1, 2]]))
    assert u.get_unit(rows) == u.mV
    np.testing.assert_array_equal(rows.mantissa, [[np.zeros(3), TABLE[2]]])


def test_embedding_refuses_what_is_no_index():
    with pytest.raises(TypeError, match="indices are float64"):
        Embedding(4, 3)(jnp.ones(2))
    with pytest.raises(ValueError, match="index 4"):
        Embedding(4, 3)(jnp.array([[0, 4]]))


@pytest.mark.parametrize(
    "error, match, options",
    [
        (NotImplementedError, r"max_norm=1\.0 is not supported", dict(max_norm=1.0)),
        (NotImplementedError, "scale_grad_by_freq=True", dict(scale_grad_by_freq=True)),
        (ValueError, "padding_idx 4 is outside the table's 4 rows", dict(padding_idx=4)),
        (ValueError, "padding_idx -1 is outside", dict(padding_idx=-1)),
        (ValueError, r"embedding_init has the shape \(3, 3\)", dict(embedding_init=jnp.eye(3))),
    ],
)
def test_embedding_refuses(error, match, options):
    with pytest.raises(error, match=match) as info:
        Embedding(4, 3, **options)
    assert "why:" in str(info.value) and "do:" in str(info.value)


def test_advice_on_long_rows_works():
    layer = Embedding(4, 3, 2.0)
    norms = jnp.linalg.norm(layer.weight.value, axis=1, keepdims=True)
    layer.weight.value = layer.weight.value * jnp.minimum(1, 1.5 / norms)
    np.testing.assert_allclose(jnp.linalg.norm(layer(jnp.arange(4)), axis=1), 1.5)


def test_a_table_that_exists_is_taken_as_it_is():
    layer = Embedding.from_pretrained(TABLE, padding_idx=1, name="words")
    np.testing.assert_array_equal(layer(jnp.array([0, 1])), [TABLE[0], jnp.zeros(3)])
    assert layer.freeze and not layer.states(brainstate.ParamState) and layer.name == "words"
    trained = Embedding.from_pretrained(TABLE.reshape(2, 2, 3) * u.mV, freeze=False)
    assert isinstance(trained.weight, brainstate.ParamState) and trained.out_size == (2, 3)
    np.testing.assert_array_equal(u.get_mantissa(trained(jnp.array(1))), TABLE[2:])
    with pytest.raises(ValueError, match="two axes or more"):
        Embedding.from_pretrained(TABLE[0])
