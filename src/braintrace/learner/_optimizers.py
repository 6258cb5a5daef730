"""Optimizers as programs: gradients, weights and the optimizer's own arrays to new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax

from .._errors import type_error, value_error, warn
from ..program import Program, any_traced, evaluate, trace
from ._weights import WeightTree

Array = jax.Array


@dataclass(frozen=True, eq=False, slots=True)
class Optimizer:
    """One update of some weights.

    `program` takes (gradients, weights, own arrays), flat, to (weights, own arrays); `own` are the
    optimizer's arrays now, `write` stores new ones.
    """

    program: Program
    consts: tuple[Array, ...]
    own: list[Array]
    write: Callable[[Sequence[Array]], None]

    def __call__(
        self, consts: Sequence[Array], grads: list[Array], weights: list[Array], own: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """New weights and own arrays."""
        out = evaluate(self.program, consts, [*grads, *weights, *own])
        return out[: len(weights)], out[len(weights) :]


def optimizer_of(optimizer: Any, weights: WeightTree, memory: Any) -> Optimizer:
    """Make either kind of optimizer a program.

    Args:
        optimizer: an optax gradient transformation, or an optimizer of braintools.
        weights: the states to update.
        memory: stores the `optimizer_state` of an optax transformation, and of which.

    Raises:
        TypeError: it is neither.
    """
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return _transformation(optimizer, weights, memory)
    if callable(getattr(optimizer, "register_trainable_weights", None)):
        return _stateful(optimizer, weights)
    raise type_error(
        f"optimizer has type {type(optimizer).__name__}.",
        why="it must turn gradients into updates of the weights",
        do="pass an optax transformation such as optax.adam(1e-3), or an optimizer of braintools",
    )


def _transformation(optimizer: Any, weights: WeightTree, memory: Any) -> Optimizer:
    params = weights.values()
    init = lambda params: optimizer.init(params)  # JAX caches per function, and every call anew
    shape: Any = jax.tree.structure(jax.eval_shape(init, params))
    state, of = memory.optimizer_state, (optimizer, [id(s) for s in weights.states])
    reused = state is not None and memory.optimizer is optimizer and memory.optimized == of[1]
    if reused and memory.replaced < 2:
        memory.replaced = 0
    if shape.num_leaves == 0:  # nothing to store
        state = None
    elif not reused or jax.tree.structure(state.value) != shape:
        if any_traced(params):
            raise value_error(
                "the optimizer has no state yet, and this is inside of a transformation.",
                why="a state that appears while jit traces is lost when it ends",
                do="call learner.init_optimizer(optimizer) before, outside of jit",
            )
        if state is not None and memory.optimized == of[1]:
            _replaced(memory)
        state = brainstate.LongTermState(optimizer.init(params))
        memory.optimizer, memory.optimized = of
        memory.optimizer_state = state
    own, tree = ([], shape) if state is None else jax.tree.flatten(state.value)
    leaves = weights.arrays()
    n = len(leaves)

    def update(*flat):
        grads, params = (weights.tree(flat[i * n : i * n + n]) for i in (0, 1))
        changes, new = optimizer.update(grads, jax.tree.unflatten(tree, flat[2 * n :]), params)
        moved = jax.tree.map(lambda p, c: (p + c).astype(p.dtype), params, changes)
        return [*weights.leaves(moved), *jax.tree.leaves(new)]

    def write(arrays: Sequence[Array]) -> None:
        if state is not None:
            state.value = jax.tree.unflatten(tree, list(arrays))

    program, consts = trace(update, *leaves, *leaves, *own)
    return Optimizer(program, consts, own, write)


def _replaced(memory: Any) -> None:
    """Warn the second time in a row that an optimizer takes the place of another."""
    memory.replaced += 1
    if memory.replaced == 2:
        warn(
            "every call of etrace_train has another optimizer.",
            why="its state, moments and counts, starts anew with each of them",
            do="make it once, optimizer = optax.adam(1e-3), and pass that to every call; to start "
            "anew on purpose, call learner.init_optimizer(optimizer)",
        )


def _stateful(optimizer: Any, weights: WeightTree) -> Optimizer:
    states = weights.states
    if not getattr(optimizer, "param_states", None):
        optimizer.register_trainable_weights(weights.joined(states))
    grads = weights.values()
    stateful = brainstate.transform.StatefulFunction(optimizer.update, return_only_write=False)
    touched, updated = stateful.get_states(grads), {id(s) for s in states}
    if not updated <= {id(s) for s in touched}:
        raise value_error(
            "the optimizer does not update all these weights.",
            why="it was registered with other weights",
            do="register it with learner.param_states, or pass weights=...",
        )
    own = [s for s in touched if id(s) not in updated]
    leaves, tree = jax.tree.flatten([s.value for s in own])
    n = len(weights.arrays())

    def update(*flat):
        grads, params = (weights.tree(flat[i * n : i * n + n]) for i in (0, 1))
        values = dict(zip(map(id, own), jax.tree.unflatten(tree, flat[2 * n :]), strict=True))
        values |= dict(zip(map(id, states), weights.parts(params), strict=True))
        new, _ = stateful.jaxpr_call([values[id(s)] for s in touched], grads)
        after = dict(zip(map(id, touched), new, strict=True))
        moved = [a for s in states for a in jax.tree.leaves(after[id(s)])]
        return [*moved, *jax.tree.leaves([after[id(s)] for s in own])]

    def write(arrays: Sequence[Array]) -> None:
        for state, value in zip(own, jax.tree.unflatten(tree, list(arrays)), strict=True):
            state.value = value

    flat = weights.arrays()
    program, consts = trace(update, *flat, *flat, *leaves)
    return Optimizer(program, consts, leaves, write)
