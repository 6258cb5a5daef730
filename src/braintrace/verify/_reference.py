"""Learning rules evaluated from their defining equations: the door to `_rules`."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import message
from ..learner import check_vjp_method
from ._dense import dense
from ._rules import rule_on
from ._sequence import Grads, StepFn, check

_NAMES = {
    "d_rtrl": "d_rtrl",
    "paramdimvjpalgorithm": "d_rtrl",
    "pp_prop": "pp_prop",
    "es_d_rtrl": "pp_prop",
    "esd_rtrl": "pp_prop",
    "iodimvjpalgorithm": "pp_prop",
    "snap": "snap",
    "rtrl": "rtrl",
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
        rule: 'd_rtrl', 'pp_prop', 'snap' or 'rtrl', or the learner class.
        model: the model itself, states initialised.
        step_fn: `step_fn(model, *slices)` calls the model and returns the scalar loss of a step.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        vjp_method: 'single-step', or 'multi-step' for windows.
        chunk_size: steps per window; the last one may be shorter.
        reduction: 'sum' of the steps' losses, or their 'mean'.
        **options: `decay_or_rank` of pp_prop, `n` of snap, as the learner takes them.

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
    chosen = _options(kind, options)
    total = rule_on(dense(model, step_fn, *sequences), kind, windows, **chosen)
    scale = 1.0 if reduction == "sum" else 1.0 / length
    return {p: _scaled(v, scale) for p, v in total.items()}


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
    chunk_size = _count("chunk_size", chunk_size, "it counts the steps of a window")
    if vjp_method == "multi-step":
        return chunk_size
    if chunk_size != 1:
        raise ValueError(
            message(
                f"chunk_size={chunk_size} with vjp_method='single-step'.",
                why="a window needs reverse mode inside the window",
                do="pass vjp_method='multi-step'",
            )
        )
    return None


_OPTIONS = {"pp_prop": {"decay_or_rank"}, "snap": {"n"}}


def _options(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    known = _OPTIONS.get(kind, set())
    if set(options) != known:
        raise TypeError(
            message(
                f"options {sorted(options)} of {kind}.",
                why=f"its options are {sorted(known)}",
                do="pass exactly these by name",
            )
        )
    if kind == "snap":
        return {"n": _count("n", options["n"], "it counts the steps that influence may take")}
    if kind != "pp_prop":
        return {}
    value = options["decay_or_rank"]
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    x, f = ((d - 1) / (d + 1) if isinstance(d, (int, np.integer)) else float(d) for d in pair)
    return {"decays": (x, f)}


def _count(name: str, value: Any, why: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(message(f"{name}={value!r}.", why=why, do="pass a positive integer"))
    return int(value)


def _scaled(tree: Any, scale: float) -> Any:
    return jax.tree.map(lambda a: a * scale, tree)
