"""Any function of states as a program: the user's step around a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import brainstate
import jax
from jax import Array

from ..program import Atom, Program, PyTree, Var, flatten, prune
from ._brainstate import write_leaves


@dataclass(frozen=True, eq=False, slots=True)
class StateLeaf:
    """One array of a state: its variable before and its value after."""

    state: brainstate.State
    index: int
    entry: Var
    exit: Atom
    written: bool


@dataclass(frozen=True, eq=False, slots=True)
class Traced:
    """One traced call of a function; `arguments` and `results` are those of the function alone."""

    program: Program
    consts: tuple[Array, ...]
    arguments: tuple[Var, ...]
    results: tuple[Atom, ...]
    out_tree: jax.tree_util.PyTreeDef
    leaves: tuple[StateLeaf, ...]

    def values(self) -> list[jax.Array]:
        """The current arrays of the states."""
        return [jax.tree.leaves(leaf.state.value)[leaf.index] for leaf in self.leaves]

    def write(self, indices: Sequence[int], arrays: Sequence[jax.Array]) -> None:
        """Store new arrays in the leaves at these indices."""
        leaves = [self.leaves[i] for i in indices]
        write_leaves([(leaf.state, leaf.index) for leaf in leaves], arrays)


def trace_function(function: Callable[..., PyTree], *args: PyTree, pruned: bool = True) -> Traced:
    """Trace a function of arrays and states; `pruned` leaves out what no result depends on."""
    stateful = brainstate.transform.StatefulFunction(function, return_only_write=False)
    stateful.make_jaxpr(*args)
    key = stateful.get_arg_cache_key(*args)
    trace = stateful.get_state_trace_by_cache(key)
    out_shapes, _ = stateful.get_out_shapes_by_cache(key)
    program, consts = flatten(stateful.get_jaxpr_by_cache(key))
    program = prune(program) if pruned else program
    n_args, n_outs = len(jax.tree.leaves(args)), len(jax.tree.leaves(out_shapes))
    leaves, at = [], 0
    for state, written in zip(trace.states, trace.been_writen, strict=True):
        for i in range(len(jax.tree.leaves(state.value))):
            entry, exit = program.inputs[n_args + at], program.outputs[n_outs + at]
            leaves.append(StateLeaf(state, i, entry, exit, written))
            at += 1
    return Traced(
        program,
        consts,
        program.inputs[:n_args],
        program.outputs[:n_outs],
        jax.tree.structure(out_shapes),
        tuple(leaves),
    )
