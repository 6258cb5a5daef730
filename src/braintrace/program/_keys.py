"""Random keys as numbers, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._records import Array


def is_key(dtype: Any) -> bool:
    """Whether a type is that of random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def words_of(a: Any) -> Any:
    """An array that can be stored as numbers: keys by their words."""
    return jax.random.key_data(a) if is_key(jnp.result_type(a)) else a


def like(words: Array, a: Any) -> Array:
    """The array that numbers were made of: keys, where `a` is keys."""
    if not is_key(jnp.result_type(a)):
        return words
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(a))
