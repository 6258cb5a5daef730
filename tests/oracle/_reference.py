"""A rule's gradient by its public name and options."""

from __future__ import annotations

from typing import Any

from braintrace.verify import Comparison
from braintrace.verify._compare import comparison, online_grad
from braintrace.verify._sequence import Grads, StepFn, check

from ._dense import dense
from ._options import count, definition, options_of, rule_name
from ._rules import follows_factors, rule_on


def reference_grad(
    rule: str | type,
    model: Any,
    step_fn: StepFn,
    *sequences: Any,
    vjp_method: str = "single-step",
    chunk_size: int = 1,
    **options: Any,
) -> Grads:
    """Evaluate a learning rule from its defining equations with dense Jacobians.

    The model runs from its present states with zero traces and is left as it was.

    Args:
        rule: the name of a rule, as `braintrace.compile` takes it, or the learner class. Of 'uoro'
            and 'kf_rtrl' the mean over their random signs.
        model: the model itself, states initialised.
        step_fn: `step_fn(model, *slices)` calls the model and returns the scalar loss of a step.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        vjp_method: 'single-step', or 'multi-step' for windows.
        chunk_size: steps per window; the last one may be shorter.
        **options: those of the rule, as the learner takes them. What the learner is called with is
            a sequence: `y_target` of osttp and decolle, `modulator` of three_factor (an array, or
            a dict of them by group number). What it draws at random is an argument: `feedback` of
            eprop and rflo, by weight path or operator number the operand of the reverse pass;
            `group_feedback`, a list of one matrix per group; `readouts` of decolle.
            `synthesizer` of dni takes and returns a list of (*varshape, states), one per group.

    Returns:
        Gradients by path, like `learner.etrace_grad(..., reduction='sum')`.
    """
    check(model, step_fn, sequences)
    kind, constants = definition(rule_name(rule), options)
    window = _window(vjp_method, chunk_size)
    folds = follows_factors(kind, constants)
    record = dense(model, step_fn, *sequences, feedback=options.get("feedback"), folds=folds)
    return rule_on(record, kind, window, **constants)


def compare_to_rule(
    learner: Any, step_fn: StepFn, *sequences: Any, chunk_size: int | None = None
) -> Comparison:
    """Compare a learner with the definition of its rule, like `braintrace.verify.compare`."""
    rule = rule_name(type(learner))
    truth = reference_grad(
        rule,
        learner.model4compile,
        step_fn,
        *sequences,
        vjp_method=learner.vjp_method,
        chunk_size=chunk_size or 1,
        **options_of(learner, rule),
    )
    online = online_grad(learner, step_fn, *sequences, chunk_size=chunk_size)
    return comparison(online, truth, "its rule")


def _window(vjp_method: str, chunk_size: Any) -> int | None:
    chunk_size = count("chunk_size", chunk_size)
    if vjp_method == "multi-step":
        return chunk_size
    if vjp_method != "single-step":
        raise ValueError(f"vjp_method={vjp_method!r} is neither 'single-step' nor 'multi-step'")
    if chunk_size != 1:
        raise ValueError(f"chunk_size={chunk_size} without vjp_method='multi-step'")
    return None
