"""RTRL along random paths, from dense Jacobians of a step in float64.

    E_t = K_t E_{t-1} + dF/dp,   g_t = dL_t/dp + dL_t/dh_{t-1} E_{t-1}

K is dF/dh with zeros: row by row it keeps the columns of the same unit, and of the other columns
that are not zero the k whose random numbers are the largest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


def kept_paths(A, units, k, draw):
    """K from the dense Jacobian A."""
    K = np.zeros_like(A)
    for i, row in enumerate(A):
        own = [j for j in range(len(row)) if units[j] == units[i]]
        others = [j for j in range(len(row)) if units[j] != units[i] and row[j] != 0]
        others.sort(key=lambda j: -draw[i, j])
        for j in own + others[:k]:
            K[i, j] = row[j]
    return K


def random_paths_grad(step, params, state, xs, ys, loss, units, k, key):
    """The gradient of the sum of `loss(out, y)`; `units` numbers the elements of the flat state."""
    p, unflatten = ravel_pytree(params)
    h, unflatten_state = ravel_pytree(state)
    flat = lambda p, h, x: ravel_pytree(step(unflatten(p), unflatten_state(h), x)[0])[0]
    value = lambda p, h, x, y: loss(step(unflatten(p), unflatten_state(h), x)[1], y)
    draw = np.asarray(jax.random.uniform(key, (h.size, h.size), h.dtype))
    E, total = np.zeros((h.size, p.size)), np.zeros(p.size)
    for x, y in zip(xs, ys, strict=True):
        of_p, of_h = (np.asarray(g) for g in jax.grad(value, (0, 1))(p, h, x, y))
        total += of_p + of_h @ E
        A, B = (np.asarray(J) for J in jax.jacfwd(flat, (1, 0))(p, h, x))
        E = kept_paths(A, units, k, draw) @ E + B
        h = flat(p, h, x)
    return unflatten(jnp.asarray(total))
