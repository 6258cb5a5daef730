import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.ops import embedding
from braintrace.ops._embedding import etp_emb

TABLE = jnp.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    "indices, weight, error, text",
    [
        (jnp.ones(2), TABLE, TypeError, "indices are float64"),
        ([0, 1], TABLE, TypeError, "indices has type list"),
        (jnp.zeros((2, 2), int), TABLE, NotImplementedError, r"indices \(2, 2\) has 2 axes"),
        (0, TABLE[0], ValueError, r"weight \(3,\) has 1 axes"),
        (jnp.array([1, 4]), TABLE, ValueError, "index 4 is outside the table's 4 rows"),
        (-1, TABLE, ValueError, "index -1 is outside"),
    ],
)
def test_embedding_refuses_what_is_no_row(indices, weight, error, text):
    with pytest.raises(error, match="embedding: " + text):
        embedding(indices, weight)


def test_embedding_clips_inside_jit_and_its_one_hot_agrees():
    indices = jnp.array([-3, 9, 1])
    out = jax.jit(embedding)(indices, TABLE)
    np.testing.assert_allclose(out, TABLE[jnp.array([0, 3, 1])])
    one_hot = etp_emb.rules.represent(indices, {"weight": TABLE})
    np.testing.assert_allclose(one_hot @ TABLE, out)


def test_embedding_takes_every_integer_type_and_a_hook():
    out = embedding(np.array([2, 0], np.uint8), TABLE, weight_fn=jnp.square)
    np.testing.assert_allclose(out, TABLE[np.array([2, 0])] ** 2)
