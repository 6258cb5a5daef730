"""One step whose ordinary derivative is the single-step rule's: recurrent entries are cut.

A state that enters an operator through a recurrent connection must not pass a cotangent there, but
the very same intermediate values may carry one elsewhere. So a value is computed once per *world*,
the set of state leaves it sees detached; an operator reads its input in the world that adds its own
recurrent entries. Worlds differ in derivative only, never in value: XLA merges them again. A body
of control flow with such an operator inside runs all its worlds side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from .._control import Apply, Feed, Seen, through
from .._jaxpr import Atom, Body, Const, Equation, Program, Var, deep_equations
from ..graph import Graph, reach


def evaluate_cut(
    graph: Graph, consts: Sequence[Any], inputs: Sequence[Any], apply: Apply, feed: Feed
) -> list[Any]:
    """Run the step with every recurrent entry detached."""
    worlds = _Worlds(graph, apply, graph.links.from_leaves, graph.links.cut_entries, {})
    return worlds.start(consts, inputs, feed)


@dataclass(frozen=True, slots=True)
class Hook:
    """How a new state is made, and how others see it.

    `making` is added to the worlds in which the value is computed. In a world with the bit `own`
    the value is seen as it is, in others through `see`.
    """

    see: Callable[[Any], Any]
    own: int
    making: int


def evaluate_heard(
    graph: Graph,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    apply: Apply,
    feed: Feed,
    sees: Mapping[Var, Callable[[Any], Any]],
    how: str,
) -> list[Any]:
    """Run the step with its new states seen through `sees`, see `Rule.hears`.

    A new state that reads one it is together with sees that as it is. If they are heard "apart" or
    "sealed", it sees no entry of these either: what comes from them has to come through `sees`.
    Recurrent entries are cut, but for "sealed".
    """
    step = graph.step
    n, hooks = len(step.hidden), {}
    number = {step.exit(leaf): i for i, leaf in enumerate(step.hidden)}
    for var, see in sees.items():
        mask = graph.together[number[var]]
        as_it_is = mask << n  # no zero of any state it shares a trace with
        own = 1 << (n + number[var])
        hooks[var] = Hook(see, own, as_it_is if how == "seen" else as_it_is | mask)
    seeds = {step.entry(leaf): 1 << i for i, leaf in enumerate(step.hidden)}
    reached = reach(step.program, {**seeds, **{v: h.own for v, h in hooks.items()}})
    cuts = {} if how == "sealed" else graph.links.cut_entries
    return _Worlds(graph, apply, reached, cuts, hooks).start(consts, inputs, feed)


Wanted = dict[Var, dict[int, int]]  # by the world that matters to the value, one that was asked for


class _Worlds:
    def __init__(
        self,
        graph: Graph,
        apply: Apply,
        reach: Mapping[Var, int],
        cuts: Mapping[Equation, int],
        hooks: Mapping[Var, Hook],
    ):
        self.graph, self.apply, self.reach, self.cuts, self.hooks = graph, apply, reach, cuts, hooks
        self.inner: dict[Equation, set[int]] = {}
        for eqn in deep_equations(graph.step.program):
            equations = (e for b in eqn.bodies for e in deep_equations(b.program))
            masks = {cuts[e] for e in equations if e in cuts}
            if masks or eqn in graph.opens or eqn in graph.whiles:
                self.inner[eqn] = masks

    def start(self, consts: Sequence[Any], inputs: Sequence[Any], feed: Feed) -> list[Any]:
        """The outputs of the step itself, in the world in which nothing is detached."""
        step = self.graph.step
        program = step.program
        env: dict[tuple[Var, int], Any] = {}
        entry = {step.entry(leaf): 1 << k for k, leaf in enumerate(step.hidden)}
        for var, value in zip((*program.consts, *program.inputs), (*consts, *inputs), strict=True):
            env[var, 0] = value
            if var in entry:
                env[var, entry[var]] = lax.stop_gradient(value)
        outs, _ = self.run(program, env, [0], feed)
        return [o[0] for o in outs]

    def key(self, var: Var, world: int) -> tuple[Var, int]:
        """A value, in the world that matters to it."""
        return var, world & self.reach.get(var, 0)

    def keep(self, env: dict, var: Var, world: int, value: Any) -> None:
        hook = self.hooks.get(var)
        if hook is None or world & hook.making == hook.making:
            env[self.key(var, world)] = value

    def run(
        self, program: Program, env: dict[tuple[Var, int], Any], worlds: list[int], feed: Feed
    ) -> tuple[list[dict[int, Any]], Seen]:
        """The outputs in these worlds; `env` holds constants and inputs in all they need."""
        wanted: Wanted = {}
        for out in program.outputs:
            for world in worlds:
                self.want(wanted, out, world)
        plan: list[list[int]] = []
        for eqn in reversed(program.equations):
            needed = self.needed(wanted, eqn) or {worlds[0]}
            needed = self.closed(needed, self.inner.get(eqn, set()))
            plan.append(sorted(needed))
            for world in needed:
                for i, atom in enumerate(eqn.inputs):
                    self.want(wanted, atom, world | self.cut(eqn, i))

        def read(atom: Atom, world: int) -> Any:
            if isinstance(atom, Const):
                return atom.value
            hook = self.hooks.get(atom)
            if hook is None:
                return env[self.key(atom, world)]
            value = env[self.key(atom, world | hook.making)]
            return value if world & hook.own else hook.see(value)

        seen: Seen = {}
        for eqn, chosen in zip(program.equations, reversed(plan), strict=True):
            if eqn in self.inner:
                outs, found = self.open(eqn, read, chosen, feed)
                seen |= found
                for var, by_world in zip(eqn.outputs, outs, strict=True):
                    for world, value in by_world.items():
                        self.keep(env, var, world, value)
                continue
            for world in chosen:
                values = [read(a, world | self.cut(eqn, i)) for i, a in enumerate(eqn.inputs)]
                made, found = self.apply(eqn, values, feed)
                seen |= found
                for var, value in zip(eqn.outputs, made, strict=True):
                    self.keep(env, var, world, value)
        return [{w: read(o, w) for w in worlds} for o in program.outputs], seen

    def open(self, eqn: Equation, read: Any, worlds: list[int], feed: Feed) -> tuple[list, Seen]:
        """Apply control flow with operators inside, all worlds side by side."""
        values: list[Any] = [{w: read(a, w) for w in worlds} for a in eqn.inputs]
        if eqn.name == "cond":
            values[0] = read(eqn.inputs[0], worlds[0])  # a number has no derivative

        def inside(body: Body, given: Sequence[Any], feed: Feed) -> tuple[list[Any], Seen]:
            env: dict[tuple[Var, int], Any] = {
                (v, 0): c for v, c in zip(body.program.consts, body.values, strict=True)
            }
            for var, by_world in zip(body.program.inputs, given, strict=True):
                env |= {self.key(var, w): v for w, v in by_world.items()}
            return self.run(body.program, env, worlds, feed)

        mine = {i: feed[i] for i in self.graph.opens.get(eqn, ()) if i in feed}
        return through(eqn, values, inside, mine)

    def want(self, wanted: Wanted, atom: Atom, world: int) -> None:
        if isinstance(atom, Var):
            hook = self.hooks.get(atom)
            world = world if hook is None else world | hook.making
            wanted.setdefault(atom, {}).setdefault(self.key(atom, world)[1], world)

    def needed(self, wanted: Wanted, eqn: Equation) -> set[int]:
        """Worlds to apply an equation in: one for each set of worlds that differ to its outputs."""
        found: dict[tuple[int, ...], int] = {}
        for out in eqn.outputs:
            for world in wanted.get(out, {}).values():
                found.setdefault(tuple(self.key(o, world)[1] for o in eqn.outputs), world)
        return set(found.values())

    def closed(self, worlds: set[int], masks: set[int]) -> set[int]:
        """The worlds that a body needs: with the entries of any operators inside cut too."""
        while True:
            more = worlds | {w | m for w in worlds for m in masks}
            if more == worlds:
                return worlds
            worlds = more

    def cut(self, eqn: Equation, position: int) -> int:
        mask = self.cuts.get(eqn, 0)
        return mask if mask and position == self.graph.links.x_positions[eqn] else 0
