"""The rules that have a reference: their names, and their options as the learners take them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import message

REQUIRED = object()
_FEEDBACK = {"feedback": None, "group_feedback": None}
_OPTIONS: dict[str, dict[str, Any]] = {
    "d_rtrl": {},
    "pp_prop": {"decay_or_rank": REQUIRED},
    "snap": {"n": REQUIRED},
    "rtrl": {},
    "eprop": {"kappa_filter_decay": 0.0, **_FEEDBACK},
    "rflo": {"leak": None, **_FEEDBACK},
    "ostl_recurrent": {},
    "ostl_feedforward": {"decay_or_rank": 1e-6},
    "ottt": {"mode": "A", "leak": REQUIRED},
    "otpe": {"mode": "full", "leak": REQUIRED, "trace_clip_abs": None},
    "osttp": {"B_list": REQUIRED, "y_target": REQUIRED},
    "three_factor": {"modulator": REQUIRED},
    "decolle": {"readouts": REQUIRED, "y_target": REQUIRED, "local_loss": None, "observe": None},
    "stllr": {
        "leak_pre": 0.5,
        "leak_post": 0.2,
        "alpha_pre": 1.0,
        "alpha_post": -0.2,
    },
    "dni": {"synthesizer": REQUIRED},
    "uoro": {},
    "kf_rtrl": {},
    "no_trace": {},
}
_OTHER_NAMES = {
    "paramdimvjpalgorithm": "d_rtrl",
    "esdrtrl": "pp_prop",
    "iodimvjpalgorithm": "pp_prop",
}
_NAMES = {name.replace("_", ""): name for name in _OPTIONS} | _OTHER_NAMES


def rule_name(rule: str | type) -> str:
    """The rule of a name or a learner class that has a reference."""
    name = rule.__name__ if isinstance(rule, type) else rule
    found = None
    if isinstance(name, str):
        found = _NAMES.get(name.strip().lower().replace("_", ""))
    if found is None:
        raise ValueError(
            message(
                f"there is no reference for the rule {name!r}.",
                why=f"references exist for {', '.join(_OPTIONS)}",
                do="choose one of them, or compare with bptt_grad",
            )
        )
    return found


def definition(rule: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The defining equations of a rule, and their constants."""
    known = _OPTIONS[rule]
    required = {k for k, v in known.items() if v is REQUIRED}
    if not required <= set(options) <= set(known):
        raise TypeError(
            message(
                f"options {sorted(options)} of {rule}.",
                why=f"its options are {sorted(known)}, {sorted(required)} without a default",
                do="pass exactly these by name",
            )
        )
    chosen = {**known, **options}
    match rule:
        case "pp_prop" | "ostl_feedforward":
            return "pp_prop", {"decays": _decays(chosen["decay_or_rank"])}
        case "snap":
            n = count("n", chosen["n"], "it counts the steps that influence may take")
            return "snap", {"n": n}
        case "ostl_recurrent":
            return "snap", {"n": 1}
        case "uoro":
            return "rtrl", {}
        case "eprop":
            return "eprop", {
                "kappa": chosen["kappa_filter_decay"],
                "group_feedback": chosen["group_feedback"],
            }
        case "rflo":
            return "rflo", {k: chosen[k] for k in ("leak", "group_feedback")}
        case "ottt":
            _one_of("mode", chosen["mode"], ("A", "O"))
        case "otpe":
            _one_of("mode", chosen["mode"], ("full", "approx"))
            return "otpe", {
                "leak": chosen["leak"],
                "mode": chosen["mode"],
                "clip": chosen["trace_clip_abs"],
            }
        case "decolle":
            chosen["local_loss"] = chosen["local_loss"] or _half_square
            chosen["observe"] = chosen["observe"] or (lambda h: h[..., 0])
    return rule, chosen


def options_of(learner: Any, rule: str) -> dict[str, Any]:
    """The options of a learner as its reference takes them."""
    known = _OPTIONS[rule]
    if "decay_or_rank" in known:
        return {"decay_or_rank": (learner.decay_x, learner.decay_f)}
    drawn = rule == "rflo" or getattr(learner, "feedback", "symmetric") == "random"
    given = {"modulator", "y_target", "synthesizer"} & set(known)
    if drawn or given:
        raise ValueError(
            message(
                f"the reference of {rule} needs more than the learner.",
                why="it has random feedback" if drawn else f"it is called with {min(given)}",
                do="call reference_grad with these as options",
            )
        )
    return {k: getattr(learner, k) for k in known if k not in _FEEDBACK}


def count(name: str, value: Any, why: str) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(message(f"{name}={value!r}.", why=why, do="pass a positive integer"))
    return int(value)


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            message(f"{name}={value!r}.", why=f"known are {known}", do="choose one of them")
        )


def _decays(value: Any) -> tuple[float, float]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    x, f = ((d - 1) / (d + 1) if isinstance(d, (int, np.integer)) else float(d) for d in pair)
    return x, f


def _half_square(found: Any, target: Any) -> Any:
    return 0.5 * jnp.sum((found - target) ** 2)
