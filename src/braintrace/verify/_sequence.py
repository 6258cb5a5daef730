"""What the references share: checked sequences, parameters by path, states put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_takes, message, type_error, value_error
from ..graph import explicit
from ..learner._driver import REDUCTIONS
from ..learner._sequences import length_of
from ..program import Program, failing_line, flatten
from ..rules import check_choice

PyTree: TypeAlias = Any  # of arrays
Path = tuple[Any, ...]
StepFn = Callable[..., jax.Array]
Module: TypeAlias = brainstate.nn.Module
Weights: TypeAlias = (
    brainstate.State | Mapping[Path, brainstate.State] | Iterable[brainstate.State] | None
)
Loss = Callable[[], jax.Array]
Grads = dict[Path, PyTree]


def check(model: object, step_fn: object, sequences: PyTree, reduction: str = "sum") -> int:
    """Refuse what cannot be stepped through; returns the number of steps."""
    if not isinstance(model, brainstate.nn.Module):
        raise type_error(
            f"expected a brainstate.nn.Module, got {type(model).__name__}.",
            why="a reference runs the model itself and reads its parameters by path",
            do="pass the model, not the learner: learner.model4compile",
        )
    if not callable(step_fn):
        raise type_error(
            f"step_fn has type {type(step_fn).__name__}.",
            why="you define the loss of a step",
            do="pass step_fn=lambda net, x, y: loss(net(x), y)",
        )
    check_choice("reduction", reduction, REDUCTIONS)
    length = length_of(sequences)
    check_takes(
        step_fn,
        ["the network", *["a slice"] * len(sequences)],
        "verify calls step_fn(net, *slices), with the model or a learner of it as the network",
        "call the argument, step_fn=lambda net, x: loss(net(x)), not the learner itself; "
        "step_fn(*slices) is for learner.etrace_grad",
    )
    return length


def at(sequences: PyTree, t: int | slice) -> PyTree:
    """The slices of step t, or of a range of steps."""
    return jax.tree.map(lambda a: a[t], sequences)


def checked_loss(step_fn: StepFn) -> StepFn:
    """`step_fn` that insists on one real number."""

    def call(*args: PyTree) -> jax.Array:
        try:
            loss = step_fn(*args)
        except Exception as error:
            slices = jax.tree.map(jax.typeof, args[1:])
            error.add_note(
                message(
                    f"step_fn failed on the slices {', '.join(map(str, jax.tree.leaves(slices)))}.",
                    where=failing_line(error),
                    why="it raised the error above, with the present states of the model",
                    do="see the error; if shapes do not fit, pass sequences with time along axis "
                    "0 (xs, not xs[0]), and give the states the batch size of the slices: "
                    "brainstate.nn.init_all_states(model, batch_size=...)",
                )
            )
            raise
        if np.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), np.floating):
            raise value_error(
                f"step_fn returned {jax.tree.map(jax.typeof, loss)}.",
                why="each step has one real loss",
                do="reduce the loss over the batch and features in step_fn",
            )
        return loss

    return call


def total_loss(model: Module, step_fn: StepFn, sequences: PyTree, reduction: str) -> Loss:
    """The loss of a sequence from the present states, a function of nothing else."""
    loss = checked_loss(step_fn)

    def total() -> jax.Array:
        losses = brainstate.transform.for_loop(lambda *s: loss(model, *s), *sequences)
        return losses.sum() if reduction == "sum" else losses.sum() / len(losses)

    return total


def traced_step(model: Module, step_fn: StepFn, slices: PyTree) -> tuple[Program, Any, Any]:
    """The program of one step from (slices, states) to (loss, states), and what brainstate saw."""
    loss = checked_loss(step_fn)
    stateful = brainstate.transform.StatefulFunction(
        lambda *s: loss(model, *s), return_only_write=False
    )
    stateful.make_jaxpr(*slices)
    key = stateful.get_arg_cache_key(*slices)
    trace = stateful.get_state_trace_by_cache(key)
    program, consts = flatten(stateful.get_jaxpr_by_cache(key))
    states = program.outputs[1:]
    carried = list(zip(program.inputs[len(program.inputs) - len(states) :], states, strict=True))
    return explicit(program, 1, carried, loss=0) or program, consts, trace


def parameters(model: Module, weights: Weights = None) -> dict[Path, brainstate.State]:
    """The states to differentiate, by path; default all parameters."""
    if weights is None:
        return dict(brainstate.graph.states(model, brainstate.ParamState).items())
    if isinstance(weights, Mapping):
        return dict(weights.items())
    paths = {id(s): p for p, s in brainstate.graph.states(model).items()}
    states = [weights] if isinstance(weights, brainstate.State) else list(weights)
    if missing := [s for s in states if id(s) not in paths]:
        raise value_error(
            f"{len(missing)} of the weights do not belong to the model.",
            why="gradients are returned by path in the model",
            do="pass states of the model, or a dict from path to state",
        )
    return {paths[id(s)]: s for s in states}


def vector(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays as one real vector: each array's real part, then its imaginary part if it has one."""
    parts = [p.ravel() for a in arrays for p in ((a.real, a.imag) if jnp.iscomplexobj(a) else (a,))]
    return jnp.concatenate(parts) if parts else jnp.zeros(0)


def unvector(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a real vector; the inverse of `vector`."""
    out, start = [], 0
    for a in like:
        real = flat[start : start + a.size].reshape(a.shape)
        start += a.size
        if jnp.iscomplexobj(a):
            real = jax.lax.complex(real, flat[start : start + a.size].reshape(a.shape))
            start += a.size
        out.append(real.astype(a.dtype))
    return out


@contextlib.contextmanager
def restored(*modules: Module) -> Iterator[None]:
    """Put every state of the modules, and the default random key, back afterwards.

    Traces that a learner only had in between are gone again.
    """
    states = [s for m in modules for s in brainstate.graph.states(m).values()] + [
        brainstate.random.DEFAULT
    ]
    saved = [s.value for s in states]
    traces = [(m.etraces, set(m.etraces)) for m in modules if hasattr(m, "etraces")]
    try:
        yield
    finally:
        for kept, before in traces:
            for name in kept.keys() - before:
                del kept[name]
        for state, value in zip(states, saved, strict=True):
            state.value = value
