"""Learning signals that are no derivatives of the loss, at the states of the groups.

A signal is a vector over all states. `Signalled` is a rule in which it meets the trace: it replaces
the derivative of the loss through traced operators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._dense import Dense
from ._derivatives import DenseStep
from ._structure import Structure
from ._traces import reverse

Signal = Callable[[int, DenseStep], np.ndarray]


class Signalled:
    """`signal(t, step)` meets the trace after the step."""

    def __init__(self, trace: Any, signal: Signal):
        self.trace, self.signal, self.t = trace, signal, 0

    def step(self, s: DenseStep) -> np.ndarray:
        later = copy.copy(self.trace)
        later.advance(s)
        return s.rest + later.credit(self.signal(self.t, s))

    def advance(self, s: DenseStep) -> None:
        self.trace.advance(s)
        self.t += 1


class FedBack(Signalled):
    """Square random feedback: the loss gradient at the states of a group is normalised and
    mixed by a matrix, one per group."""

    def __init__(self, record: Dense, trace: Any, matrices: Sequence[Any]):
        self.structure, self.matrices = record.structure, matrices
        super().__init__(trace, lambda t, s: self.mix(s.l_set))

    def mix(self, signal: np.ndarray) -> np.ndarray:
        def mixed(part: Any, matrix: Any) -> Any:
            size = jnp.linalg.norm(part, axis=-2, keepdims=True)  # over the units of the last axis
            return jnp.einsum("...nk,nm->...mk", part / (size + 1e-8), jnp.asarray(matrix))

        pairs = zip(states(self.structure, signal), self.matrices, strict=True)
        return vector_of(self.structure, [mixed(part, B) for part, B in pairs])

    def window(self, steps: Sequence[DenseStep]) -> np.ndarray:
        G, lam, _ = reverse(steps)
        return G + self.trace.credit(self.mix(lam))


# --------------------------------------------------------------------------- signals of the rules


def modulated(record: Dense, modulator: Any) -> Signal:
    """Three factors: per step a number or an array, for all groups or by the group's number."""
    step = record.structure

    def signal(t: int, s: DenseStep) -> np.ndarray:
        if isinstance(modulator, Mapping):
            return spread(step, [modulator[i][t] for i in range(len(step.groups))])
        return spread(step, [modulator[t]] * len(step.groups))

    return signal


def projected(record: Dense, B_list: Sequence[Any], y_target: Any) -> Signal:
    """OSTTP: the target times a matrix of the group, at every state of the group."""
    at = lambda t, B: np.tensordot(np.asarray(y_target[t]), np.asarray(B), 1)
    return lambda t, s: spread(record.structure, [at(t, B) for B in B_list])


def local(
    record: Dense, readouts: Sequence[Any], y_target: Any, local_loss: Any, observe: Any
) -> Signal:
    """DECOLLE: the gradient of a loss of the group's own read-out by its states."""

    def signal(t: int, s: DenseStep) -> np.ndarray:
        loss = lambda part, R: local_loss(observe(part) @ R, y_target[t])
        pairs = zip(states(record.structure, s.h), readouts, strict=True)
        return vector_of(record.structure, [jax.grad(loss)(h, jnp.asarray(R)) for h, R in pairs])

    return signal


# ---------------------------------------------------------------------------- vectors of states


def states(step: Structure, vector: np.ndarray) -> list[Any]:
    """Per group the values of its states in a vector, (*varshape, number of states)."""
    ends = np.cumsum([0, *(s.entry.size for s in step.hidden)])
    out = []
    for group in step.groups:
        parts = []
        for k in group:
            leaf = step.hidden[k]
            part = vector[ends[k] : ends[k + 1]].reshape(leaf.entry.shape)
            parts.append(part if leaf.channels else part[..., None])
        out.append(jnp.concatenate(parts, -1))
    return out


def vector_of(step: Structure, arrays: Sequence[Any]) -> np.ndarray:
    """The vector of such arrays; the inverse of `states`."""
    if any(s.entry.is_complex for s in step.hidden):
        raise ValueError("a signal that is no derivative has no imaginary part: use real states")
    flat: dict[int, np.ndarray] = {}
    for group, array in zip(step.groups, arrays, strict=True):
        start = 0
        for k in group:
            leaf = step.hidden[k]
            n = leaf.entry.shape[-1] if leaf.channels else 1
            flat[k] = np.asarray(array[..., start : start + n]).ravel()
            start += n
    return np.concatenate([flat[k] for k in range(len(step.hidden))])


def spread(step: Structure, arrays: Sequence[Any]) -> np.ndarray:
    """The vector that has an array at its group: one value per unit and state, or one per unit."""
    like = states(step, np.zeros(len(step.leaf_of())))

    def full(array: Any, group: Any) -> Any:
        array = jnp.asarray(array)
        return jnp.broadcast_to(
            array if array.ndim == group.ndim else array[..., None], group.shape
        )

    return vector_of(step, [full(a, g) for a, g in zip(arrays, like, strict=True)])
