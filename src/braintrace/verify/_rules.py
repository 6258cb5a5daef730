"""The learning rules on dense matrices.

Per step (see `_dense`): exact loss gradients g = dL/dθ, l = dL/dh, ct = dL/dy; exact A = dh'/dh,
B = dh'/dθ, F = dh'/dy; kept D, f = dh'/dy; Y = dy/dθ at fixed input; lam = dL/dh with recurrent
entries cut; l_exit = dL/dh' and bypass = dL/dh, stored values and entries being separate inputs.

    window       G = Σ g + l S,  λ = Σ l J     with S' = A S + B from 0, J' = A J from 1
    d_rtrl       E' = D E + Σ_op f Y           single step  g + lam E,  window  G + λ E
    pp_prop      X' = a_x X + Y'               (pull(eps_x, c) = c X: an operator is linear in x)
                 e' = a_f D e + (1 - a_f) f
                 single step  rest + Σ_op (a_f lam e + (1 - a_f) ct) X' / (1 - a_f^t)
                 window       G + Σ_op (λ e) X / (1 - a_f^t)
    rtrl         E' = A E + B                  single step  g + l E,  window  G + λ E
    snap         E_y' = m_y (A E_y + F_y ⊗ Y_y)    for every element y of an operator's output
                 single step  g + Σ_y l_exit m_y A E_y + bypass Σ_y E_y
                 window       G + λ Σ_y E_y

where a prime marks the value after the step, E, X, e are zero before the first step, t counts
steps, and m_y is the pattern of states that y reaches (`Structure.slots`). `rest` is g without what
goes through the operands of the traced operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._dense import Dense, DenseStep
from ._sequence import Grads


def rule_on(
    seen: Dense,
    kind: str,
    window: int | None = None,
    decays: tuple[float, float] = (0.0, 0.0),
    n: int = 1,
) -> Grads:
    """The gradient of a rule on recorded steps; `window` None is single-step."""
    first = seen.steps[0]
    memory: Any
    if kind == "snap":
        memory = _Slots(first, seen.slots(n))
    elif kind == "pp_prop":
        memory = _Factored(first, *decays)
    else:
        memory = {"d_rtrl": _PerWeight, "rtrl": _Everything}[kind](first)
    total = np.zeros_like(seen.steps[0].g)
    if window is None:
        for s in seen.steps:
            total += memory.step(s)
            memory.advance(s)
    else:
        for start in range(0, len(seen.steps), window):
            steps = seen.steps[start : start + window]
            G, lam = _window(steps)
            total += G + memory.recall(lam)
            for s in steps:
                memory.advance(s)
    return seen.by_path(total)


def _window(steps: Sequence[DenseStep]) -> tuple[np.ndarray, np.ndarray]:
    """The exact gradient of a window's loss by the parameters and by the entry states."""
    n = len(steps[0].A)
    S, J = np.zeros_like(steps[0].B), np.eye(n)
    G, lam = np.zeros_like(steps[0].g), np.zeros(n)
    for s in steps:
        G, lam = G + s.g + s.l @ S, lam + s.l @ J
        S, J = s.A @ S + s.B, s.A @ J
    return G, lam


class _PerWeight:
    def __init__(self, first: DenseStep):
        self.E = np.zeros_like(first.B)

    def recall(self, lam: np.ndarray) -> np.ndarray:
        return lam @ self.E

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.recall(s.lam)

    def advance(self, s: DenseStep) -> None:
        self.E = s.D @ self.E + sum(f @ Y for f, Y in zip(s.f, s.Y, strict=False))


class _Everything(_PerWeight):
    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.recall(s.l)

    def advance(self, s: DenseStep) -> None:
        self.E = s.A @ self.E + s.B


class _Slots:
    """E has the axes (y, states, parameters), one array per operator."""

    def __init__(self, first: DenseStep, slots: Sequence[np.ndarray]):
        self.masks = [m.T[:, :, None] for m in slots]
        self.E = [np.zeros((len(m), *first.B.shape)) for m in self.masks]

    def recall(self, lam: np.ndarray) -> Any:
        return sum(lam @ E.sum(0) for E in self.E)

    def step(self, s: DenseStep) -> np.ndarray:
        stored = sum(
            s.l_exit @ (m * (s.A @ E)).sum(0) for m, E in zip(self.masks, self.E, strict=True)
        )
        return s.g + stored + self.recall(s.bypass)

    def advance(self, s: DenseStep) -> None:
        self.E = [
            m * (s.A @ E + F.T[:, :, None] * Y[:, None, :])
            for m, E, F, Y in zip(self.masks, self.E, s.F, s.Y, strict=True)
        ]


class _Factored:
    def __init__(self, first: DenseStep, decay_x: float, decay_f: float):
        self.a_x, self.a_f, self.t = decay_x, decay_f, 0
        self.X = [np.zeros_like(Y) for Y in first.Y[: len(first.f)]]
        self.e = [np.zeros_like(f) for f in first.f]

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
        self.e = [a * s.D @ e + (1 - a) * f for e, f in zip(self.e, s.f, strict=True)]
