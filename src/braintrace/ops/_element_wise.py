"""A trained array that acts directly on the state, with no input: `y = fn(w)`."""

from __future__ import annotations

from ._operator import ETPPrimitive
from ._units import AnyArray, Hook, UnitArray, attach, hooked

etp_elemwise = ETPPrimitive("etp_elemwise", lambda weight: weight, x_invar_index=None)


def element_wise(weight: AnyArray, fn: Hook = None, *, weight_fn: Hook = None) -> UnitArray:
    """Mark a parameter that acts element by element (a time constant, a bias) as trained online.

    Args:
        weight: the parameter, of any shape.
        fn: differentiable function of it without its unit, identity by default.
        weight_fn: another spelling of `fn`.

    Returns:
        `fn(weight)`, in the unit of the weight.

    Raises:
        TypeError: if both spellings are used.

    Example:
        >>> import jax, jax.numpy as jnp, braintrace
        >>> float(braintrace.element_wise(jnp.zeros(()), jax.nn.sigmoid))
        0.5
    """
    if fn is not None and weight_fn is not None:
        raise TypeError("element_wise: fn and weight_fn are two names of one function; pass one.")
    name = "fn" if fn is not None else "weight_fn"
    w = hooked("element_wise", "weight", weight, name, fn if fn is not None else weight_fn)
    return attach(etp_elemwise.bind(w.value), w.unit)
