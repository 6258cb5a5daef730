"""Learning rules evaluated from their defining equations, on dense matrices.

Per step (see `_dense`): exact loss gradients g = dL/dθ, l = dL/dh, ct = dL/dy; exact A = dh'/dh,
B = dh'/dθ; kept D, f = dh'/dy; Y = dy/dθ at fixed input; lam = dL/dh with recurrent entries cut.

    window       G = Σ g + l S,  λ = Σ l J     with S' = A S + B from 0, J' = A J from 1
    d_rtrl       E' = D E + Σ_op f Y           single step  g + lam E,  window  G + λ E
    pp_prop      X' = a_x X + Y'               (pull(eps_x, c) = c X: an operator is linear in x)
                 e' = a_f D e + (1 - a_f) f
                 single step  rest + Σ_op (a_f lam e + (1 - a_f) ct) X' / (1 - a_f^t)
                 window       G + Σ_op (λ e) X / (1 - a_f^t)

where a prime marks the value after the step, E, X, e are zero before the first step, and t counts
steps. `rest` is g without what goes through the operands of the traced operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import message
from ..learner import check_vjp_method
from ._dense import Dense, DenseStep, dense
from ._sequence import Grads, StepFn, check

_NAMES = {
    "d_rtrl": "d_rtrl",
    "paramdimvjpalgorithm": "d_rtrl",
    "pp_prop": "pp_prop",
    "es_d_rtrl": "pp_prop",
    "esd_rtrl": "pp_prop",
    "iodimvjpalgorithm": "pp_prop",
}


def reference_grad(
    rule: str | type,
    model: brainstate.nn.Module,
    step_fn: StepFn,
    *sequences: Any,
    vjp_method: str = "single-step",
    chunk_size: int = 1,
    reduction: str = "sum",
    **options: Any,
) -> Grads:
    """Evaluate a learning rule from its defining equations with dense Jacobians.

    It shares no trace, slot or influence map with the learners, and is slow: for tiny models, in
    float64. The model runs from its present states with zero traces and is left as it was.

    Args:
        rule: 'd_rtrl' or 'pp_prop', or the learner class.
        model: the model itself, states initialised.
        step_fn: `step_fn(model, *slices)` calls the model and returns the scalar loss of a step.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        vjp_method: 'single-step', or 'multi-step' for windows.
        chunk_size: steps per window; the last one may be shorter.
        reduction: 'sum' of the steps' losses, or their 'mean'.
        **options: `decay_or_rank` of pp_prop, as the learner takes it.

    Returns:
        Gradients by path, like `learner.etrace_grad(..., reduction='sum')`.

    Example:
        >>> import brainstate, jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.GRUCell(2, 3)
        >>> _ = brainstate.nn.init_all_states(cell)
        >>> step = lambda net, x: (net(x) ** 2).sum()
        >>> g = braintrace.verify.reference_grad('d_rtrl', cell, step, jnp.ones((4, 2)))
        >>> g['Wz', 'weight']['weight'].shape
        (5, 3)
    """
    length = check(model, step_fn, sequences, reduction)
    kind = rule_name(rule)
    windows = _windows(vjp_method, chunk_size)
    decays = _decays(kind, options)
    total = rule_on(dense(model, step_fn, *sequences), kind, windows, decays)
    scale = 1.0 if reduction == "sum" else 1.0 / length
    return {p: _scaled(v, scale) for p, v in total.items()}


def rule_on(
    seen: Dense, kind: str, window: int | None = None, decays: tuple[float, float] = (0.0, 0.0)
) -> Grads:
    """The gradient of a rule on recorded steps; `window` None is single-step."""
    memory = _PerWeight(seen.steps[0]) if kind == "d_rtrl" else _Factored(seen.steps[0], *decays)
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
        self.E = s.D @ self.E + sum(f @ Y for f, Y in zip(s.f, s.Y, strict=True))


class _Factored:
    def __init__(self, first: DenseStep, decay_x: float, decay_f: float):
        self.a_x, self.a_f, self.t = decay_x, decay_f, 0
        self.X = [np.zeros_like(Y) for Y in first.Y]
        self.e = [np.zeros_like(f) for f in first.f]

    def recall(self, lam: np.ndarray) -> Any:
        if self.t == 0:
            return 0.0
        scale = 1 - self.a_f**self.t
        return sum((lam @ e) @ X / scale for e, X in zip(self.e, self.X, strict=True))

    def step(self, s: DenseStep) -> np.ndarray:
        total, scale = s.rest.copy(), 1 - self.a_f ** (self.t + 1)
        for e, X, Y, ct in zip(self.e, self.X, s.Y, s.ct, strict=True):
            c = self.a_f * (s.lam @ e) + (1 - self.a_f) * ct
            total += c @ (self.a_x * X + Y) / scale
        return total

    def advance(self, s: DenseStep) -> None:
        self.t += 1
        self.X = [self.a_x * X + Y for X, Y in zip(self.X, s.Y, strict=True)]
        a = self.a_f
        self.e = [a * s.D @ e + (1 - a) * f for e, f in zip(self.e, s.f, strict=True)]


# ------------------------------------------------------------------------------------- the door


def rule_name(rule: str | type) -> str:
    """The rule of a name or a learner class that has a reference."""
    name = rule.__name__ if isinstance(rule, type) else rule
    found = _NAMES.get(name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            message(
                f"there is no reference for the rule {name!r}.",
                why=f"references exist for {', '.join(sorted(set(_NAMES.values())))}",
                do="choose one of them, or compare with bptt_grad",
            )
        )
    return found


def _windows(vjp_method: str, chunk_size: Any) -> int | None:
    check_vjp_method(vjp_method)
    if (
        isinstance(chunk_size, bool)
        or not isinstance(chunk_size, (int, np.integer))
        or chunk_size < 1
    ):
        raise ValueError(
            message(
                f"chunk_size={chunk_size!r}.",
                why="it counts the steps of a window",
                do="pass a positive integer",
            )
        )
    if vjp_method == "multi-step":
        return int(chunk_size)
    if chunk_size != 1:
        raise ValueError(
            message(
                f"chunk_size={chunk_size} with vjp_method='single-step'.",
                why="a window needs reverse mode inside the window",
                do="pass vjp_method='multi-step'",
            )
        )
    return None


def _decays(kind: str, options: dict[str, Any]) -> tuple[float, float]:
    known = {"decay_or_rank"} if kind == "pp_prop" else set()
    if set(options) != known:
        raise TypeError(
            message(
                f"options {sorted(options)} of {kind}.",
                why=f"its options are {sorted(known)}",
                do="pass exactly these by name",
            )
        )
    if not known:
        return 0.0, 0.0
    value = options["decay_or_rank"]
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    x, f = ((d - 1) / (d + 1) if isinstance(d, (int, np.integer)) else float(d) for d in pair)
    return x, f


def _scaled(tree: Any, scale: float) -> Any:
    return jax.tree.map(lambda a: a * scale, tree)
