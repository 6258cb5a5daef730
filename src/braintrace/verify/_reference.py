"""Learning rules evaluated from their defining equations: the door to `_rules`."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._errors import message
from ..learner import check_vjp_method
from ._dense import dense
from ._options import count, definition, rule_name
from ._rules import follows_factors, rule_on
from ._sequence import Grads, StepFn, check


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
        rule: the name of a rule, as `braintrace.compile` takes it, or the learner class. Of 'uoro'
            and 'kf_rtrl' the mean over their random signs.
        model: the model itself, states initialised.
        step_fn: `step_fn(model, *slices)` calls the model and returns the scalar loss of a step.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        vjp_method: 'single-step', or 'multi-step' for windows.
        chunk_size: steps per window; the last one may be shorter.
        reduction: 'sum' of the steps' losses, or their 'mean'.
        **options: those of the rule, as the learner takes them. What the learner is called with is
            a sequence: `y_target` of osttp and decolle, `modulator` of three_factor (an array, or
            a dict of them by group number). What it draws at random is given: `feedback` of eprop
            and rflo, by weight path or operator number the operand of the reverse pass;
            `group_feedback`, a list of one matrix per group; `readouts` of decolle.
            `synthesizer` of dni takes and returns a list of (*varshape, states), one per group.

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
    kind, chosen = definition(rule_name(rule), options)
    windows = _windows(vjp_method, chunk_size)
    folds = follows_factors(kind, chosen)
    seen = dense(model, step_fn, *sequences, feedback=options.get("feedback"), folds=folds)
    total = rule_on(seen, kind, windows, **chosen)
    scale = 1.0 if reduction == "sum" else 1.0 / length
    return {p: _scaled(v, scale) for p, v in total.items()}


# ------------------------------------------------------------------------------------- the door


def _windows(vjp_method: str, chunk_size: Any) -> int | None:
    check_vjp_method(vjp_method)
    chunk_size = count("chunk_size", chunk_size, "it counts the steps of a window")
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


def _scaled(tree: Any, scale: float) -> Any:
    return jax.tree.map(lambda a: a * scale, tree)
