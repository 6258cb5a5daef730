import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.ops import element_wise


def test_element_wise_has_two_spellings():
    w = jnp.arange(3.0)
    np.testing.assert_allclose(element_wise(w, jnp.exp), element_wise(w, weight_fn=jnp.exp))
    with pytest.raises(TypeError, match="names"):
        element_wise(w, jnp.exp, weight_fn=jnp.exp)


def test_element_wise_names_the_hook_that_gives_no_array():
    with pytest.raises(TypeError, match=r"fn\(weight\).*list"):
        element_wise(jnp.ones(2), list)
