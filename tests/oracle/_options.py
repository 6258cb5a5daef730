"""The rules that have a reference: their names, and their options as the learners take them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

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
    """The rule of a name or a learner class."""
    name = rule.__name__ if isinstance(rule, type) else rule
    key = name.strip().lower().replace("_", "")
    if key not in _NAMES:
        raise ValueError(f"the rule {name!r} has no reference; {', '.join(_OPTIONS)} have one")
    return _NAMES[key]


def definition(rule: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The defining equations of a rule, and their constants."""
    defaults = _OPTIONS[rule]
    required = {k for k, v in defaults.items() if v is REQUIRED}
    if not required <= set(options) <= set(defaults):
        raise TypeError(f"{rule} takes {sorted(defaults)}, at least {sorted(required)}")
    o = {**defaults, **options}
    match rule:
        case "pp_prop" | "ostl_feedforward":
            return "pp_prop", {"decays": _decays(o["decay_or_rank"])}
        case "snap":
            return "snap", {"n": count("n", o["n"])}
        case "ostl_recurrent":
            return "snap", {"n": 1}
        case "uoro":
            return "rtrl", {}
        case "eprop":
            return "eprop", {
                "kappa": o["kappa_filter_decay"],
                "group_feedback": o["group_feedback"],
            }
        case "rflo":
            return "rflo", {k: o[k] for k in ("leak", "group_feedback")}
        case "otpe":
            return "otpe", {"leak": o["leak"], "mode": o["mode"], "clip": o["trace_clip_abs"]}
        case "decolle":
            o["local_loss"] = o["local_loss"] or _half_square
            o["observe"] = o["observe"] or (lambda h: h[..., 0])
    return rule, o


def options_of(learner: Any, rule: str) -> dict[str, Any]:
    """The options of a learner as its reference takes them."""
    names = _OPTIONS[rule]
    if "decay_or_rank" in names:
        return {"decay_or_rank": (learner.decay_x, learner.decay_f)}
    random = rule == "rflo" or getattr(learner, "feedback", "symmetric") == "random"
    if random or {"modulator", "y_target", "synthesizer"} & set(names):
        raise ValueError(f"the options of {rule} are not on the learner: call reference_grad")
    return {k: getattr(learner, k) for k in names if k not in _FEEDBACK}


def count(name: str, value: Any) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r} is no positive integer")
    return int(value)


def _decays(value: Any) -> tuple[float, float]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    x, f = ((d - 1) / (d + 1) if isinstance(d, (int, np.integer)) else float(d) for d in pair)
    return x, f


def _half_square(out: Any, target: Any) -> Any:
    return 0.5 * jnp.sum((out - target) ** 2)
