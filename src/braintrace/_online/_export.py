"""One update of a learner as a function of arrays alone: what can leave Python.

It is a step, its gradient and the optimizer's update, as `train` with `update_every=1` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._errors import dotted, not_supported
from ..export import Leaf, OneUpdate, Role
from ..program import PyTree, any_traced, like, words_of
from ._calls import Call
from ._checks import checked_loss
from ._loop import Position, Stream, Weights, block_gradient
from ._sequence import Arrays, PlanBody
from ._tree import UNNAMED, path_of

Array = jax.Array
# (grads, trained, own arrays) -> (trained, own arrays)
Change = Callable[[list[Array], list[Array], list[Array]], tuple[list[Array], list[Array]]]


@dataclass(frozen=True, eq=False, slots=True)
class Optimizing:
    """The optimizer of an update: what it does, its own arrays and their paths."""

    change: Change
    own: list[Array]
    paths: list[str]


def one_update(
    call: Call,
    loss: Callable[..., PyTree],
    optimizing: Optimizing,
    names: tuple[Sequence[str], Sequence[str]],
    inputs: PyTree,
    targets: tuple[PyTree, ...],
    about: str,
) -> OneUpdate:
    """The update of an analysed step.

    Args:
        call: one step with its present arrays.
        loss: that of the user, `loss(out, *targets)`.
        optimizing: what turns gradients into new parameters.
        names: paths of the trained parameters, and of the states.
        inputs: an example of the inputs of a step, as the user has them.
        targets: of what the loss is told.
        about: one line on what it is.
    """
    plan, at, fixed = call.plan, call.at, call.weights
    _check_alone(call)
    targets, extra = jax.tree.map(np.asarray, (targets, call.stream.arrays.extra or {}))
    checked = checked_loss(loss, False)
    body = PlanBody(plan, lambda out, *ys: (checked(out, *ys)[0], out), None, targets)
    kept = (list(fixed.trained), optimizing.own, at.states, at.traces, at.count)
    told = (list(jax.tree.leaves(inputs)), targets, extra)

    def update(*words: Array) -> list[Array]:
        flat = [like(a, before) for a, before in zip(words, arrays, strict=True)]
        (trained, own, states, traces, count), (xs, ys, more) = jax.tree.unflatten(tree, flat)
        weights = Weights(trained, fixed.fixed, fixed.consts, fixed.of_rule)
        lead = lambda tree: jax.tree.map(lambda a: a[None], tree)
        stream = Stream(Arrays(tuple(lead(xs)), lead(ys), lead(more) or None))
        position = Position(states, traces, count)
        grads, new, (losses, outs) = block_gradient(
            body, body.record, weights, position, stream, True, None, None
        )
        trained, own = optimizing.change(grads, trained, own)
        after = jax.tree.leaves((trained, own, new.states, new.traces, new.count))
        results = [*(o[0] for o in jax.tree.leaves(outs)), losses[0], *after]
        return [words_of(a) for a in results]

    arrays, tree = jax.tree.flatten((kept, told))
    params, states = names
    of_kept = [
        *((p, Role.PARAMETER) for p in params),
        *((p, Role.OPTIMIZER) for p in optimizing.paths),
        *((p, Role.CARRY) for p in states),
        *((f"trace[{k}]", Role.CARRY) for k in range(len(jax.tree.leaves(at.traces)))),
        ("steps", Role.CARRY),
    ]
    of_told = [(p, Role.INPUT) for p in paths_of(inputs, "x")]
    of_told += [(p, Role.TARGET) for p in paths_of(targets, "target")]
    of_told += [(p, Role.TARGET) for p in paths_of(extra, "")]
    pairs = zip([*of_kept, *of_told], arrays, strict=True)
    leaves = tuple(Leaf(path, role, words_of(value)) for (path, role), value in pairs)
    outs = jax.tree.unflatten(plan.out_tree, range(plan.out_tree.num_leaves))
    return OneUpdate(update, leaves, tuple(paths_of(outs, "out")), about)


def optimizing_tree(
    optimizer: Any, own: PyTree, tree: Callable[[Sequence[Any]], PyTree]
) -> Optimizing:
    """An optax transformation, on lists of arrays; `tree` makes its pytrees of them."""
    arrays, structure = jax.tree.flatten(own)

    def change(grads: list[Array], trained: list[Array], own: list[Array]) -> Any:
        before = jax.tree.unflatten(structure, own)
        updates, after = optimizer.update(tree(grads), before, tree(trained))
        pairs = zip(trained, jax.tree.leaves(updates), strict=True)
        return [(p + u).astype(p.dtype) for p, u in pairs], jax.tree.leaves(after)

    return Optimizing(change, arrays, paths_of(own, "optimizer"))


def _check_alone(call: Call) -> None:
    """Refuse what has no single device that takes single steps."""
    if call.plan.windows:
        raise not_supported(
            "a learner with a window cannot be exported.",
            why="what is exported learns from every step when it is over, and a window learns from "
            "several at once",
            do="make the learner without window, by compile with vjp_method='single-step'",
        )
    if call.plan.placement is not None:
        raise not_supported(
            "a learner on a mesh of devices cannot be exported.",
            why="what is exported runs on one device",
            do="make the learner without mesh, and pass it the same parameters",
        )
    if any_traced(call.weights.trained, call.at):
        raise not_supported(
            "a learner cannot be exported inside of jit or another transformation.",
            why="its parameters have no values there",
            do="call export where they have",
        )


def paths_of(tree: PyTree, name: str) -> list[str]:
    """Paths of leaves; a tree that is one leaf, or a tuple of one, has the name alone."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    if len(found) == 1 and name:
        return [name]
    named = lambda keys: [key for key in keys if key is not UNNAMED]
    paths = [dotted(path_of(named(keys), name)) for keys, _ in found]
    return [p if p.startswith(name) else f"{name}.{p}" for p in paths]
