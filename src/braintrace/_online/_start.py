"""A learned initial state: a function of the parameters, which the first step starts from.

    step'(params, (h, first), x) = step(params, where(first, f(params), h), x)

With `first` true at step 1 alone this is an ordinary step for every rule. At step 1 nothing comes
from the entry, D_1 = 0, and the parameters of f have the tail dh_1/dh_0 of the `where`; later their
tail is zero and their trace goes on by D_t. So it is as if it had started as df/dθ:

    eps_1 = dh_1/dh_0 df/dθ,    eps_t = D_t eps_{t-1}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from .._errors import type_error
from ..graph import bits_of, reach
from ..ops import element_wise
from ..program import PyTree, flatten
from ._tree import UNNAMED, is_floating, split, strong


@dataclass(frozen=True, slots=True)
class Initial:
    """A function from the parameters to a state; which leaves of that depend on them."""

    function: Callable[[PyTree], PyTree]
    learned: tuple[bool, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Start:
    """Whether the next step is the first one, and what that starts from."""

    first: Any
    initial: Initial = field(metadata={"static": True})


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class Started:
    """A state with its start, as the state of a step; leaves of the state keep their names."""

    state: PyTree
    start: Start

    def tree_flatten_with_keys(self) -> tuple[Any, Initial]:
        children = ((UNNAMED, self.state), (GetAttrKey("first step"), self.start.first))
        return children, self.start.initial

    @classmethod
    def tree_unflatten(cls, initial: Initial, children: Any) -> Started:
        return cls(children[0], Start(children[1], initial))


def is_function(state: PyTree) -> bool:
    """Whether a state is a function of the parameters; a module that can be called is a pytree."""
    return callable(state) and jax.tree.leaves(state) == [state]


def started(function: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """The initial state that a function gives; with its start, if it depends on parameters."""
    try:
        state = jax.tree.map(strong, function(params))
    except TypeError as cause:
        cause.add_note("the initial state is a function of the parameters, lambda params: state")
        raise
    layout, trained, fixed = split(params)

    def floating(*trained: Any) -> list[Any]:
        leaves = jax.tree.leaves(function(layout.join(trained, fixed)))
        return [leaf if is_floating(leaf) else np.zeros(()) for leaf in leaves]

    program, _ = flatten(jax.make_jaxpr(floating)(*trained))
    reached = reach(program, dict.fromkeys(program.inputs, 1))
    learned = tuple(bool(bits_of(o, reached)) for o in program.outputs)
    if not any(learned):
        return state
    if len(learned) != len(jax.tree.leaves(state)):
        raise type_error(
            "the initial state has another structure each time that its function is called.",
            why="it is called again in the first step, for its derivative",
            do="let the function depend on the parameters alone",
        )
    return Started(state, Start(np.ones((), bool), Initial(function, learned)))


def run_started(
    step: Callable[..., PyTree], params: PyTree, at: PyTree, inputs: tuple[Any, ...]
) -> PyTree:
    """A step from a state, or from its start."""
    if not isinstance(at, Started):
        return step(params, at, *inputs)
    initial, first = at.start.initial, at.start.first
    leaves, tree = jax.tree.flatten(at.state)
    begin = jax.tree.leaves(initial.function(params))
    # With h0 = b (a parameter) and h' = 0.5 h + x: step 1 is 0.5 where(True, b, h) + x, so b has
    # the tail 0.5 and its trace becomes 0.5; step 2 has the tail 0 and D = 0.5, and the trace 0.25.
    # That is dh_2/db. `element_wise` makes an operator of b, as only operators have traces.
    for i, learned in enumerate(initial.learned):
        if learned:
            value = jnp.asarray(begin[i], leaves[i].dtype)
            leaves[i] = jnp.where(first, element_wise(value), leaves[i])
    result = step(params, jax.tree.unflatten(tree, leaves), *inputs)
    if not isinstance(result, tuple) or len(result) != 2:
        return result  # refused by the caller
    after = Start(jnp.zeros((), bool), initial)
    return Started(result[0], after), result[1]
