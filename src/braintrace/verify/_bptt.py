"""Backpropagation through time: ordinary reverse mode through all steps."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ..program import Apply, bind_quietly, opened, quiet, run
from ._sequence import (
    Grads,
    Module,
    Path,
    PyTree,
    StepFn,
    Weights,
    at,
    check,
    parameters,
    restored,
    total_loss,
    traced_step,
    unvector,
    vector,
)


def bptt_grad(
    model: Module,
    step_fn: StepFn,
    *sequences: PyTree,
    weights: Weights = None,
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
    loss = total_loss(model, step_fn, sequences, reduction)

    def total() -> jax.Array:
        for state in states.values():
            _ = state.value  # a parameter the step never reads has the gradient zero
        return loss()

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


def _forward(
    model: Module, step_fn: StepFn, sequences: PyTree, states: dict[Path, brainstate.State]
) -> Grads:
    """The gradient of the summed loss in forward mode."""
    program, consts, trace = traced_step(model, step_fn, at(sequences, 0))
    values = {id(s): s.value for s in states.values()}
    leaves, tree = jax.tree.flatten(values)
    opens = opened(program, quiet)
    apply: Apply = lambda eqn, values, feed: (bind_quietly(eqn, values), {})

    def total(theta: jax.Array) -> jax.Array:
        inputs = jax.tree.unflatten(tree, unvector(theta, leaves))
        start = jax.tree.leaves([inputs.get(id(s), s.value) for s in trace.states])

        def step(carry: list[jax.Array], slices: PyTree) -> tuple[list[jax.Array], jax.Array]:
            args = [*jax.tree.leaves(slices), *carry]
            loss, *new = run(program, consts, args, apply, opens)[0]
            return new, loss

        return jax.lax.scan(step, start, sequences)[1].sum()

    gradient = jax.jit(jax.jacfwd(total))(vector(leaves))
    # of a complex entry dL/d(re) - i dL/d(im)
    grads = [g.conj() if jax.numpy.iscomplexobj(g) else g for g in unvector(gradient, leaves)]
    by_state = jax.tree.unflatten(tree, grads)
    return {path: by_state[id(s)] for path, s in states.items()}
