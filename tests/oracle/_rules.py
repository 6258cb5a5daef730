"""The learning rules on dense matrices.

Per step (see `_derivatives`): exact loss gradients g = dL/dθ, l = dL/dh, ct = dL/dy; exact
A = dh'/dh, B = dh'/dθ, F = dh'/dy; kept D, f = dh'/dy; Y = dy/dθ at fixed input; lam = dL/dh with
recurrent entries cut; l_set = dL/dh' and mu = dL/dh, states that share a trace and entries being
separate inputs, in mu recurrent entries cut (not for snap, whose slots decide what shares a trace).

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

from braintrace.verify._sequence import Grads

from ._dense import Dense
from ._filters import Filtered, Leaky, LeakyFactored, PreAndPost, Synthetic
from ._signals import FedBack, Signalled, local, modulated, projected, states, vector_of
from ._traces import Factored, FullInfluence, NoTrace, OperatorInfluence, PerWeight, Slots


def rule_on(record: Dense, kind: str, window: int | None = None, **options: Any) -> Grads:
    """The gradient of a rule on recorded steps; `window` None is single-step."""
    trace = RULES[kind](record, **options)
    total = np.zeros_like(record.steps[0].g)
    if window is not None and not hasattr(trace, "window"):
        raise ValueError(f"{kind} has no windows: its signal is not a derivative")
    for start in range(0, len(record.steps), window or 1):
        steps = record.steps[start : start + (window or 1)]
        total += trace.step(*steps) if window is None else trace.window(steps)
        for s in steps:
            trace.advance(s)
    return record.by_path(total)


def follows_factors(kind: str, options: dict[str, Any]) -> bool:
    """Whether a rule traces weights with a factor that varies: not if it filters inputs alone."""
    return kind not in ("pp_prop", "ottt", "stllr", "kf_rtrl") and options.get("mode") != "approx"


def _eprop(record: Dense, kappa: float = 0.0, group_feedback: Any = None) -> Any:
    return _fed_back(record, Filtered(record, kappa), group_feedback)


def _rflo(record: Dense, leak: float | None = None, group_feedback: Any = None) -> Any:
    trace = PerWeight(record) if leak is None else Leaky(record, leak)
    return _fed_back(record, trace, group_feedback)


def _fed_back(record: Dense, trace: Any, matrices: Any) -> Any:
    return trace if matrices is None else FedBack(record, trace, matrices)


def _otpe(record: Dense, leak: float, mode: str = "full", clip: float | None = None) -> Any:
    match mode:
        case "full":
            return Leaky(record, leak, clip)
        case "approx":
            return LeakyFactored(record, leak)
    raise ValueError(f"otpe has no mode {mode!r}")


def _ottt(record: Dense, leak: float, mode: str = "A") -> Any:
    if mode not in ("A", "O"):
        raise ValueError(f"ottt has no mode {mode!r}")
    return Factored(record, (leak if mode == "A" else 0.0, 0.0))


def _three_factor(record: Dense, modulator: Any) -> Any:
    return Signalled(PerWeight(record), modulated(record, modulator))


def _osttp(record: Dense, B_list: Any, y_target: Any) -> Any:
    return Signalled(Slots(record, 1), projected(record, B_list, y_target))


def _decolle(record: Dense, **options: Any) -> Any:
    return Signalled(PerWeight(record), local(record, **options))


def _dni(record: Dense, synthesizer: Callable[[list[Any]], list[Any]]) -> Any:
    step = record.structure
    return Synthetic(record, lambda h: vector_of(step, synthesizer(states(step, h))))


RULES: dict[str, Callable[..., Any]] = {
    "d_rtrl": PerWeight,
    "pp_prop": Factored,
    "snap": Slots,
    "rtrl": FullInfluence,
    "kf_rtrl": OperatorInfluence,
    "no_trace": NoTrace,
    "eprop": _eprop,
    "rflo": _rflo,
    "otpe": _otpe,
    "ottt": _ottt,
    "stllr": PreAndPost,
    "three_factor": _three_factor,
    "osttp": _osttp,
    "decolle": _decolle,
    "dni": _dni,
}
