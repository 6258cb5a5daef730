"""The linear program of the paths a rule keeps: from state entries and operator outputs to exits.

`tangent_program` differentiates the step once, forward, with every trained operator's output
replaced by a constant plus a perturbation. What remains between the tangents is linear, so the
analysis of which element reaches which (`_influence`) has only linear primitives to understand,
and the values of D and f come from running the very same equations (`push`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._errors import CompilationError, NotSupportedError, not_supported
from ..program import (
    Atom,
    Const,
    Equation,
    Feed,
    Outcome,
    Placeholder,
    Program,
    Var,
    at_line_of,
    bind,
    bind_quietly,
    close,
    equations_inside,
    evaluate,
    inner_jaxprs,
    marked,
    opened,
    prune,
    quiet,
    run,
    run_one,
    shape_of,
    trace,
    unmarked,
)
from ._reach import reach
from ._sites import Site
from ._step import Component, Step, components_of, join, split

_SAME_IF_AS_LARGE = {"broadcast_in_dim", "reshape"}  # the elements stay in order


@dataclass(frozen=True, eq=False, slots=True)
class Tangent:
    """The tangent program of a step, from the tangents of its states and operators' outputs."""

    program: Program
    components: tuple[Component, ...]
    entries: tuple[Var, ...]  # of the state components
    taps: tuple[tuple[Var, ...], ...]  # per operator the real part of y, and the imaginary part
    exits: tuple[Atom, ...]
    xs: tuple[Any, ...]  # what is recorded of the operators
    ys: tuple[Atom | None, ...] = ()  # their outputs, None in a body of control flow
    # The equation of the step that an equation comes from, bodies left out.
    origins: Mapping[Equation, Equation] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[Var, ...]:
        """Everything that tangents start from, in the order of source indices."""
        return (*self.entries, *(v for parts in self.taps for v in parts))

    def tap_sources(self, i: int) -> range:
        """The source indices of the i-th operator's output."""
        first = len(self.entries) + sum(map(len, self.taps[:i]))
        return range(first, first + len(self.taps[i]))


def tangent_program(
    step: Step, consts: Sequence[Any], sites: Sequence[Site], crossing: bool = False
) -> Tangent:
    """Differentiate the step with a tap added to the output of every site.

    Paths through an operator are left out, or kept if `crossing`.
    """
    program = step.program
    components = components_of(step)
    index = {site.equation: i for i, site in enumerate(sites)}
    marks = {eqn: i for i, eqn in enumerate(program.equations)}

    opens = opened(program, lambda eqn: index.get(eqn, quiet(eqn)))
    ones = _ratios(program)
    # What no state depends on, such as the output's, needs no forward derivative.
    top = {*program.equations}
    beside = top - {*prune(program, [step.exit(leaf) for leaf in step.hidden]).equations}

    point = [[shape_of(v) for v in program.consts], [shape_of(v) for v in program.inputs]]
    entry_shapes = jax.eval_shape(
        lambda *h: split(components, h), *(shape_of(step.entry(leaf)) for leaf in step.hidden)
    )
    tap_shapes = [_parts_shape(site) for site in sites]

    def fun(values, inputs, d_entry, d_taps):
        def apply(eqn, vals, feed):
            if eqn in ones:
                return [jnp.ones(eqn.outputs[0].shape, eqn.outputs[0].dtype)], {}
            i = index.get(eqn)
            mark = marks.get(eqn)
            if crossing and i is not None:
                vals = _apart_from_weights(sites[i], vals)
            if eqn in beside:
                vals = lax.stop_gradient(vals)
            outs = _differentiated(eqn if mark is None else marked(eqn, mark), vals)
            if i is None:
                return outs, {}
            (y,) = outs
            y = y if crossing else lax.stop_gradient(y)
            tap = feed[i][0] if len(feed[i]) == 1 else lax.complex(*feed[i])
            x = lax.stop_gradient(sites[i].operator.recorded(vals))
            return [y + tap.astype(y.dtype)], {i: (x, None if sites[i].levels else y)}

        def exits_of(entry, taps):
            leaves = join(components, entry, len(step.hidden))
            for leaf, value in zip(step.hidden, leaves, strict=True):
                inputs[leaf.position] = value
            outs, seen = run(program, values, inputs, apply, opens, dict(enumerate(taps)))
            exits = split(components, [outs[leaf.output] for leaf in step.hidden])
            return exits, [seen[i] for i in range(len(sites))]

        entry = split(components, [inputs[leaf.position] for leaf in step.hidden])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tap_shapes)
        _, d_exit, seen = jax.jvp(exits_of, (entry, zeros), (d_entry, d_taps), has_aux=True)
        return d_exit, [x for x, _ in seen], [y for _, y in seen]

    linear, extra = trace(fun, *point, entry_shapes, tap_shapes)
    linear = close(linear, extra)
    linear = prune(linear, linear.outputs)  # side effects happen once, in the step itself
    _check_pure(linear)
    linear, origins = _unmarked(linear, program)
    ins = iter(linear.inputs[len(program.consts) + len(program.inputs) :])
    outs = linear.outputs
    seen = iter(outs[len(components) :])
    records = [site.operator.record for site in sites]
    xs = tuple(jax.tree.map(lambda _: next(seen), record) for record in records)
    return Tangent(
        program=linear,
        components=components,
        entries=tuple(next(ins) for _ in components),
        taps=tuple(tuple(next(ins) for _ in parts) for parts in tap_shapes),
        exits=tuple(outs[: len(components)]),
        xs=xs,
        ys=tuple(None if site.levels else next(seen) for site in sites),
        origins=origins,
    )


def _apart_from_weights(site: Site, values: Sequence[Any]) -> list[Any]:
    """The operands of a site without the tangents of its weights.

    The gradient of a weight is carried on to all parameters that it is computed from, also through
    other operators: tangents through the weight would count these twice.
    """
    traced = site.steady and site.closed is None
    own = {site.operator.positions[k] for k, leaves in site.leaves.items() if leaves and traced}
    return [lax.stop_gradient(v) if n in own else v for n, v in enumerate(values)]


def _unmarked(linear: Program, program: Program) -> tuple[Program, dict[Equation, Equation]]:
    equations, origins = [], {}
    for eqn in linear.equations:
        plain, origin = unmarked(eqn, program.equations)
        equations.append(plain)
        if origin is not None:
            origins[plain] = origin
    return replace(linear, equations=tuple(equations)), origins


def _ratios(program: Program) -> set[Equation]:
    """The quotients of a value by itself, as in a softmax over one element."""
    same: dict[Atom, Atom] = {}
    ratios = set()
    for eqn in program.equations:
        read = [same.get(a, a) for a in eqn.inputs]
        if eqn.name == "div" and read[0] is read[1]:
            ratios.add(eqn)
        elif eqn.name in _SAME_IF_AS_LARGE and isinstance(read[0], Var):
            if read[0].size == eqn.outputs[0].size:
                same[eqn.outputs[0]] = read[0]
    return ratios


def _differentiated(eqn: Equation, values: list[Any]) -> list[Any]:
    """Apply an equation under forward differentiation; say where it fails.

    A backward rule that is not linear in the cotangent is cut: the tangent is a placeholder, which
    nothing evaluates.
    """
    try:
        return bind_quietly(eqn, values)
    except (CompilationError, NotSupportedError):
        raise
    except Exception as error:
        if eqn.name == "custom_vjp_call":
            return _without_tangent(eqn, values)
        first = str(error).strip().splitlines()[:1]
        raise not_supported(
            f"{eqn.name} has no forward derivative.",
            where=eqn.where(),
            why=f"{type(error).__name__}: {first[0] if first else 'no message'}; a trace is "
            "moved by the forward derivative of the step",
            do="write what is computed here with functions that JAX can differentiate forward, or "
            "put it under stop_gradient",
        ) from error


_NO_TANGENT = Placeholder("custom_vjp_call")


def _without_tangent(eqn: Equation, values: list[Any]) -> list[Any]:
    """Apply an equation with a backward rule that is no linear function of the cotangent."""

    @jax.custom_jvp
    def call(*args):
        return bind(eqn, args)

    @call.defjvp
    def _(primals, tangents):
        varying = [t for t in tangents if t.dtype != jax.dtypes.float0]
        shapes = tuple(map(shape_of, eqn.outputs))
        with at_line_of(eqn):
            out = _NO_TANGENT.bind(*varying, outs=shapes, mapped=None, same=())
        return call(*primals), out

    return call(*values)


def _check_pure(program: Program) -> None:
    for eqn in program.equations:
        if eqn.effects:
            raise not_supported(
                f"{eqn.name} with a side effect computes a value that a trace depends on.",
                where=eqn.where(),
                why="the derivative of the step is evaluated at the values of the step, and a "
                "second call may return others",
                do="call it outside of the step and pass its result as an input",
            )


def _parts_shape(site: Site) -> list[jax.ShapeDtypeStruct]:
    dtype = jnp.finfo(site.y.dtype).dtype  # of the real part
    shape = jax.ShapeDtypeStruct(site.lengths + site.y.shape, dtype)
    return [shape] * (2 if site.y.is_complex else 1)


class Pushed:
    """The primal part of a tangent program evaluated at a point; `push` runs its linear part.

    `cut` holds the equations, in bodies too, whose tangent is dropped; `bodies` the outputs of the
    control-flow equations that are tangents; `rebind` applies an equation, those `inside` of bodies
    too; `cached` are values that are computed already. A tangent of None is zero.
    """

    def __init__(
        self,
        tangent: Tangent,
        values: Sequence[Any],
        cut: frozenset[Equation],
        bodies: Mapping[Equation, tuple[int, ...]],
        rebind: Callable[[Equation, Sequence[Any]], list[Any]] = bind,
        cached: Mapping[Atom, Any] | None = None,
        inside: Collection[Equation] = (),
    ):
        self._tangent, self._cut, self._rebind = tangent, cut, rebind
        program = tangent.program
        special = lambda e: e in cut or e in inside or (e.name == "while" and rebind is not bind)
        opens = opened(program, lambda e: -1 if special(e) else None)
        if rebind is not bind:  # JAX cannot transpose a `while` that is run body by body
            opens = {e: sites for e, sites in opens.items() if e.name != "while"}
        self._opens = opens
        tangents = set(tangent.entries) | {v for tap in tangent.taps for v in tap}
        primals = [v for v in program.inputs if v not in tangents]
        self._primal: dict[Var, Any] = dict(zip(primals, values, strict=True))
        self._linear: list[tuple[Equation, frozenset[Var]]] = []
        dropped: set[Any] = set()  # zero: not even a product with what is infinite is computed
        for eqn in program.equations:
            varies = any(isinstance(a, Var) and a in tangents for a in eqn.inputs)
            opaque = eqn in bodies or any(True for _ in inner_jaxprs(eqn.params))
            if not opaque and (eqn in cut or (not varies and not dropped.isdisjoint(eqn.inputs))):
                dropped.update(eqn.outputs)
                continue
            # A body computes values and tangents in one: the values at zero tangents.
            joint = eqn in bodies or (eqn in cut and any(True for _ in inner_jaxprs(eqn.params)))
            if cached and all(o in cached for o in eqn.outputs):
                self._primal.update((o, cached[o]) for o in eqn.outputs)
            elif joint or not varies:
                out = bind(eqn, [self._read(a) for a in eqn.inputs])
                self._primal.update(zip(eqn.outputs, out, strict=True))
                if eqn in cut and eqn.name != "shard_map":  # there one cannot be told from others
                    dropped.update(o for o in eqn.outputs if o in _tangents(tangent))
            if varies and eqn not in cut:
                outs = [eqn.outputs[k] for k in bodies[eqn]] if eqn in bodies else eqn.outputs
                tangents.update(outs)
                self._linear.append((eqn, frozenset(outs)))

    def _read(self, atom: Atom) -> Any:
        if isinstance(atom, Const):
            return atom.value
        value = self._primal.get(atom)
        return jnp.zeros(atom.shape, atom.dtype) if value is None else value

    def _apply(self, eqn: Equation, values: list[Any], feed: Feed) -> Outcome:
        if eqn in self._cut:
            return _zeros(eqn), {}
        if eqn.name == "while" and (inner := self._cut.intersection(equations_inside(eqn))):
            program, consts = _without(eqn, inner)
            return evaluate(program, consts, values, self._rebind), {}
        return self._rebind(eqn, values), {}

    def rebound(self, rebind: Callable[[Equation, Sequence[Any]], list[Any]]) -> Pushed:
        """The same point, its linear part applied by another function."""
        other = copy(self)
        other._rebind = rebind
        return other

    @property
    def exit_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the exits' tangents."""
        return [shape_of(v) for v in self._tangent.entries]

    def xs(self) -> list[Any]:
        """What is recorded of the operators."""
        return jax.tree.map(self._read, list(self._tangent.xs))

    def push(self, seeds: dict[Var, Array]) -> list[Array | None]:
        """Tangents at the exits for tangents `seeds` at entries or taps."""
        env: dict[Any, Any] = dict(seeds)
        for eqn, tangent_outs in self._linear:
            if not any(a in env for a in eqn.inputs if isinstance(a, Var)):
                continue
            values = [env[a] if a in env else self._read(a) for a in eqn.inputs]
            outs = run_one(eqn, values, self._apply, self._opens, {})[0]
            pairs = zip(eqn.outputs, outs, strict=True)
            env.update((var, value) for var, value in pairs if var in tangent_outs)
        return [env.get(o) if isinstance(o, Var) else None for o in self._tangent.exits]


@lru_cache(maxsize=64)
def _tangents(tangent: Tangent) -> frozenset[Var]:
    """The variables of the program that depend on a tangent; other outputs of a body are values."""
    return frozenset(reach(tangent.program, dict.fromkeys(tangent.sources, 1)))


def _zeros(eqn: Equation) -> list[Array]:
    return [jnp.zeros(v.shape, v.dtype) for v in eqn.outputs]


@lru_cache(maxsize=64)
def _without(eqn: Equation, cut: frozenset[Equation]) -> tuple[Program, tuple[Any, ...]]:
    """The equation as a program in which what is cut inside is zero."""
    shapes = [shape_of(a) for a in eqn.inputs]
    opens = opened(Program((), (), (eqn,), ()), lambda e: -1 if e in cut else None)

    def apply(e: Equation, values: list[Any], feed: Feed) -> Outcome:
        return (_zeros(e) if e in cut else bind(e, values, cached=True)), {}

    program, consts = trace(
        lambda *values: run_one(eqn, list(values), apply, opens, {})[0], *shapes
    )
    at_user_line = [replace(e, source=eqn.source, callers=eqn.callers) for e in program.equations]
    return replace(program, equations=tuple(at_user_line)), consts
