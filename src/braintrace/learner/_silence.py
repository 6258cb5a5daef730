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
from jax import lax

from .._errors import warn
from .._online import Stream
from ..frontend import Split, Traced, operands
from ..ops import ETPPrimitive, compiled
from ..program import Equation, Program, bind, deep_equations, evaluate, is_jax_primitive, is_traced

Array = jax.Array
_PROBE = np.array([-1e6, -50, -1, -0.3, 0.3, 1, 50, 1e6])


def warn_if_silent(model: Any, stream: Stream, traced: Traced, split: Split) -> bool:
    """Warn if no unit spikes in this sequence; returns whether that could be decided."""
    graph = split.call.params["marker"].graph
    program: Program = graph.step.program
    states, consts = traced.values(), traced.consts
    if any(split.call.params["mapped"] or ()):
        return True  # a program of one sample
    if any(map(is_traced, jax.tree.leaves((stream, states, consts)))):
        return False
    with jax.ensure_compile_time_eval():
        spikes = frozenset(e for e in deep_equations(program) if is_spike(e))
        if not spikes or not spikes.issubset(program.equations):
            return True  # none, or inside of loops and branches
        spiked = compiled(partial(_spiked, traced.program, split.call, spikes), graph.structures)
        silent = not spiked(consts, states, jax.tree.leaves(stream.arrays))
    if silent:
        warn(
            "no unit spiked in this sequence.",
            where=type(model).__name__,
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
    program: Program,
    call: Equation,
    spikes: frozenset[Equation],
    consts: tuple[Array, ...],
    states: list[Array],
    sequences: list[Array],
) -> Array:
    """Whether a unit spikes in a sequence; stops at the first spike."""
    step, length = call.params["marker"].graph.step, sequences[0].shape[0]
    leaves = (*step.hidden, *step.others)

    def advance(at: tuple[Array, list[Array], Array]) -> tuple[Array, list[Array], Array]:
        time, states, _ = at
        seen = [jnp.zeros((), bool)]

        def inside(eqn: Equation, values: list[Any]) -> list[Any]:
            outs = bind(eqn, values)
            if eqn in spikes:
                seen.append((outs[0] != 0).any())
            return outs

        def outside(eqn: Equation, values: list[Any]) -> list[Any]:
            if eqn is not call:
                return bind(eqn, values)
            of_call = operands(call, values)
            entering = dict(zip(leaves, (*of_call.hidden, *of_call.others), strict=True))
            entering |= dict(zip(step.params, of_call.params, strict=True))
            inputs = [*of_call.args, *step.program.inputs[step.n_args :]]
            for leaf, value in entering.items():
                inputs[leaf.position] = value
            outs = evaluate(step.program, of_call.consts, inputs, inside)
            return [*outs[: step.n_outs], *(outs[leaf.output] for leaf in leaves)]

        values = evaluate(program, consts, [*(a[time] for a in sequences), *states], outside)
        return time + 1, values[len(values) - len(states) :], jnp.stack(seen).any()

    more = lambda at: (at[0] < length) & ~at[2]
    start = (jnp.zeros((), int), list(states), jnp.zeros((), bool))
    return lax.while_loop(more, advance, start)[2]
