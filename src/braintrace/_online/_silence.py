"""A warning for a spiking network in which no unit spikes.

A spike is recognised by what its function does: an equation with a derivative of its own whose
values are 0 and 1 only. The first sequence of a learner that is called outside of `jit` is run
forward until the first spike, apart from the compiled loop, which pays nothing for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._errors import warn
from ..graph import Step
from ..ops import ETPPrimitive, compiled
from ..program import (
    Equation,
    any_traced,
    bind,
    cannot_be_mapped,
    deep_equations,
    evaluate,
    is_jax_primitive,
)
from ._calls import Call
from ._loop import Position, Weights

_PROBE = np.array([-1e6, -50, -1, -0.3, 0.3, 1, 50, 1e6])


def warn_if_silent(call: Call, name: str) -> bool:
    """Warn if no unit spikes in this sequence; returns whether that could be decided."""
    call, step = call.placed(), call.plan.problem.step
    at, inputs = call.at, call.stream.arrays.inputs
    if any_traced(call.weights, at.states, inputs):
        return False
    with jax.ensure_compile_time_eval():
        spikes = frozenset(e for e in deep_equations(step.program) if is_spike(e))
        if not spikes or not spikes.issubset(step.program.equations):
            return True  # none, or inside of loops and branches
        spiked = compiled(partial(_spiked, step, spikes), call.plan.graph.structures)
        silent = not spiked(call.weights, Position(at.states, None, None), inputs)
    if silent:
        warn(
            "no unit spiked in this sequence.",
            where=name,
            why="the currents do not reach the threshold, so the outputs do not depend on the "
            "input, and all that is left of the gradient is the surrogate derivative below the "
            "threshold",
            do="raise the input weights or the resistance of the neurons, or lower their threshold",
        )
    return True


def is_spike(eqn: Equation) -> bool:
    """Whether an equation is a step from 0 to 1 with a derivative of its own."""
    if isinstance(eqn.primitive, ETPPrimitive) or eqn.effects or len(eqn.outputs) != 1:
        return False
    if cannot_be_mapped(eqn):
        return False
    if is_jax_primitive(eqn) and eqn.name not in ("custom_jvp_call", "custom_vjp_call"):
        return False
    (out,), first = eqn.outputs, eqn.inputs[0]
    if first.shape != out.shape or not all(
        jnp.issubdtype(a.dtype, jnp.floating) for a in (first, out)
    ):
        return False
    rest = [jnp.zeros(a.shape, a.dtype) for a in eqn.inputs[1:]]
    at = lambda value: bind(eqn, [jnp.full(first.shape, value, first.dtype), *rest])[0]
    values = np.asarray(jax.jit(jax.vmap(at))(_PROBE)).reshape(len(_PROBE), -1)
    ends = not values[0].any() and bool((values[-1] == 1).all())
    return ends and bool(np.isin(values, (0, 1)).all())


def _spiked(
    step: Step, spikes: frozenset[Equation], weights: Weights, at: Position, inputs: Any
) -> Array:
    """Whether a unit spikes in a sequence; stops at the first spike."""
    length = jax.tree.leaves(inputs)[0].shape[0]
    leaves = (*step.hidden, *step.others)

    def advance(carry: tuple[Array, list[Array], Array]) -> tuple[Array, list[Array], Array]:
        time, states, _ = carry
        seen = [jnp.zeros((), bool)]

        def look(eqn: Equation, values: list[Any]) -> list[Any]:
            outs = bind(eqn, values)
            if eqn in spikes:
                seen.append((outs[0] != 0).any())
            return outs

        now = (*(a[time] for a in inputs), *weights.fixed)
        flat = step.arguments(now, weights.trained, states, ())
        outs = evaluate(step.program, weights.consts, flat, look)
        return time + 1, [outs[leaf.output] for leaf in leaves], jnp.stack(seen).any()

    more = lambda carry: (carry[0] < length) & ~carry[2]
    states = [*at.states[0], *at.states[1]]
    start = (jnp.zeros((), int), states, jnp.zeros((), bool))
    return lax.while_loop(more, advance, start)[2]
