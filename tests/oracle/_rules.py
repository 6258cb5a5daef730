"""The learning rules on dense matrices.

Per step (see `_observe`): exact loss gradients g = dL/dθ, l = dL/dh, ct = dL/dy; exact A = dh'/dh,
B = dh'/dθ, F = dh'/dy; kept D, f = dh'/dy; Y = dy/dθ at fixed input; lam = dL/dh with recurrent
entries cut; l_set = dL/dh' and mu = dL/dh, states that share a trace and entries being separate
inputs, in mu recurrent entries cut (not for snap, whose slots decide what shares a trace).

    window       G = Σ g + l S,  λ = Σ l J     with S' = A S + B from 0, J' = A J from 1
    d_rtrl       E' = D E + Σ_op f Y           single step  g + lam E,  window  G + λ E
    pp_prop      X' = a_x X + Y'               (pull(eps_x, c) = c X: an operator is linear in x)
                 e' = a_f D e + (1 - a_f) f
                 single step  rest + Σ_op (a_f lam e + (1 - a_f) ct) X' / (1 - a_f^t)
                 window       G + Σ_op (λ e) X / (1 - a_f^t)
    rtrl         E' = A E + B                  single step  g + l E,  window  G + λ E
    kf_rtrl      E' = A E + Σ_op F Y           the same (the mean of KF-RTRL)
    snap         E_y' = m_y (A E_y + F_y ⊗ Y_y)    for every element y of an operator's output
                 single step  g + Σ_y l_set m_y A E_y + mu Σ_y E_y
                 window       G + λ Σ_y E_y
    eprop        E of d_rtrl, Ē' = κ Ē + E'    single step  g + lam E + κ l_set Ē,  window  G + λ Ē
    otpe         E' = a E + Σ_op f Y           single step  g + (a l_set + mu) E,  window  G + λ E
      approx     X' = a X + Y', e' = a e + f   single step  rest + Σ_op ((a l_set + mu) e + ct) X'
                                               window  G + Σ_op (λ e) X
    ottt         pp_prop, a_f = 0
    stllr        X' = a X + Y', e' = b e + f
                 single step  rest + Σ_op pre ct X' + post b (l_set e) Y
    dni          d_rtrl; of a weight without a trace g + M(h') B, window  G + M(h') S
    a signal c   of three_factor, osttp, decolle, square feedback:  rest + c E'

where a prime marks the value after the step, E, X, e are zero before the first step, t counts
steps, and m_y is the pattern of states that y reaches (`Structure.slots`). `rest` is g without what
goes through the operands of the traced operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from braintrace._errors import message
from braintrace.verify._sequence import Grads

from ._dense import Dense
from ._filters import Filtered, Leaky, LeakyFactored, PreAndPost, Synthetic
from ._signals import FedBack, Signalled, local, modulated, projected, states, vector_of
from ._traces import Everything, Factored, NoTrace, OfOperators, PerWeight, Slots


def rule_on(seen: Dense, kind: str, window: int | None = None, **options: Any) -> Grads:
    """The gradient of a rule on recorded steps; `window` None is single-step."""
    memory = RULES[kind](seen, **options)
    total = np.zeros_like(seen.steps[0].g)
    if window is not None and not hasattr(memory, "window"):
        raise ValueError(
            message(
                f"{kind} has no windows.",
                why="its signal is not a derivative: reverse mode has no place for it",
                do="use vjp_method='single-step'",
            )
        )
    for start in range(0, len(seen.steps), window or 1):
        steps = seen.steps[start : start + (window or 1)]
        total += memory.step(*steps) if window is None else memory.window(steps)
        for s in steps:
            memory.advance(s)
    return seen.by_path(total)


def follows_factors(kind: str, options: dict[str, Any]) -> bool:
    """Whether a rule traces weights with a factor that varies: not if it filters inputs alone."""
    return kind not in ("pp_prop", "ottt", "stllr", "kf_rtrl") and options.get("mode") != "approx"


def _eprop(seen: Dense, kappa: float = 0.0, group_feedback: Any = None) -> Any:
    return _fed_back(seen, Filtered(seen, kappa), group_feedback)


def _rflo(seen: Dense, leak: float | None = None, group_feedback: Any = None) -> Any:
    memory = PerWeight(seen) if leak is None else Leaky(seen, leak)
    return _fed_back(seen, memory, group_feedback)


def _fed_back(seen: Dense, memory: Any, matrices: Any) -> Any:
    return memory if matrices is None else FedBack(seen, memory, matrices)


def _otpe(seen: Dense, leak: float, mode: str = "full", clip: float | None = None) -> Any:
    match mode:
        case "full":
            return Leaky(seen, leak, clip)
        case "approx":
            return LeakyFactored(seen, leak)
    raise ValueError(f"otpe has no mode {mode!r}")


def _ottt(seen: Dense, leak: float, mode: str = "A") -> Any:
    if mode not in ("A", "O"):
        raise ValueError(f"ottt has no mode {mode!r}")
    return Factored(seen, (leak if mode == "A" else 0.0, 0.0))


def _stllr(seen: Dense, **options: float) -> Any:
    return PreAndPost(seen, **options)


def _three_factor(seen: Dense, modulator: Any) -> Any:
    return Signalled(PerWeight(seen), modulated(seen, modulator))


def _osttp(seen: Dense, B_list: Any, y_target: Any) -> Any:
    return Signalled(Slots(seen, 1), projected(seen, B_list, y_target))


def _decolle(seen: Dense, **options: Any) -> Any:
    return Signalled(PerWeight(seen), local(seen, **options))


def _dni(seen: Dense, synthesizer: Callable[[list[Any]], list[Any]]) -> Any:
    step = seen.structure
    return Synthetic(seen, lambda h: vector_of(step, synthesizer(states(step, h))))


RULES: dict[str, Callable[..., Any]] = {
    "d_rtrl": PerWeight,
    "pp_prop": Factored,
    "snap": Slots,
    "rtrl": Everything,
    "kf_rtrl": OfOperators,
    "no_trace": NoTrace,
    "eprop": _eprop,
    "rflo": _rflo,
    "otpe": _otpe,
    "ottt": _ottt,
    "stllr": _stllr,
    "three_factor": _three_factor,
    "osttp": _osttp,
    "decolle": _decolle,
    "dni": _dni,
}
