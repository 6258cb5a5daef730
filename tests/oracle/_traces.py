"""What a rule remembers: traces on dense matrices, as `_rules` defines them.

A memory is zero before the first step. `step` is the gradient of one step, `recall` what a
cotangent of the states is worth, `advance` goes on by a step, `window` is several steps with
reverse mode inside. Letters as in `_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._dense import Dense
from ._observe import DenseStep
from ._together import together_on


def reverse(steps: Sequence[DenseStep]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exactly inside a window: the gradient of its loss by the parameters and by the entry states,
    and the derivative of its exit states by the parameters."""
    n = len(steps[0].A)
    S, J = np.zeros_like(steps[0].B), np.eye(n)
    G, lam = np.zeros_like(steps[0].g), np.zeros(n)
    for s in steps:
        G, lam = G + s.g + s.l @ S, lam + s.l @ J
        S, J = s.A @ S + s.B, s.A @ J
    return G, lam, S


class NoTrace:
    """Nothing is remembered."""

    def __init__(self, seen: Dense):
        pass

    def recall(self, lam: np.ndarray) -> Any:
        return 0.0

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g

    def advance(self, s: DenseStep) -> None:
        pass

    def window(self, steps: Sequence[DenseStep]) -> np.ndarray:
        G, lam, _ = reverse(steps)
        return G + self.recall(lam)


class PerWeight(NoTrace):
    """D-RTRL."""

    def __init__(self, seen: Dense):
        self.E = np.zeros_like(seen.steps[0].B)
        self.parts = [self.E for _ in seen.steps[0].f]  # one per operator

    def recall(self, lam: np.ndarray) -> Any:
        return lam @ self.E

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.recall(s.lam)

    def advance(self, s: DenseStep) -> None:
        pairs = zip(s.D, self.parts, s.f, s.Y, strict=False)
        self.parts = [D @ E + f @ Y for D, E, f, Y in pairs]
        self.E = sum(self.parts, np.zeros_like(self.E))


class Everything(PerWeight):
    """RTRL."""

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.recall(s.l)

    def advance(self, s: DenseStep) -> None:
        self.E = s.A @ self.E + s.B


class OfOperators(Everything):
    """The part of RTRL that goes through operators: the mean of KF-RTRL."""

    def advance(self, s: DenseStep) -> None:
        self.E = s.A @ self.E + sum(F @ Y for F, Y in zip(s.F, s.Y, strict=True))


class Slots(NoTrace):
    """SnAp. E has the axes (y, states, parameters), one array per operator."""

    def __init__(self, seen: Dense, n: int):
        step, slots = seen.structure, seen.slots(n)
        self.masks = [m.T[:, :, None] for m in slots]
        self.E = [np.zeros((len(m), *seen.steps[0].B.shape)) for m in self.masks]
        self.exits = seen.at_exits(together_on(step, step.steady, step.slots(n)))
        self.t = 0

    def recall(self, lam: np.ndarray) -> Any:
        return sum(lam @ E.sum(0) for E in self.E)

    def step(self, s: DenseStep) -> np.ndarray:
        l, mu = self.exits[self.t]
        pairs = zip(self.masks, self.E, strict=True)
        return s.g + sum(l @ (m * (s.A @ E)).sum(0) for m, E in pairs) + self.recall(mu)

    def advance(self, s: DenseStep) -> None:
        self.t += 1
        self.E = [
            m * (s.A @ E + F.T[:, :, None] * Y[:, None, :])
            for m, E, F, Y in zip(self.masks, self.E, s.F, s.Y, strict=True)
        ]


class Factored(NoTrace):
    """pp_prop."""

    def __init__(self, seen: Dense, decays: tuple[float, float]):
        self.a_x, self.a_f = decays
        self.t = 0
        self.X, self.e = no_factors(seen)

    def recall(self, lam: np.ndarray) -> Any:
        if self.t == 0:
            return 0.0
        scale = 1 - self.a_f**self.t
        return sum((lam @ e) @ X / scale for e, X in zip(self.e, self.X, strict=True))

    def step(self, s: DenseStep) -> np.ndarray:
        total, scale = s.rest.copy(), 1 - self.a_f ** (self.t + 1)
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            c = self.a_f * (s.lam @ e) + (1 - self.a_f) * ct
            total += c @ (self.a_x * X + Y) / scale
        return total

    def advance(self, s: DenseStep) -> None:
        self.t += 1
        self.X = [self.a_x * X + Y for X, Y in zip(self.X, s.Y, strict=False)]
        a = self.a_f
        pairs = zip(s.D, self.e, s.f, strict=True)
        self.e = [a * D @ e + (1 - a) * f for D, e, f in pairs]


def no_factors(seen: Dense) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """X and e of the traced operators before the first step."""
    first = seen.steps[0]
    X = [np.zeros_like(Y) for Y in first.Y[: len(first.f)]]
    return X, [np.zeros_like(f) for f in first.f]
