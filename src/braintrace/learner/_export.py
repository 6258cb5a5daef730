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
from .._online._export import Optimizing, one_update
from ..export import ExportedC, ExportedProgram, OneUpdate, write_c, write_program
from ..frontend import title_of
from ..program import PyTree
from ._checks import not_compiled
from ._optimizers import Optimizer, optimizer_of
from ._weights import Differentiated, WeightTree


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
        update = _update(self, x, targets, loss, optimizer, extra or {})
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
        update = _update(self, x, targets, loss, optimizer, extra or {})
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
        raise not_compiled(f"{learner.title} is exported")
    inputs = x if type(x) is tuple else (x,)
    prepared = learner._prepared_own(inputs, {})
    arrays = Arrays(tuple(map(jnp.asarray, jax.tree.leaves(inputs))), extra=extra or None)
    call = learner._call(prepared, arrays)
    weights = WeightTree.of(None, learner.param_states)
    of = Differentiated.of(weights, prepared.info)
    optimizing = _optimizing(optimizer_of(optimizer, weights, learner), of)
    step = prepared.info.step
    names = [
        [_name(leaf.path, prepared.info.states[leaf.path]) for leaf in leaves]
        for leaves in (step.params, (*step.hidden, *step.others))
    ]
    about = f"{title_of(learner.model4compile)}, which learns by {learner.title}"
    return one_update(call, loss, optimizing, (names[0], names[1]), inputs, targets, about)


def _name(path: tuple[Any, ...], state: Any) -> str:
    """A state by its path; the generator of brainstate is no attribute of a module."""
    is_generator = isinstance(state, brainstate.random.RandomState)
    return "random_key" if is_generator else dotted(path)


def _optimizing(update: Optimizer, of: Differentiated) -> Optimizing:
    """An optimizer of all weights as one of the parameters of a step; others have no gradient."""
    unused = of.unused()

    def change(grads: list[Any], trained: list[Any], own: list[Any]) -> Any:
        full, before = of.gradients([grads[i] for i in of.wanted]), of.leaves(trained, unused)
        after, own = update(update.consts, full, before, own)
        return of.placed(after, trained)[0], own

    names = [f"optimizer[{i}]" for i in range(len(update.own))]
    return Optimizing(change, list(update.own), names)
