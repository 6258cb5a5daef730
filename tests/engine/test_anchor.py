"""Values that formally depend on others."""

import warnings

import jax
import jax.numpy as jnp

from braintrace.engine._anchor import depending_on


def test_any_array_may_be_depended_on_without_a_warning():
    others = [jnp.ones((2, 3), t) for t in (complex, float, int, bool)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = str(jax.make_jaxpr(depending_on)(jnp.ones(2), *others, jax.random.key(0)))
    assert text.count("slice") == 5
