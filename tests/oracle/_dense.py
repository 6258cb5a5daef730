"""The derivatives of all steps of a sequence, recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from braintrace.program import Equation
from braintrace.verify._sequence import Path, StepFn, at, unvector, vector
from interpret import program

from ._derivatives import DenseStep, at_exits, derivatives, elements
from ._sharing import group_of, readers, sharing
from ._structure import Structure
from ._variants import Feedback, Variants


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
        rows = elements([leaf.entry for leaf in step.hidden])
        pairs = zip(step.slots(n), step.steady, strict=True)
        return [pattern[np.ix_(rows, elements([o.y]))] for pattern, o in pairs]

    def by_path(self, gradient: np.ndarray) -> dict[Path, Any]:
        """A gradient vector as arrays by path, complex ones as dL/d(re) - i dL/d(im)."""
        step = self.structure
        arrays = unvector(jnp.asarray(gradient), [leaf.value for leaf in step.params])
        leaves: dict[Path, list[Any]] = {}
        for leaf, array in zip(step.params, arrays, strict=True):
            array = jnp.conj(array) if leaf.entry.is_complex else array
            leaves.setdefault(leaf.path, []).append(array)
        return {
            path: jax.tree.unflatten(jax.tree.structure(state.value), leaves[path])
            if path in leaves
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
    `feedback`: what replaces a weight in the derivative by its operator's input, by the path of the
    weight or the operator's number in the step.
    """
    step = Structure(model, step_fn, at(sequences, 0), folds)
    variants, sets = Variants(step, _resolved(step, feedback or {})), sharing(step)
    one = program(lambda *a: derivatives(variants, *a))
    h = vector([leaf.value for leaf in step.hidden])
    others = [leaf.value for leaf in step.others]
    steps, starts = [], []
    for t in range(len(jax.tree.leaves(sequences)[0])):
        starts.append((h, others, jax.tree.leaves(at(sequences, t))))
        derived, others = one(*starts[-1])
        h = derived.h
        steps.append(jax.tree.map(np.asarray, derived))

    def exits(sets: Sequence[frozenset[int]], cut: Sequence[Collection[Equation]]) -> list[Any]:
        at_step = program(lambda *a: at_exits(variants, sets, cut, *a))
        return [jax.tree.map(np.asarray, at_step(*start)) for start in starts]

    own = cache(lambda: exits(sets, [step.cut[i] for i in group_of(step)]))
    steps = [s._replace(exits=lambda t=t: own()[t]) for t, s in enumerate(steps)]
    return Dense(step, tuple(steps), cache(lambda sets: exits(sets, [()] * len(sets))))


def _resolved(step: Structure, feedback: Mapping[Any, Any]) -> Feedback:
    """Per operator which operand is replaced by what."""
    out = {}
    for key, operand in feedback.items():
        numbered = isinstance(key, (int, np.integer))
        operators = step.operators[key : key + 1] if numbered else readers(step, key)
        if not operators:
            raise ValueError(f"feedback for {key}: there is no such operator")
        parts = operand if isinstance(operand, (tuple, list)) else (operand,)
        for o in operators:
            places = zip(o.trained, parts, strict=False)
            out[o.equation] = {i: jnp.asarray(part) for i, part in places}
    return out
