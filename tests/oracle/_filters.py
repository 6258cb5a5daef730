"""Traces that leak at a constant rate, or are filtered once more; `_rules` defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._dense import Dense
from ._derivatives import DenseStep
from ._sharing import parameters_of
from ._traces import Factors, NoTrace, PerWeight, reverse


class Filtered(PerWeight):
    """e-prop: the trace is low-pass filtered at the rate κ."""

    def __init__(self, record: Dense, kappa: float):
        super().__init__(record)
        self.kappa, self.filtered = kappa, np.zeros_like(self.E)

    def credit(self, lam: np.ndarray) -> Any:
        return lam @ self.filtered

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + s.lam @ self.E + self.kappa * self.credit(s.l_set)

    def advance(self, s: DenseStep) -> None:
        super().advance(s)
        self.filtered = self.kappa * self.filtered + self.E


class Leaky(NoTrace):
    """OTPE: `leak` in place of D. E has the axes (y, states, parameters), one array per operator:
    a trace is clipped element by element. The copies of an operator in a body share theirs."""

    def __init__(self, record: Dense, leak: float, clip: float | None = None):
        first, step = record.steps[0], record.structure
        entries = {leaf.entry for leaf in step.params}
        operands = [o.equation.inputs[i] for o in step.traced for i in o.trained]
        if clip is not None and not entries.issuperset(operands):
            raise ValueError(
                "clipped traces of a function of parameters: the learner clips in "
                "the coordinates of the weight, this trace has those of the parameters"
            )
        self.leak, self.clip = leak, np.inf if clip is None else clip
        self.origins = [step.origin[o.equation] for o in step.traced]
        shapes = {o: f.shape[1] for o, f in zip(self.origins, first.f, strict=True)}
        self.E = {o: np.zeros((n, *first.B.shape)) for o, n in shapes.items()}

    def credit(self, lam: np.ndarray) -> Any:
        return sum(lam @ E.sum(0) for E in self.E.values())

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + self.credit(self.leak * s.l_set + s.mu)

    def advance(self, s: DenseStep) -> None:
        self.E = {o: self.leak * E for o, E in self.E.items()}
        for o, f, Y in zip(self.origins, s.f, s.Y, strict=False):
            self.E[o] = self.E[o] + f.T[:, :, None] * Y[:, None, :]
        self.E = {o: np.clip(E, -self.clip, self.clip) for o, E in self.E.items()}


class LeakyFactored(Factors, NoTrace):
    """OTPE in two factors."""

    def __init__(self, record: Dense, leak: float):
        super().__init__(record, leak, leak)

    def step(self, s: DenseStep) -> np.ndarray:
        total, c = s.rest.copy(), self.a_f * s.l_set + s.mu
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            total += (c @ e + ct) @ (self.a_x * X + Y)
        return total


class PreAndPost(Factors):
    """S-TLLR: an input trace with this step's signal, this step's input with a trace of tails."""

    def __init__(
        self, record: Dense, leak_pre: float, leak_post: float, alpha_pre: float, alpha_post: float
    ):
        super().__init__(record, leak_pre, leak_post)
        self.pre, self.post = alpha_pre, alpha_post

    def step(self, s: DenseStep) -> np.ndarray:
        total = s.rest.copy()
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=False):
            total += self.pre * ct @ (self.a_x * X + Y)
            total += self.post * (self.a_f * s.l_set @ e) @ Y
        return total


class Synthetic(PerWeight):
    """DNI: what has no trace learns from a guess of the future's cotangent at a window's exit."""

    def __init__(self, record: Dense, future: Callable[[np.ndarray], np.ndarray]):
        super().__init__(record)
        self.future = future
        self.traced = parameters_of(record.structure, record.structure.traced)

    def step(self, s: DenseStep) -> np.ndarray:
        return s.g + np.where(self.traced, self.credit(s.lam), self.future(s.h) @ s.B)

    def window(self, steps: Sequence[DenseStep]) -> np.ndarray:
        G, lam, S = reverse(steps)
        return G + np.where(self.traced, self.credit(lam), self.future(steps[-1].h) @ S)
