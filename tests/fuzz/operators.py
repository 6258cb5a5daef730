"""The operators that random programs use: braintrace's own, or plain JAX that is to be recognised.

Inside `unmarked()` they are plain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

import braintrace as bt

marked = [True]


def _matmul(x: Any, w: Any, b: Any = None) -> Any:
    return x @ w if b is None else x @ w + b


def _conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "SAME")


PLAIN: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "einsum": jnp.einsum,
    "element_wise": lambda w, fn=lambda w: w: fn(w),
    "grouped_matmul": lambda x, w: jnp.einsum("gi,gio->go", x, w),
    "embedding": lambda i, w: jnp.take(w, i, axis=0, mode="clip"),
    "lora_matmul": lambda x, a, b, alpha: alpha * (x @ (a @ b)),
    "conv": _conv,
}


def __getattr__(name: str) -> Any:
    return PLAIN[name] if name in PLAIN and not marked[0] else getattr(bt, name)


def prepared(learner: Any) -> Any:
    """A learner, before it is compiled, that recognises plain operators if they are in use."""
    learner.unmarked = not marked[0]
    return learner


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Programs are plain JAX for as long as this lasts."""
    before, marked[0] = marked[0], False
    try:
        yield
    finally:
        marked[0] = before
