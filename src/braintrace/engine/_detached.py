"""One step whose ordinary derivative is the single-step rule's: recurrent entries are cut.

A state that enters an operator through a recurrent connection must not pass a cotangent there, but
the very same intermediate values may carry one elsewhere. So a value is computed in several
*detached variants*, each named by a mask: the state leaves that it sees detached. An operator reads
its input in the variant that adds its own recurrent entries. Variants differ in derivative only,
never in value: XLA merges them again. A body of control flow with such an operator inside runs all
its variants at once.

With two units and one recurrent operator,

    u = tanh(h)                  h = [h0, h1]
    y = u @ R                    R feeds h back into itself: h is cut here
    h' = 0.5 * u + y             0.5 * u carries a cotangent, u @ R does not

there is one state leaf, so masks are 0 (nothing detached) and 1 (h detached). `y` asks for `u` in
variant 1, `h'` asks for `u` in variant 0:

    u[0] = tanh(h)               dh'/dh = 0.5 diag(1 - u^2), without R
    u[1] = tanh(stop_gradient(h))
    y[0] = u[1] @ R              y itself is wanted in variant 0: what it cuts is added to its input
    h'[0] = 0.5 * u[0] + y[0]

A value that does not depend on h, an input projection say, has one variant whatever is asked for
(`key`): a mask counts only as far as it meets the leaves that the value depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from ..graph import Graph, reach
from ..program import (
    Apply,
    Atom,
    Body,
    Const,
    Equation,
    Feed,
    Program,
    Seen,
    Var,
    deep_equations,
    through,
)
from ._rule import ExitCotangents


@dataclass(frozen=True, slots=True)
class Hook:
    """How a new state is computed, and how others see it.

    `while_computed` is added to the variants in which the value is computed. In a variant with the
    bit `own` the value is seen as it is, in others with `zero` added.
    """

    zero: Array
    own: int
    while_computed: int


def variants_of(
    graph: Graph, apply: Apply, zeros: Sequence[Array] | None, exits: ExitCotangents | None
) -> _Variants:
    """The step with recurrent entries detached, its new states seen with `zeros` added.

    A new state that reads one it shares a trace with sees that as it is. Unless the cotangents of
    `zeros` are those of its readers alone, it sees no entry of these either: what comes from them
    has to come through the zeros.
    """
    step = graph.step
    if zeros is None:
        return _Variants(graph, apply, graph.links.from_leaves, graph.links.cut_entries, {})
    n, hooks = len(step.hidden), dict[Var, Hook]()
    number = {step.exit(leaf): i for i, leaf in enumerate(step.hidden)}
    computed = {o for eqn in step.program.equations for o in eqn.outputs}
    for leaf, zero in zip(step.hidden, zeros, strict=True):
        var = step.exit(leaf)
        if var not in computed or var in hooks:  # one value in two states moves both of their slots
            continue
        mask = graph.shares_trace[number[var]]
        as_it_is = mask << n  # no zero of any state it shares a trace with
        while_computed = as_it_is if exits is ExitCotangents.READ else as_it_is | mask
        hooks[var] = Hook(zero, 1 << (n + number[var]), while_computed)
    seeds = {step.entry(leaf): 1 << i for i, leaf in enumerate(step.hidden)}
    reached = reach(step.program, {**seeds, **{v: h.own for v, h in hooks.items()}})
    cuts = {} if exits is ExitCotangents.UNCUT else graph.links.cut_entries
    return _Variants(graph, apply, reached, cuts, hooks)


# By the variant that matters to the value, one that was asked for.
Wanted = dict[Var, dict[int, int]]


class _Variants:
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

    def start(self, consts: Sequence[Array], inputs: Sequence[Array], feed: Feed) -> list[Array]:
        """The outputs of the step itself, in the variant in which nothing is detached."""
        step = self.graph.step
        program = step.program
        env: dict[tuple[Var, int], Array] = {}
        entry = {step.entry(leaf): 1 << k for k, leaf in enumerate(step.hidden)}
        for var, value in zip((*program.consts, *program.inputs), (*consts, *inputs), strict=True):
            env[var, 0] = value
            if var in entry:
                env[var, entry[var]] = lax.stop_gradient(value)
        outs, _ = self.run(program, env, [0], feed)
        return [o[0] for o in outs]

    def key(self, var: Var, variant: int) -> tuple[Var, int]:
        """A value, in the variant that matters to it."""
        return var, variant & self.reach.get(var, 0)

    def keep(self, env: dict, var: Var, variant: int, value: Array) -> None:
        hook = self.hooks.get(var)
        if hook is None or variant & hook.while_computed == hook.while_computed:
            env[self.key(var, variant)] = value

    def run(
        self, program: Program, env: dict[tuple[Var, int], Array], variants: list[int], feed: Feed
    ) -> tuple[list[dict[int, Any]], Seen]:
        """The outputs in these variants; `env` holds constants and inputs in all they need."""
        wanted: Wanted = {}
        for out in program.outputs:
            for variant in variants:
                self.want(wanted, out, variant)
        plan: list[list[int]] = []
        for eqn in reversed(program.equations):
            needed = self.needed(wanted, eqn) or {variants[0]}
            needed = self.closed(needed, self.inner.get(eqn, set()))
            plan.append(sorted(needed))
            for variant in needed:
                for i, atom in enumerate(eqn.inputs):
                    self.want(wanted, atom, variant | self.cut(eqn, i))

        def read(atom: Atom, variant: int) -> Any:
            if isinstance(atom, Const):
                return atom.value
            hook = self.hooks.get(atom)
            if hook is None:
                return env[self.key(atom, variant)]
            value = env[self.key(atom, variant | hook.while_computed)]
            return value if variant & hook.own else value + hook.zero

        seen: Seen = {}
        for eqn, variants_of in zip(program.equations, reversed(plan), strict=True):
            if eqn in self.inner:
                outs, recorded = self.open(eqn, read, variants_of, feed)
                seen |= recorded
                for var, by_variant in zip(eqn.outputs, outs, strict=True):
                    for variant, value in by_variant.items():
                        self.keep(env, var, variant, value)
                continue
            for variant in variants_of:
                values = [read(a, variant | self.cut(eqn, i)) for i, a in enumerate(eqn.inputs)]
                outs, recorded = self.apply(eqn, values, feed)
                seen |= recorded
                for var, value in zip(eqn.outputs, outs, strict=True):
                    self.keep(env, var, variant, value)
        return [{w: read(o, w) for w in variants} for o in program.outputs], seen

    def open(self, eqn: Equation, read: Any, variants: list[int], feed: Feed) -> tuple[list, Seen]:
        """Apply control flow with operators inside, all variants at once."""
        values: list[Any] = [{w: read(a, w) for w in variants} for a in eqn.inputs]
        if eqn.name == "cond":
            values[0] = read(eqn.inputs[0], variants[0])  # a number has no derivative

        def inside(body: Body, inputs: Sequence[Any], feed: Feed) -> tuple[list[Any], Seen]:
            env: dict[tuple[Var, int], Array] = {
                (v, 0): c for v, c in zip(body.program.consts, body.values, strict=True)
            }
            for var, by_variant in zip(body.program.inputs, inputs, strict=True):
                env |= {self.key(var, w): v for w, v in by_variant.items()}
            return self.run(body.program, env, variants, feed)

        mine = {i: feed[i] for i in self.graph.opens.get(eqn, ()) if i in feed}
        return through(eqn, values, inside, mine)

    def want(self, wanted: Wanted, atom: Atom, variant: int) -> None:
        if isinstance(atom, Var):
            hook = self.hooks.get(atom)
            variant = variant if hook is None else variant | hook.while_computed
            wanted.setdefault(atom, {}).setdefault(self.key(atom, variant)[1], variant)

    def needed(self, wanted: Wanted, eqn: Equation) -> set[int]:
        """Variants to apply an equation in, one for each that differs in its outputs."""
        by_masks: dict[tuple[int, ...], int] = {}
        for out in eqn.outputs:
            for variant in wanted.get(out, {}).values():
                by_masks.setdefault(tuple(self.key(o, variant)[1] for o in eqn.outputs), variant)
        return set(by_masks.values())

    def closed(self, variants: set[int], masks: set[int]) -> set[int]:
        """The variants that a body needs: with the entries of any operators inside cut too."""
        while True:
            more = variants | {w | m for w in variants for m in masks}
            if more == variants:
                return variants
            variants = more

    def cut(self, eqn: Equation, position: int) -> int:
        mask = self.cuts.get(eqn, 0)
        return mask if mask and position == self.graph.links.x_positions[eqn] else 0
