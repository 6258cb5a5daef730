"""Signs and masks that weights keep: the last transformation of a chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import value_error

Tree = Any


def keep_signs(signs: Tree = None) -> Any:
    """Weights that reach zero stop there, and weights of zero stay: Dale's law through training.

    Put it last in a chain: it changes updates so that `params + updates` has no other sign. What
    has stopped at zero comes back on its own side.

    Args:
        signs: a tree like the parameters, of 1, -1, and 0 for weights that stay zero; None takes
            those of the parameters at `init`.

    Example:
        >>> import jax.numpy as jnp, optax, braintrace
        >>> optimizer = optax.chain(optax.sgd(1.0), braintrace.wiring.keep_signs())
        >>> w = jnp.array([0.5, -0.5, 0.0])
        >>> updates, _ = optimizer.update(jnp.ones(3), optimizer.init(w), w)
        >>> optax.apply_updates(w, updates)
        Array([ 0. , -1.5,  0. ], dtype=float32)
    """

    def init(params: Tree) -> Tree:
        return jax.tree.map(jnp.sign, params if signs is None else signs)

    def update(updates: Tree, state: Tree, params: Tree = None, **_: Any) -> tuple[Tree, Tree]:
        _check(params, "keep_signs")

        def one(u: Any, sign: Any, w: Any) -> Any:
            return jnp.where(sign * (w + u) > 0, u, -w).astype(u.dtype)

        return jax.tree.map(one, updates, state, params), state

    return _transformation(init, update)


def keep_mask(mask: Tree) -> Any:
    """Weights outside of a mask get no update.

    Args:
        mask: a tree like the parameters, true where a weight learns.
    """

    def update(updates: Tree, state: Tree, params: Tree = None, **_: Any) -> tuple[Tree, Tree]:
        return jax.tree.map(lambda u, m: jnp.where(m, u, 0).astype(u.dtype), updates, mask), state

    return _transformation(lambda params: (), update)


def _check(params: Tree, name: str) -> None:
    if params is None:
        raise value_error(
            f"{name} without the parameters.",
            why="what an update may be depends on the weight it is added to",
            do="pass them: optimizer.update(grads, state, params)",
        )


def _transformation(init: Any, update: Any) -> Any:
    import optax  # an extra, needed where a transformation is made

    return optax.GradientTransformationExtraArgs(init, update)
