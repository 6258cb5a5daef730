"""Gradients by finite differences: no derivative rule of JAX or of the library takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import value_error
from ._sequence import (
    Grads,
    Module,
    Path,
    PyTree,
    StepFn,
    Weights,
    check,
    parameters,
    restored,
    total_loss,
)


def finite_difference_grad(
    model: Module,
    step_fn: StepFn,
    *sequences: PyTree,
    weights: Weights = None,
    reduction: str = "sum",
    eps: float = 1e-5,
    entries: Mapping[Path, Iterable[int]] | None = None,
) -> Grads:
    """Differentiate the loss of a sequence by central differences in float64.

    It is the derivative of the function as computed: a spike's surrogate derivative is not seen.
    Other arguments are those of `bptt_grad`.

    Args:
        eps: half the distance of the two points.
        entries: per path the entries to evaluate, flat and counted through the parameter's
            leaves; the others are NaN. Default all.

    Returns:
        Gradients by path; of a complex entry dL/d(re) - i dL/d(im), as JAX has it.
    """
    check(model, step_fn, sequences, reduction)
    states = parameters(model, weights)
    if entries is not None and (unknown := set(entries) - set(states)):
        raise value_error(
            f"entries of unknown parameters {sorted(unknown, key=str)}.",
            why=f"the parameters are {sorted(states, key=str)}",
            do="name them by their path in the model",
        )
    with jax.enable_x64(True), restored(model):
        model_states = dict(brainstate.graph.states(model).items())
        for state in model_states.values():
            state.value = jax.tree.map(_double, state.value)
        doubled = jax.tree.map(_double, sequences)
        start = {path: s.value for path, s in model_states.items()}

        loss = total_loss(model, step_fn, doubled, reduction)
        total: Any = brainstate.transform.jit(loss)

        def at(path: Path, value: PyTree) -> float:
            with restored(model):
                for p, s in model_states.items():
                    s.value = value if p == path else start[p]
                return float(total())

        grads = {}
        for path, state in states.items():
            own = None if entries is None else set(entries.get(path, ()))
            grads[path] = of_parameter(partial(at, path), state.value, eps, own)
        return grads


def of_parameter(
    loss: Callable[[PyTree], float], value: PyTree, eps: float, entries: set[int] | None
) -> PyTree:
    leaves, tree = jax.tree.flatten(value)
    out, count = [], 0

    def at(k: int, i: int, by: complex) -> float:
        moved = [*leaves[:k], _moved(leaves[k], i, by), *leaves[k + 1 :]]
        return loss(jax.tree.unflatten(tree, moved))

    for k, leaf in enumerate(leaves):
        grad = np.full(leaf.shape, np.nan, leaf.dtype)
        directions = (1.0, 1j) if np.iscomplexobj(leaf) else (1.0,)
        for i in range(leaf.size):
            if entries is None or count + i in entries:
                slopes = [(at(k, i, d * eps) - at(k, i, -d * eps)) / (2 * eps) for d in directions]
                grad.flat[i] = np.vdot(directions, slopes)
        count += leaf.size
        out.append(jnp.asarray(grad))
    return jax.tree.unflatten(tree, out)


def _moved(leaf: jax.Array, i: int, by: complex) -> jax.Array:
    array = np.array(leaf)
    array.flat[i] += by
    return jnp.asarray(array)


def _double(leaf: jax.Array) -> jax.Array:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(leaf, jnp.complex128)
    return jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(dtype, jnp.floating) else leaf
