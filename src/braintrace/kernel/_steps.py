"""The body of a loop as steps on tiles of units.

The body is traced; what does not depend on the loop is computed before it, and the rest falls into
parts that share no value. Each is arithmetic on tiles (`_tiles`) of as many axes of units as it can
have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..program import Atom, Const, Equation, Program, PyTree, Var, bind, is_traced, trace
from ._chunks import TiledStep
from ._tiles import Leaf, Refused, Tiles, Value, check, loaded, stored

Array = jax.Array

_TILE = 64  # units per program: two warps, a unit per thread
_MOST_STATES = 2  # values of a unit in a loop split over time: of four, XLA compiles for a minute


class Component(NamedTuple):
    """Equations of a body that share values, and the numbers of what they read and compute."""

    equations: list[Equation]
    carried: list[int]
    sliced: list[int]
    results: list[int]
    fixed: list[Var]


def loop_kernel(
    body: Callable, carry: PyTree, xs: PyTree, length: int, reverse: bool
) -> Callable[..., tuple[Any, Any]]:
    """The loop as a function `(interpret, carry, xs)`; each of its components is a kernel."""
    states, tree = jax.tree.flatten(carry)
    arrays, slices = jax.tree.flatten(xs)
    n, out_trees = len(states), []

    def flat(*values):
        both = jax.tree.unflatten(tree, values[:n]), jax.tree.unflatten(slices, values[n:])
        new, ys = body(*both)
        out_trees.append(jax.tree.structure(ys))
        return [*jax.tree.leaves(new), *jax.tree.leaves(ys)]

    like = [jax.ShapeDtypeStruct(jnp.shape(s), jnp.result_type(s)) for s in states]
    like += [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in arrays]
    program, values = trace(flat, *like)
    pairs = zip(program.inputs[:n], program.outputs[:n], strict=True)
    if any((v.shape, v.dtype) != (o.shape, o.dtype) for v, o in pairs):
        raise Refused("a state changes its type in a step")
    inside, fixed = _hoisted(program, values)
    parts = _components(program, inside, fixed, n)
    plans = [(part, _planned(program, part, fixed, n)) for part in parts]

    def run(interpret: bool, carry: PyTree, xs: PyTree) -> tuple[Any, Any]:
        states, arrays = jax.tree.leaves(carry), jax.tree.leaves(xs)
        out: list[Any] = [None] * len(program.outputs)
        for part, plan in plans:
            constants = [fixed[v] for v in part.fixed]
            operands = [states[i] for i in part.carried], [arrays[i] for i in part.sliced]
            after = plan.call(*operands, constants, length, reverse, interpret)
            for i, value in zip((*part.carried, *part.results), after, strict=True):
                out[i] = value
        return jax.tree.unflatten(tree, out[:n]), jax.tree.unflatten(out_trees[-1], out[n:])

    return run


def _hoisted(program: Program, values: Sequence[Any]) -> tuple[list[Equation], dict[Var, Any]]:
    """The equations that depend on the loop, and the values of all others."""
    fixed: dict[Var, Any] = dict(zip(program.consts, values, strict=True))
    inside = []
    for eqn in program.equations:
        if eqn.effects:
            raise Refused.at(eqn, "has a side effect")
        number = eqn.name == "broadcast_in_dim" and prod(eqn.inputs[0].shape) == 1
        if number or any(isinstance(a, Var) and a not in fixed for a in eqn.inputs):
            inside.append(eqn)
        else:
            operands = [a.value if isinstance(a, Const) else fixed[a] for a in eqn.inputs]
            fixed.update(zip(eqn.outputs, bind(eqn, operands), strict=True))
    return inside, fixed


def _components(
    program: Program, inside: Sequence[Equation], fixed: Mapping[Var, Any], n: int
) -> list[Component]:
    """The parts of a body that share no value: layers of other shapes are other kernels."""
    # Union-find over the values of the body. Two layers, where nothing but constants is shared:
    #
    #     h' = a * h + x     {h, h', x}        one kernel of units like h
    #     g' = b * g + u     {g, g', u}        another, of units like g: a and b are `fixed`
    #
    # If u read h' they would be one component, and run as one if h and g have the same units.
    parent: dict[Var, Var] = {}

    def root(var: Var) -> Var:
        while parent.setdefault(var, var) is not var:
            var = parent[var]
        return var

    def join(atoms: Sequence[Atom]) -> None:
        first, *others = [a for a in atoms if isinstance(a, Var) and a not in fixed]
        for a in others:
            parent[root(a)] = root(first)

    if any(isinstance(o, Const) or o in fixed for o in program.outputs):
        raise Refused("a result is constant")
    for eqn in inside:
        join([*eqn.inputs, *eqn.outputs])
    for entry, new in zip(program.inputs[:n], program.outputs[:n], strict=True):
        join([entry, new])
    parts: dict[Var, Component] = {}

    def part(var: Any) -> Component:
        return parts.setdefault(root(var), Component([], [], [], [], []))

    for i, var in enumerate(program.inputs):
        numbers = part(var).carried if i < n else part(var).sliced
        numbers.append(i if i < n else i - n)
    for i, out in enumerate(program.outputs[n:], n):
        part(out).results.append(i)
    for eqn in inside:
        part(eqn.outputs[0]).equations.append(eqn)
    for p in parts.values():
        read = dict.fromkeys(a for e in p.equations for a in e.inputs if isinstance(a, Var))
        p.fixed.extend(v for v in read if v in fixed and not _is_number(fixed[v]))
    return [p for p in parts.values() if p.carried or p.results]


def _is_number(value: Any) -> bool:
    return not is_traced(value) and np.ndim(value) == 0


def _planned(program: Program, part: Component, fixed: Mapping[Var, Any], n: int) -> TiledStep:
    """The component on as many unit axes as it can have: the axes behind them are short."""
    states = [program.inputs[i] for i in part.carried]
    slices = [program.inputs[n + i] for i in part.sliced]
    shapes = [v.shape for v in states or slices if v.shape]
    axes = 0
    for sizes in zip(*shapes, strict=False):
        if len(set(sizes)) > 1:
            break
        axes += 1
    refusals = []
    # States (16, 64) and (16, 64, 3) agree in two axes: tiles of the 1024 units, of which the
    # second has three values each. If a step reads across one of these (a mean over the 64), the
    # attempt with (16,) makes 64 short places of it, which are too many for one unit, and the
    # first refusal is the one that is told.
    for k in range(axes, -1, -1):
        units = shapes[0][:k] if shapes else ()
        try:
            return _on_tiles(program, part, fixed, states, slices, units)
        except Refused as refused:
            refusals.append(refused)
    raise refusals[0]


def _on_tiles(
    program: Program,
    part: Component,
    fixed: Mapping[Var, Any],
    states: Sequence[Var],
    slices: Sequence[Var],
    units: tuple[int, ...],
) -> TiledStep:
    tile = min(_TILE, 1 << (prod(units) - 1).bit_length())
    outputs = [program.outputs[i] for i in (*part.carried, *part.results)]
    kinds = (states, slices, part.fixed, outputs[len(states) :])
    leaves = [[Leaf.of(v, units) for v in kind] for kind in kinds]
    *entries, results = leaves
    inputs = [leaf for kind in entries for leaf in kind]

    def step(*tiles: Array) -> list[Array]:
        items = iter(tiles)
        env: dict[Atom, Value] = {v: Value.number(c) for v, c in fixed.items() if _is_number(c)}
        env.update((v, loaded(items, leaf)) for v, leaf in zip(read, inputs, strict=True))
        Tiles(units).run(part.equations, env)
        exits = zip(outputs, (*entries[0], *results), strict=True)
        return [tile_ for o, leaf in exits for tile_ in stored(env[o], leaf, tile)]

    read = [*states, *slices, *part.fixed]
    shapes = [
        jax.ShapeDtypeStruct((tile,) if leaf.unit else (), dtype)
        for leaf in inputs
        for _ in range(leaf.parts)
        for dtype in leaf.stored
    ]
    tiles, consts = trace(step, *shapes)
    check(tiles)
    numbers = tuple(np.asarray(c)[()] for c in consts)
    n = sum(leaf.parts * len(leaf.stored) for leaf in entries[0])
    whole = all(leaf.lead == units and leaf.dtype.kind in "fc" for leaf in entries[0])
    affine = whole and 0 < n <= _MOST_STATES and _is_affine(tiles, n)
    return TiledStep(tiles, numbers, units, tile, affine, *leaves)


def _is_affine(step: Program, n: int) -> bool:
    """Whether the first `n` outputs of a step on tiles are affine in its first `n` inputs."""
    # h' = d * h + x: degrees h 1, d * h 1, h' 1: a chunk of steps is the map A h + b. h * h has
    # degree 2; so has whatever is not known to be linear, and `select_n` by a test on h.
    degree: dict[Atom, int] = dict.fromkeys(step.inputs[:n], 1)
    for eqn in step.equations:
        each = [degree.get(a, 0) for a in eqn.inputs]
        if eqn.name == "mul":
            total = sum(each)
        elif eqn.name in ("add", "sub", "add_any", "neg", "broadcast_in_dim") or (
            eqn.name in ("div", "select_n") and not each[eqn.name == "div"]
        ):
            total = max(each)
        else:
            total = 2 * max(each, default=0)
        degree |= dict.fromkeys(eqn.outputs, total)
    return all(degree.get(o, 0) <= 1 for o in step.outputs[:n])
