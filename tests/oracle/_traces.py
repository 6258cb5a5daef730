"""What a rule remembers: traces on dense matrices, as `_rules` defines them.

A trace is zero before the first step. `step` is the gradient of one step, `credit` what a cotangent
of the states is worth, `advance` goes on by a step, `window` is several steps with reverse mode
inside. Letters as in `_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._dense import Dense
from ._derivatives import DenseStep
from ._sharing import sharing_on


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

    def __init__(self, record: Dense):
        pass

    def credit(self, lam: np.ndarray) -> Any:
        return 0.0

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g

    def advance(self, s: DenseStep) -> None:
        pass

    def window(self, steps: Sequence[DenseStep]) -> np.ndarray:
        G, lam, _ = reverse(steps)
        return G + self.credit(lam)


class PerWeight(NoTrace):
    """D-RTRL."""

    def __init__(self, record: Dense):
        self.E = np.zeros_like(record.steps[0].B)
        self.parts = [self.E for _ in record.steps[0].f]  # one per operator

    def credit(self, lam: np.ndarray) -> Any:
        return lam @ self.E

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.credit(s.lam)

    def advance(self, s: DenseStep) -> None:
        pairs = zip(s.D, self.parts, s.f, s.Y, strict=False)
        self.parts = [D @ E + f @ Y for D, E, f, Y in pairs]
        self.E = sum(self.parts, np.zeros_like(self.E))


class FullInfluence(PerWeight):
    """RTRL."""

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.credit(s.l)

    def advance(self, s: DenseStep) -> None:
        self.E = s.A @ self.E + s.B


class OperatorInfluence(FullInfluence):
    """The part of RTRL that goes through operators: the mean of KF-RTRL."""

    def advance(self, s: DenseStep) -> None:
        self.E = s.A @ self.E + sum(F @ Y for F, Y in zip(s.F, s.Y, strict=True))


class Slots(NoTrace):
    """SnAp. E has the axes (y, states, parameters), one array per operator."""

    def __init__(self, record: Dense, n: int):
        step, slots = record.structure, record.slots(n)
        self.masks = [m.T[:, :, None] for m in slots]
        self.E = [np.zeros((len(m), *record.steps[0].B.shape)) for m in self.masks]
        self.exits = record.at_exits(sharing_on(step, step.steady, step.slots(n)))
        self.t = 0

    def credit(self, lam: np.ndarray) -> Any:
        return sum(lam @ E.sum(0) for E in self.E)

    def step(self, s: DenseStep) -> np.ndarray:
        l, mu = self.exits[self.t]
        pairs = zip(self.masks, self.E, strict=True)
        return s.g + sum(l @ (m * (s.A @ E)).sum(0) for m, E in pairs) + self.credit(mu)

    def advance(self, s: DenseStep) -> None:
        self.t += 1
        self.E = [
            m * (s.A @ E + F.T[:, :, None] * Y[:, None, :])
            for m, E, F, Y in zip(self.masks, self.E, s.F, s.Y, strict=True)
        ]


class Factors:
    """Two factors per traced operator: X' = a_x X + Y' of its input, e' = a_f e + f of its tail."""

    def __init__(self, record: Dense, a_x: float, a_f: float):
        self.a_x, self.a_f, first = a_x, a_f, record.steps[0]
        self.X = [np.zeros_like(Y) for Y in first.Y[: len(first.f)]]
        self.e = [np.zeros_like(f) for f in first.f]

    def tail(self, D: np.ndarray, e: np.ndarray, f: np.ndarray) -> np.ndarray:
        return self.a_f * e + f

    def advance(self, s: DenseStep) -> None:
        self.X = [self.a_x * X + Y for X, Y in zip(self.X, s.Y, strict=False)]
        self.e = [self.tail(D, e, f) for D, e, f in zip(s.D, self.e, s.f, strict=True)]

    def credit(self, lam: np.ndarray) -> Any:
        return sum((lam @ e) @ X for e, X in zip(self.e, self.X, strict=True))


class Factored(Factors, NoTrace):
    """pp_prop."""

    def __init__(self, record: Dense, decays: tuple[float, float]):
        super().__init__(record, *decays)
        self.t = 0

    def tail(self, D: np.ndarray, e: np.ndarray, f: np.ndarray) -> np.ndarray:
        return self.a_f * D @ e + (1 - self.a_f) * f

    def credit(self, lam: np.ndarray) -> Any:
        return super().credit(lam) / (1 - self.a_f**self.t) if self.t else 0.0

    def step(self, s: DenseStep) -> np.ndarray:
        total, scale = s.rest.copy(), 1 - self.a_f ** (self.t + 1)
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            c = self.a_f * (s.lam @ e) + (1 - self.a_f) * ct
            total += c @ (self.a_x * X + Y) / scale
        return total

    def advance(self, s: DenseStep) -> None:
        super().advance(s)
        self.t += 1
