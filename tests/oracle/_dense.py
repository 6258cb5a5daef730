"""The derivatives of all steps of a sequence, recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from braintrace._errors import dotted, message
from braintrace.verify._sequence import Path, StepFn, at, unvector, vector

from ._bound import Bound, Feedback
from ._observe import DenseStep, at_exits, elements, observe
from ._structure import Structure
from ._together import readers, together


@dataclass(frozen=True, eq=False, slots=True)
class Dense:
    """The derivatives of all steps of a sequence, and how to read its vectors."""

    structure: Structure
    steps: tuple[DenseStep, ...]
    at_exits: Callable[[tuple[frozenset[int], ...]], list[tuple[np.ndarray, np.ndarray]]]
    """Per step dL/dh' and dL/dh beside it for other sets of states, nothing cut."""

    @property
    def groups(self) -> tuple[tuple[Path, ...], ...]:
        """The paths of the states of every group."""
        step = self.structure
        return tuple(tuple(step.hidden[k].path for k in g) for g in step.groups)

    def slots(self, n: int) -> list[np.ndarray]:
        """SnAp's pattern, per steady operator (states, y), both as real vectors."""
        step = self.structure
        rows = elements([s.entry for s in step.hidden])
        pairs = zip(step.slots(n), step.steady, strict=True)
        return [found[np.ix_(rows, elements([o.y]))] for found, o in pairs]

    def by_path(self, gradient: np.ndarray) -> dict[Path, Any]:
        """A gradient vector as arrays by path, complex ones as dL/d(re) - i dL/d(im)."""
        step = self.structure
        arrays = unvector(jnp.asarray(gradient), [s.value for s in step.params])
        found: dict[Path, list[Any]] = {}
        for slot, array in zip(step.params, arrays, strict=True):
            array = jnp.conj(array) if slot.entry.is_complex else array
            found.setdefault(slot.path, []).append(array)
        return {
            path: jax.tree.unflatten(jax.tree.structure(state.value), found[path])
            if path in found
            else jax.tree.map(jnp.zeros_like, state.value)
            for path, state in step.states.items()
        }


def dense(
    model: brainstate.nn.Module,
    step_fn: StepFn,
    *sequences: Any,
    feedback: Mapping[Any, Any] | None = None,
    folds: bool = True,
) -> Dense:
    """Run the model from its present states; the model is left as it was.

    `folds`: whether weights with a factor that varies are traced, as rules per weight do.
    `feedback`: what takes the place of a weight in the derivative by its operator's input, by the
    path of the weight or the operator's number in the step.
    """
    step = Structure.of(model, step_fn, at(sequences, 0), folds)
    sets, bound = together(step), Bound(step, _resolved(step, feedback or {}))
    one = jax.jit(lambda *a: observe(step, sets, bound, *a))
    h, others = vector([s.value for s in step.hidden]), [s.value for s in step.others]
    length = len(jax.tree.leaves(sequences)[0])
    steps, starts = [], []
    for t in range(length):
        starts.append((h, others, jax.tree.leaves(at(sequences, t))))
        found, h, others = one(*starts[-1])
        steps.append(jax.tree.map(np.asarray, found))

    @cache
    def exits(sets: tuple[frozenset[int], ...]) -> list[Any]:
        uncut = [()] * len(sets)
        found = jax.jit(lambda *a: at_exits(step, sets, uncut, bound, *a))
        return [jax.tree.map(np.asarray, found(*start)) for start in starts]

    return Dense(step, tuple(DenseStep(**s) for s in steps), exits)


def _resolved(step: Structure, feedback: Mapping[Any, Any]) -> Feedback:
    """Per operator which operand is replaced by what."""
    out = {}
    for key, operand in feedback.items():
        if isinstance(key, (int, np.integer)):
            found = list(step.operators[key : key + 1])
        else:
            found = readers(step, key)
        if not found:
            name = key if isinstance(key, (int, np.integer)) else dotted(key)
            raise ValueError(
                message(
                    f"feedback for {name}: there is no such operator.",
                    why=f"the step has {len(step.operators)} trained operators",
                    do="give the path of a weight that an operator reads, or the operator's number",
                )
            )
        parts = operand if isinstance(operand, (tuple, list)) else (operand,)
        for o in found:
            places = zip(o.trained, parts, strict=False)
            out[o.equation] = {i: jnp.asarray(part) for i, part in places}
    return out
