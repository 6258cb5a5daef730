"""Backpropagation through time: ordinary reverse mode through all steps."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._control import Apply, bind_quietly, opened, quiet, run
from ._sequence import (
    Grads,
    Path,
    StepFn,
    at,
    check,
    checked_loss,
    parameters,
    restored,
    traced_step,
    unvector,
    vector,
)


def bptt_grad(
    model: brainstate.nn.Module,
    step_fn: StepFn,
    *sequences: Any,
    weights: Any = None,
    reduction: str = "sum",
) -> Grads:
    """Differentiate the loss of a sequence by ordinary reverse mode through all its steps.

    JAX has no reverse mode through a `while_loop`. Where the loss depends on one, the same
    gradient is computed in forward mode, one direction per number in the weights: slow.

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

    grads: Any = None
    with restored(model):
        grad: Any = brainstate.transform.grad(total, states)
        run: Any = brainstate.transform.jit(grad)
        try:
            grads = dict(run())
        except ValueError as error:
            if "Reverse-mode differentiation does not work" not in str(error):
                raise
    if grads is None:
        with restored(model):
            grads = _forward(model, step_fn, sequences, states)
        scale = 1.0 if reduction == "sum" else 1.0 / length
        grads = jax.tree.map(lambda g: g * scale, grads)
    return jax.tree.map(jax.numpy.asarray, grads)


def _forward(model: Any, step_fn: StepFn, sequences: Any, states: dict[Path, Any]) -> Grads:
    """The gradient of the summed loss in forward mode."""
    program, consts, trace = traced_step(model, step_fn, at(sequences, 0))
    chosen = {p: jax.tree.leaves(s.value) for p, s in states.items()}
    leaves = [leaf for found in chosen.values() for leaf in found]
    opens = opened(program, quiet)
    apply: Apply = lambda eqn, values, feed: (bind_quietly(eqn, values), {})

    def total(theta: Any) -> Any:
        values = iter(unvector(theta, leaves))
        moved = {id(states[p]): [next(values) for _ in found] for p, found in chosen.items()}
        start = [v for s in trace.states for v in moved.get(id(s), jax.tree.leaves(s.value))]

        def step(carry: list[Any], slices: Any) -> Any:
            args = [*jax.tree.leaves(slices), *carry]
            loss, *new = run(program, consts, args, apply, opens)[0]
            return new, loss

        return jax.lax.scan(step, start, sequences)[1].sum()

    gradient = jax.jit(jax.jacfwd(total))(vector(leaves))
    parts = iter(unvector(gradient, leaves))
    out = {}
    for path, found in chosen.items():
        grads = [next(parts) for _ in found]  # of a complex entry dL/d(re) - i dL/d(im)
        grads = [jax.numpy.conj(g) if jax.numpy.iscomplexobj(g) else g for g in grads]
        out[path] = jax.tree.unflatten(jax.tree.structure(states[path].value), grads)
    return out
