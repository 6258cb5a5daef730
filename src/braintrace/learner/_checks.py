"""What a user can get wrong in compiling or calling a learner, each with its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import (
    CompilationError,
    dotted,
    error,
    message,
    type_error,
    value_error,
)
from .._online import Wording
from .._online import check_exact as refuse_inexact
from ..graph import Graph
from ..program import PyTree
from ..report import CompilationReport
from ._data import Call

_BE_EXACT = (
    "use RTRL (exact for what `update` computes, memory parameters x states), change the model (a "
    "weight of a plain product goes into braintrace.matmul, a bias too), compile the whole step "
    "(what step_fn does before the learner call, or keeps, in braintrace.compile(lambda x: ..., "
    "rule, x)), or leave out strict=True: in one window over the "
    "whole sequence nothing is left out, whatever the rule"
)
USE_LESS_MEMORY = (
    "use D_RTRL, SnAp with a small n or windows (vjp_method='multi-step'), make the batch smaller, "
    "or raise memory_limit"
)
VJP_METHODS = {
    "single-step": "a gradient per step, recurrent entries cut",
    "multi-step": "a gradient per window, in which nothing is cut",
}
FOR_MODULES = Wording(
    no_state=message(
        "the model has no hidden state.",
        why="online learning follows states from step to step; `update` reads and writes none",
        do="keep the recurrent variables in brainstate.HiddenState and call "
        "brainstate.nn.init_all_states(model) before compiling",
    ),
    no_relation="no weight reaches a hidden state through an ETP operator (eligibility trace "
    "propagation: an operator whose weights the compiler tracks).",
    no_operator="`update` uses no ETP operator",
    use_an_operator="use a layer of braintrace.nn, or write braintrace.matmul(x, w) (or another "
    "operator of braintrace) instead of x @ w for the weights to be trained online",
    recognise="braintrace.compile(..., unmarked=True), which recognises plain JAX, see "
    "docs/how-to/bring-your-own-cell.md",
)


def check_exact(report: CompilationReport, rule: str, among: Any = None) -> None:
    """Refuse a learner whose gradient leaves something out; `among` some parameters, by path.

    A parameter that `update` does not use is judged when a step function uses it.
    """
    judged = [p for p in report.parameters.values() if among is None or p.path in among]
    refuse_inexact((p for p in judged if p.how != "none"), rule, _BE_EXACT)


def check_arguments(example: PyTree, called: PyTree) -> None:
    """Refuse arguments (trees of shapes) of other shapes or units than the compiled ones."""
    layout = lambda tree: (jax.tree.structure(tree), [a.shape for a in jax.tree.leaves(tree)])
    if layout(called) == layout(example):
        return
    do = (
        "call it with one step of these shapes; for another batch size call "
        "learner.reset(batch_size=...), for sequences (time is axis 0) use learner.etrace_grad, "
        "or wrap them in MultiStepData"
    )
    if sorted(example[1]) != sorted(called[1]):
        do = "tell compile the keywords of `update`: braintrace.compile(..., kwargs={...})"
    raise value_error(
        f"the learner is compiled for {_describe(example)}, but called with {_describe(called)}.",
        why="states and traces have the shapes and units of the compiled inputs",
        do=do,
    )


def check_precision(states: Mapping[tuple, brainstate.State]) -> None:
    """Refuse states of 64 bits while JAX computes in 32."""
    config: Any = jax.config
    if config.jax_enable_x64:
        return
    for path, state in states.items():
        leaves = jax.tree.leaves(state._read_value())  # `value` would count as a use
        types = [a.dtype for a in leaves if isinstance(a, jax.Array)]
        wide = [t for t in types if t.name in ("float64", "complex128", "int64", "uint64")]
        if wide:
            raise value_error(
                f"state {dotted(path)} is {wide[0]}, and jax_enable_x64 is switched off.",
                why="the model was initialised with 64 bits; a step would turn it into 32",
                do="switch it on again, jax.config.update('jax_enable_x64', True), or build "
                "the model and its learner again",
            )


def check_lockstep(call: Call, besides: Call) -> None:
    """Refuse sequences of different lengths for the rule and the model."""
    if besides.length not in (None, call.length):
        raise value_error(
            f"the rule takes {besides.length} steps, the model "
            f"{'one' if call.length is None else call.length}.",
            why="all MultiStepData arguments advance in lockstep",
            do="give them the same number of steps",
        )


def check_layout(graph: Graph, compiled: Graph) -> None:
    """Refuse a step whose traces would live elsewhere than the stored ones."""
    if graph is compiled:
        return
    same = len(graph.relations) == len(compiled.relations) and all(
        a.weight_path == b.weight_path
        and a.keys == b.keys
        and a.slots.shape == b.slots.shape
        and np.array_equal(a.slots.destination, b.slots.destination)
        for a, b in zip(graph.relations, compiled.relations, strict=True)
    )
    if not same:
        raise changed_structure()


def changed_structure() -> CompilationError:
    """The error of a step whose weights have other traces than the stored ones."""
    return CompilationError(
        message(
            "the model's weights reach other states than when it was compiled.",
            why="a Python-side switch or attribute changed the structure of `update`; the stored "
            "traces belong to the old one",
            do="build a new learner after changing the model's structure",
        )
    )


def not_compiled(
    what: str = "the learner is used", kind: type[Exception] = ValueError
) -> Exception:
    """The error of what a learner does before there is a graph."""
    return error(kind)(
        f"{what} before it is compiled.",
        why="example inputs give the shapes of its traces; there are none yet",
        do="call learner.compile_graph(*example_inputs) first, or build the learner with "
        "braintrace.compile(model, rule, *example_inputs)",
    )


def shape_of(x: PyTree) -> jax.ShapeDtypeStruct:
    """Shape and type of an input; what is no array or number is refused."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise type_error(
            f"an input has type {type(x).__name__}: {x!r}.",
            why="the step is traced on arrays and numbers",
            do="convert it with jnp.asarray, or give it to the model as an attribute",
        )
    return _not_empty(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)))


def shape_of_example(x: PyTree) -> jax.ShapeDtypeStruct:
    """`shape_of` an example input, which may be a shape itself."""
    return _not_empty(x) if isinstance(x, jax.ShapeDtypeStruct) else shape_of(x)


def _not_empty(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if 0 in x.shape:
        raise value_error(
            f"an input of shape {x.shape} has no elements.",
            why="nothing can be learned from it",
            do="leave empty batches out",
        )
    return x


def _describe(tree: PyTree) -> str:
    args, kwargs = tree
    named = (f"{k}={_describe_one(v)}" for k, v in kwargs.items())
    return f"({', '.join((*map(_describe_one, args), *named))})"


def _describe_one(value: PyTree) -> str:
    parts = []
    for x in jax.tree.leaves(value, is_leaf=lambda v: isinstance(v, u.Quantity)):
        unit = f" {x.unit}" if isinstance(x, u.Quantity) else ""
        parts.append(f"{x.dtype}{list(x.shape)}{unit}")
    return parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"
