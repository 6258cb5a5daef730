"""One step whose ordinary derivative is the single-step rule's: recurrent entries are cut.

A state that enters an operator through a recurrent connection must not pass a cotangent there, but
the very same intermediate values may carry one elsewhere. So a value is computed once per *world*,
the set of state leaves it sees detached; an operator reads its input in the world that adds its own
recurrent entries. Worlds differ in derivative only, never in value: XLA merges them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .._jaxpr import Const, Equation, Var, bind
from ..graph import Graph

Apply = Callable[[Equation, list[Any]], list[Any]]


def evaluate_cut(
    graph: Graph, consts: Sequence[Any], inputs: Sequence[Any], apply: Apply = bind
) -> list[Any]:
    """Run the step with every recurrent entry detached."""
    program, reach = graph.step.program, graph.leaf_reach
    wanted: dict[Var, set[int]] = {}

    def want(atom: Any, world: int) -> None:
        if isinstance(atom, Var):
            wanted.setdefault(atom, set()).add(world & reach.get(atom, 0))

    for out in program.outputs:
        want(out, 0)
    worlds_of: list[set[int]] = []
    for eqn in reversed(program.equations):
        worlds = set().union(*(wanted.get(o, ()) for o in eqn.outputs)) or {0}
        worlds_of.append(worlds)
        for world in worlds:
            for i, atom in enumerate(eqn.inputs):
                want(atom, world | _cut(graph, eqn, i))

    env: dict[tuple[Var, int], Any] = {}
    entry = {graph.step.entry(leaf): 1 << k for k, leaf in enumerate(graph.step.hidden)}
    for var, value in zip((*program.consts, *program.inputs), (*consts, *inputs), strict=True):
        env[var, 0] = value
        if var in entry:
            env[var, entry[var]] = lax.stop_gradient(value)

    def read(atom: Any, world: int) -> Any:
        if isinstance(atom, Const):
            return atom.value
        return env[atom, world & reach.get(atom, 0)]

    for eqn, worlds in zip(program.equations, reversed(worlds_of), strict=True):
        for world in sorted(worlds):
            values = [read(a, world | _cut(graph, eqn, i)) for i, a in enumerate(eqn.inputs)]
            for var, value in zip(eqn.outputs, apply(eqn, values), strict=True):
                env[var, world & reach.get(var, 0)] = value
    return [read(o, 0) for o in program.outputs]


def _cut(graph: Graph, eqn: Equation, position: int) -> int:
    mask = graph.cut_entries.get(eqn, 0)
    return mask if mask and position == eqn.primitive.x_invar_index else 0
