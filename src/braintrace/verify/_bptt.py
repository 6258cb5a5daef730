"""Backpropagation through time: ordinary reverse mode through all steps."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ._sequence import Grads, StepFn, check, checked_loss, parameters, restored


def bptt_grad(
    model: brainstate.nn.Module,
    step_fn: StepFn,
    *sequences: Any,
    weights: Any = None,
    reduction: str = "sum",
) -> Grads:
    """Differentiate the loss of a sequence by ordinary reverse mode through all its steps.

    The model runs from its present states and is left as it was.

    Args:
        model: the model itself, states initialised.
        step_fn: `step_fn(model, *slices)` calls the model and returns the scalar loss of a step.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        weights: states to differentiate; default all parameters.
        reduction: 'sum' of the steps' losses, or their 'mean'.

    Returns:
        Gradients by path, like `learner.etrace_grad(..., reduction='sum')`.

    Example:
        >>> import brainstate, jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(cell)
        >>> step = lambda net, x: (net(x) ** 2).sum()
        >>> grads = braintrace.verify.bptt_grad(cell, step, jnp.ones((5, 3)))
        >>> grads['Wz', 'weight']['bias'].shape
        (4,)
    """
    length = check(model, step_fn, sequences, reduction)
    states = parameters(model, weights)
    loss = checked_loss(step_fn)

    def total() -> Any:
        for state in states.values():
            _ = state.value  # a parameter the step never reads has the gradient zero
        losses = brainstate.transform.for_loop(lambda *s: loss(model, *s), *sequences)
        return losses.sum() if reduction == "sum" else losses.sum() / length

    with restored(model):
        grad: Any = brainstate.transform.grad(total, states)
        run: Any = brainstate.transform.jit(grad)
        grads = run()
    return jax.tree.map(jax.numpy.asarray, dict(grads))
