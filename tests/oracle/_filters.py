"""Traces that leak at a given rate, or are filtered once more; `_rules` defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from braintrace._errors import message

from ._dense import Dense
from ._observe import DenseStep
from ._together import made_of
from ._traces import NoTrace, PerWeight, no_factors, reverse


class Filtered(PerWeight):
    """e-prop: the trace is low-pass filtered at the rate κ."""

    def __init__(self, seen: Dense, kappa: float):
        super().__init__(seen)
        self.kappa, self.filtered = kappa, np.zeros_like(self.E)

    def recall(self, lam: np.ndarray) -> Any:
        return lam @ self.filtered

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + s.lam @ self.E + self.kappa * self.recall(s.l_set)

    def advance(self, s: DenseStep) -> None:
        super().advance(s)
        self.filtered = self.kappa * self.filtered + self.E


class Leaky(NoTrace):
    """OTPE: `leak` in place of D. E has the axes (y, states, parameters), one array per operator:
    a trace is clipped element by element. The copies of an operator in a body share theirs."""

    def __init__(self, seen: Dense, leak: float, clip: float | None = None):
        first, step = seen.steps[0], seen.structure
        own = {s.entry for s in step.params}
        if clip is not None and any(
            o.equation.inputs[i] not in own for o in step.traced for i in o.trained
        ):
            raise ValueError(
                message(
                    "clipped traces of a weight that is a function of parameters.",
                    why="a trace has the coordinates of the operator's weight, and here is kept in "
                    "those of the parameters",
                    do="compare on a model whose operators read parameters as they are",
                )
            )
        self.leak, self.clip = leak, np.inf if clip is None else clip
        self.origins = [step.origin[o.equation] for o in step.traced]
        shapes = {o: f.shape[1] for o, f in zip(self.origins, first.f, strict=True)}
        self.E = {o: np.zeros((n, *first.B.shape)) for o, n in shapes.items()}

    def recall(self, lam: np.ndarray) -> Any:
        return sum(lam @ E.sum(0) for E in self.E.values())

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.recall(self.leak * s.l_set + s.mu)

    def advance(self, s: DenseStep) -> None:
        self.E = {o: self.leak * E for o, E in self.E.items()}
        for o, f, Y in zip(self.origins, s.f, s.Y, strict=False):
            self.E[o] = self.E[o] + f.T[:, :, None] * Y[:, None, :]
        self.E = {o: np.clip(E, -self.clip, self.clip) for o, E in self.E.items()}


class LeakyFactored(NoTrace):
    """OTPE in two factors."""

    def __init__(self, seen: Dense, leak: float):
        self.leak = leak
        self.X, self.e = no_factors(seen)

    def recall(self, lam: np.ndarray) -> Any:
        return sum((lam @ e) @ X for e, X in zip(self.e, self.X, strict=True))

    def step(self, s: DenseStep) -> np.ndarray:
        total, c = s.rest.copy(), self.leak * s.l_set + s.mu
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            total += (c @ e + ct) @ (self.leak * X + Y)
        return total

    def advance(self, s: DenseStep) -> None:
        self.X = [self.leak * X + Y for X, Y in zip(self.X, s.Y, strict=False)]
        self.e = [self.leak * e + f for e, f in zip(self.e, s.f, strict=True)]


class PreAndPost:
    """S-TLLR: an input trace with this step's signal, this step's input with a trace of tails."""

    def __init__(
        self, seen: Dense, leak_pre: float, leak_post: float, alpha_pre: float, alpha_post: float
    ):
        self.a, self.b, self.pre, self.post = leak_pre, leak_post, alpha_pre, alpha_post
        self.X, self.e = no_factors(seen)

    def step(self, s: DenseStep) -> np.ndarray:
        total = s.rest.copy()
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            total += self.pre * ct @ (self.a * X + Y)
            total += self.post * (self.b * s.l_set @ e) @ Y
        return total

    def advance(self, s: DenseStep) -> None:
        self.X = [self.a * X + Y for X, Y in zip(self.X, s.Y, strict=False)]
        self.e = [self.b * e + f for e, f in zip(self.e, s.f, strict=True)]


class Synthetic(PerWeight):
    """DNI: what has no trace learns from a guess of the future's cotangent at a window's exit."""

    def __init__(self, seen: Dense, future: Callable[[np.ndarray], np.ndarray]):
        super().__init__(seen)
        self.future = future
        self.traced = made_of(seen.structure, seen.structure.traced)

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + np.where(self.traced, self.recall(s.lam), self.future(s.h) @ s.B)

    def window(self, steps: Sequence[DenseStep]) -> np.ndarray:
        G, lam, S = reverse(steps)
        return G + np.where(self.traced, self.recall(lam), self.future(steps[-1].h) @ S)
