"""What a function with a derivative of its own needs: see `_run_block`.

The gradient of a learner is a value, and to differentiate it again is refused: traces say how the
states changed with the weights, not how that changes with weights and inputs, so a second
derivative would silently lack these terms.

Under `vmap` JAX adds up the cotangent of an output that is the same for all samples, before the
function's own derivative sees it. So an output must be mapped whenever anything the derivative
reads is: it gets a dependence, on no value, on all of it.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from .._errors import NotSupportedError, message
from ..program import is_inexact

_SECOND = message(
    "the gradient of a learner is differentiated once more.",
    why="it comes from traces, which are constants: they do not say how they change with the "
    "weights and the inputs, and a second derivative would lack that term",
    do="differentiate a loop over the model itself, without the learner; or keep the gradient "
    "constant with jax.lax.stop_gradient",
)


def floating_of(*trees: Any) -> list[Any]:
    """All arrays that can carry a derivative."""
    return [a for a in jax.tree.leaves(trees) if is_inexact(jnp.result_type(a))]


@jax.custom_vjp
def _with_cotangent(result: Array) -> Array:
    return result


_with_cotangent.defvjp(lambda result: (result, None), lambda _, cotangent: (cotangent,))


def with_all_cotangents(results: Any) -> Any:
    """`results`, whose cotangents are arrays also where nothing was differentiated.

    JAX cannot transpose a scan with a stacked result that has the symbolic zero as its cotangent:
    the states after a sequence that only another call of the learner reads. Each result is on its
    own, so that what computes one that nobody reads is left out of the reverse pass: its cotangent
    of zero might meet an infinite derivative.
    """
    return jax.tree.map(_with_cotangent, results)


@jax.custom_vjp
def reaching(results: Any, others: Any) -> Any:
    """`results`, whose reverse pass runs that of `others` too, with zeros as cotangents."""
    return results


reaching.defvjp(
    lambda results, others: (results, others),
    lambda others, cotangents: (cotangents, jax.tree.map(jnp.zeros_like, others)),
)


@jax.custom_jvp
def with_derivative(values: Any, others: Any) -> Any:
    """`values`, with the derivative of `others`, which are the same, besides their own."""
    return values


@with_derivative.defjvp
def _(primals: Any, tangents: Any) -> Any:
    add = lambda a, b: a if a.dtype == jax.dtypes.float0 else a + b
    return primals[0], jax.tree.map(add, *tangents)


@jax.custom_jvp
def once(cotangents: Any, live: list[Any]) -> Any:
    """`cotangents` of a reverse pass; to differentiate them by `live`, its inputs, is an error."""
    return cotangents


def _pushed(primals: Any, tangents: Any) -> Any:
    moved, live = tangents
    if any(not isinstance(t, SymbolicZero) for t in live):
        raise NotSupportedError(_SECOND)
    zero = lambda a, t: jnp.zeros_like(a) if isinstance(t, SymbolicZero) else t
    return primals[0], jax.tree.map(zero, primals[0], moved)


once.defjvp(_pushed, symbolic_zeros=True)


def depending_on(value: Any, *others: Any) -> Any:
    """`value`, formally depending on every array in `others`."""
    flags = [_flag(leaf) for leaf in jax.tree.leaves(others) if jnp.size(leaf)]
    if not flags:
        return value
    flag = lax.stop_gradient(reduce(lax.bitwise_or, flags))
    return jax.tree.map(lambda v: lax.select(lax.broadcast(flag, jnp.shape(v)), v, v), value)


def _flag(leaf: Any) -> Any:
    """A boolean that depends on an array, in few equations: there is one for each array."""
    if jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    # Its first entry as a boolean. XLA removes it again: both sides of the `select` are the value.
    axes = range(jnp.ndim(leaf))
    first = lax.slice(leaf, [0 for _ in axes], [1 for _ in axes])
    if jnp.iscomplexobj(first):
        first = lax.real(first)  # a cast of the number itself would warn
    return lax.convert_element_type(lax.reshape(first, ()), bool)
