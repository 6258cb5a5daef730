"""A learner of a module as C, see `_online/_export.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import dotted
from .._online import Arrays
from .._online._export import Optimizing, check_alone, one_update
from ..export import ExportedC, ExportedProgram, OneUpdate, write_c, write_program
from ..frontend import leaves_of, states_of, title_of, values_of, weights_of
from ..program import PyTree
from ._checks import called_early
from ._optimizers import Optimizer, optimizer_of


class ExportMixin:
    """What a learner leaves Python with."""

    def export_c(
        self,
        x: PyTree,
        *targets: PyTree,
        loss: Callable[..., PyTree],
        optimizer: Any,
        path: str | os.PathLike,
        extra: dict[str, PyTree] | None = None,
        name: str = "learner",
        initial: str = "source",
    ) -> ExportedC:
        """Write the learner as a folder of C: network, traces, gradient and update.

        Parameters, states, traces and the optimizer's arrays are those that it has now; see
        `Online.export_c`.

        Args:
            x: an example of the input of one step; a tuple if there are several.
            *targets: examples of the targets of one step.
            loss: `loss(out, *targets)`, the loss of one step.
            optimizer: an optax transformation, or an optimizer of braintools.
            path: the folder.
            extra: examples of what the rule takes with a call, e.g. a modulator, by name.
            name: of the struct, the functions and the files.
            initial: where the values of the parameters stand: in the 'source', or in a 'file'.

        Returns:
            What was written.
        """
        me: Any = self
        update = _update(me, x, targets, loss, optimizer, extra or {})
        return write_c(update, path, name, initial)

    def export(
        self,
        x: PyTree,
        *targets: PyTree,
        loss: Callable[..., PyTree],
        optimizer: Any,
        path: str | os.PathLike,
        extra: dict[str, PyTree] | None = None,
        platforms: Sequence[str] = ("cpu",),
    ) -> ExportedProgram:
        """Write one update as a program that runs where JAX is; see `Online.export`.

        All arguments but the last are those of `export_c`.

        Args:
            platforms: what it is to run on, e.g. `("cpu", "cuda")`.

        Returns:
            What was written.
        """
        me: Any = self
        update = _update(me, x, targets, loss, optimizer, extra or {})
        return write_program(update, path, platforms)


def _update(
    learner: Any,
    x: PyTree,
    targets: tuple[PyTree, ...],
    loss: Callable[..., PyTree],
    optimizer: Any,
    extra: dict[str, PyTree],
) -> OneUpdate:
    """One update of a learner as a function of arrays."""
    if not learner.is_compiled:
        raise called_early(learner)
    inputs = x if type(x) is tuple else (x,)
    prepared = learner._prepared_own(inputs, {})
    arrays = Arrays(tuple(map(jnp.asarray, jax.tree.leaves(inputs))), extra=extra or None)
    call = learner._call(prepared, arrays, timed=False)
    values = jax.tree.leaves((call.weights.trained, call.at))
    check_alone(learner.vjp_method != "single-step", learner.placement is not None, values)
    weights = weights_of(None, learner.param_states)
    optimizing = _optimizing(optimizer_of(optimizer, weights, learner), prepared.info, weights)
    step = prepared.info.step
    names = [
        [_name(leaf.path, prepared.info.states[leaf.path]) for leaf in leaves]
        for leaves in (step.params, (*step.hidden, *step.others))
    ]
    checked = lambda out, *ys: (loss(out, *ys), None)
    about = f"{title_of(learner.model4compile)}, which learns by {learner.title}"
    told = inputs, targets, extra
    return one_update(call, checked, optimizing, (names[0], names[1]), *told, about)


def _name(path: tuple[Any, ...], state: Any) -> str:
    """A state by its path; the generator of brainstate is no attribute of a module."""
    is_generator = isinstance(state, brainstate.random.RandomState)
    return "random_key" if is_generator else dotted(path)


def _optimizing(update: Optimizer, info: Any, weights: Any) -> Optimizing:
    """An optimizer of all weights as one of the parameters of a step; others have no gradient."""
    at = {(id(info.states[p.path]), p.index): i for i, p in enumerate(info.step.params)}
    cells = [(s, i) for s in states_of(weights)[0] for i in range(len(jax.tree.leaves(s.value)))]
    places = [at.get((id(state), i)) for state, i in cells]
    now = leaves_of(weights, values_of(weights))

    def change(grads: list[Any], trained: list[Any], own: list[Any]) -> Any:
        of = lambda found: [None if i is None else found[i] for i in places]
        pairs = lambda found: zip(of(found), now, strict=True)
        full = [jnp.zeros_like(v) if g is None else g for g, v in pairs(grads)]
        before = [v if p is None else p for p, v in pairs(trained)]
        after, own = update(update.consts, full, before, own)
        new: list[Any] = list(trained)
        for i, value in zip(places, after, strict=True):
            if i is not None:
                new[i] = value
        return new, own

    names = [f"optimizer[{i}]" for i in range(len(update.own))]
    return Optimizing(change, list(update.own), names)
