"""The states of many steps: only what feeds back into them is computed step by step.

The states of a step fall into groups that need each other; a group is run through all steps at
once, before the groups that read it. What a group reads of arguments and of earlier groups is
computed for all steps at once: an input projection, or that from one layer to the next, is one
matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from graphlib import TopologicalSorter
from itertools import pairwise
from operator import add, or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph import bits_of, indices_of, strongly_connected
from ..ops import ETPPrimitive, Operator
from ..program import (
    Atom,
    Const,
    Equation,
    Inlined,
    Program,
    Var,
    bind,
    cannot_be_mapped,
    prune,
)
from ._joined import products_joined
from ._loops import kernels_allowed, scan_time
from ._values import map_steps

Array = jax.Array


@dataclass(slots=True)
class StepValues:
    """Values of variables: the same at all steps, or with a leading axis of steps."""

    shared: dict[Var, Array] = field(default_factory=dict)
    timed: dict[Var, Any] = field(default_factory=dict)

    def __contains__(self, var: Var) -> bool:
        return var in self.shared or var in self.timed

    def add(self, var: Var, value: Any, timed: bool) -> None:
        (self.timed if timed else self.shared)[var] = value

    def all_steps(self, atom: Atom, length: int) -> Array:
        """A value with a leading axis of steps, also if it is the same at all of them."""
        if isinstance(atom, Var) and atom in self.timed:
            return self.timed[atom]
        value = jnp.asarray(_value(atom, self.shared))
        return jnp.broadcast_to(value, (length, *value.shape))


def unroll(
    program: Program,
    values: StepValues,
    carried: Sequence[tuple[Var, Atom]],
    start: Sequence[Array],
    length: int,
    wanted: Sequence[Var] = (),
    by_kernels: Sequence[Var] = (),
) -> list[Array]:
    """Run the states of a step through `length` steps; returns their last values.

    Args:
        program: the step.
        values: constants and inputs that are not carried; gets the values of the states before
            every step, and of `wanted`.
        carried: entry variable and new value of every state.
        start: the states before the first step.
        length: number of steps.
        wanted: further variables whose values are stored.
        by_kernels: the same where it costs little.
    """
    last = list(start)
    for group in _groups(program, carried):
        pairs = [carried[i] for i in group]
        if all(new is entry for entry, new in pairs):
            for i in group:
                values.add(carried[i][0], start[i], timed=False)
            continue
        also = (wanted, by_kernels)
        after = _run_group(program, values, pairs, [start[i] for i in group], length, also)
        for i, value in zip(group, after, strict=True):
            last[i] = value
    return last


def _groups(program: Program, carried: Sequence[tuple[Var, Atom]]) -> list[list[int]]:
    """Numbers of the states that need each other, those that others read first."""
    # h' = f(h, x), g' = k(g, h), c' = c + 1: reads [{h}, {g, h}, {c}], three groups of one state,
    # in the order h, c, g or c, h, g: g reads h, whose values at all steps are there by then.
    bits = _depends(program.equations, {v: 1 << i for i, (v, _) in enumerate(carried)})
    reads = [bits_of(new, bits) for _, new in carried]
    groups = strongly_connected(reads)
    before = {g: {groups[j] for i in indices_of(g) for j in indices_of(reads[i])} for g in groups}
    order = TopologicalSorter({g: others - {g} for g, others in before.items()}).static_order()
    return [indices_of(g) for g in order]


def _depends(equations: Sequence[Equation], seeds: Mapping[Var, int]) -> dict[Var, int]:
    """The seeds that a value depends on, as it is evaluated: an equation needs all its inputs."""
    bits = dict(seeds)
    for eqn in equations:
        mask = reduce(or_, (bits_of(a, bits) for a in eqn.inputs), 0)
        bits |= dict.fromkeys(eqn.outputs, mask)
    return bits


def _run_group(
    program: Program,
    values: StepValues,
    pairs: Sequence[tuple[Var, Atom]],
    start: Sequence[Array],
    length: int,
    also: tuple[Sequence[Var], Sequence[Var]],
) -> list[Array]:
    # `u = x @ W; r = h @ R; h' = tanh(u + r); out = h' @ V` over 100 steps:
    #
    #     equations    u, r, h'         what h' needs; out is computed later, from all h'
    #     varying      h, r, h'         depend on h
    #     outside      u = x @ W        one product of 100 rows, before the loop
    #     inside       r, h'            100 turns, with slices of u
    #
    # Nothing here is differentiated: the states before every step are all that is wanted.
    entries = {v for v, _ in pairs}
    targets = [new for _, new in pairs]
    equations = products_joined(needed(program, targets, values), values.shared).equations
    varying = {v for v, bit in _depends(equations, dict.fromkeys(entries, 1)).items() if bit}
    inside = [e for e in equations if varying & set(e.outputs)]
    outside = [e for e in equations if not varying & set(e.outputs)]
    alone = kernels_allowed() and not any(
        isinstance(e.primitive, ETPPrimitive) or e.bodies for e in inside
    )
    cheap = _absorbed(outside, inside, values) if alone else []
    evaluate_all_steps([e for e in outside if e not in cheap], values, length)
    inside = cheap + _apart(inside, varying, values, length)
    wanted = [*also[0], *(also[1] if alone else ())]
    stored = [v for v in dict.fromkeys(wanted) if v in varying and v not in entries]
    inside = list(prune(Program((), (), tuple(inside), ()), [*targets, *stored]).equations)
    read = [*(a for e in inside for a in e.inputs), *targets]
    sliced = [v for v in dict.fromkeys(read) if isinstance(v, Var) and v in values.timed]

    def step(carry, slices):
        env = {**values.shared, **dict(zip(sliced, slices, strict=True))}
        env.update(zip((v for v, _ in pairs), carry, strict=True))
        evaluate(inside, env)
        new = [_value(a, env) for a in targets]
        return new, (carry, [env[v] for v in stored])

    arrays = [values.timed[v] for v in sliced]
    last, (before, seen) = scan_time(step, list(start), arrays, length)
    values.timed.update(zip((v for v, _ in pairs), before, strict=True))
    values.timed.update(zip(stored, seen, strict=True))
    return last


# Arithmetic that a kernel does while it waits for memory.
_CHEAP = {"add", "sub", "mul", "neg", "complex", "real", "imag"}


def _absorbed(
    outside: Sequence[Equation], inside: Sequence[Equation], values: StepValues
) -> list[Equation]:
    """Equations that a kernel may as well compute itself, from no more bytes than it reads now.

    What `b * (x @ W)` is then need not be stored for all steps: the kernel reads `x @ W`, which the
    rule needs anyway.
    """
    timed = {v for v, bit in _depends(outside, dict.fromkeys(values.timed, 1)).items() if bit}
    needed_outside, of = set[Any](), dict[Any, Equation]()
    for eqn in reversed(outside):
        if eqn.name in _CHEAP and eqn.outputs[0] in timed - needed_outside:
            of[eqn.outputs[0]] = eqn
        else:
            needed_outside.update(eqn.inputs)
    read = {a for e in inside for a in e.inputs if a in timed}
    leaves, taken, stack = set[Any](), dict[Equation, None](), list(read)
    while stack:
        value = stack.pop()
        if value not in of:
            leaves.add(value)
        elif of[value] not in taken:
            taken[of[value]] = None
            stack += [a for a in of[value].inputs if a in timed]
    size = lambda atoms: sum(a.size * getattr(a.dtype, "itemsize", 4) for a in atoms)
    return [e for e in outside if e in taken] if size(leaves) <= size(read) else []


# ---------------------------------------------------------------------------- concatenated inputs


def _apart(
    equations: Sequence[Equation], varying: set[Var], values: StepValues, length: int
) -> list[Equation]:
    """The equations; operators on joined inputs without the parts that are constant in the loop.

    `W [x, h]` is `W_x x + W_h h`: the first of these is computed for all steps at once.
    """
    joined = {e.outputs[0]: e for e in equations if e.name == "concatenate"}
    out = []
    for eqn in equations:
        at = getattr(eqn.primitive, "x_invar_index", None)
        join = None
        if isinstance(eqn.primitive, ETPPrimitive) and at is not None:
            x = eqn.inputs[at]
            join = joined.get(x) if isinstance(x, Var) else None
        new = None if join is None else _split(eqn, join, varying, values, length)
        out.append(eqn if new is None else new)
    return out


def _split(
    eqn: Equation, join: Equation, varying: set[Var], values: StepValues, length: int
) -> Equation | None:
    operator = Operator.of(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs[0])
    axis = join.params["dimension"]
    weights = {k: eqn.inputs[i] for k, i in operator.positions.items()}
    varies = [isinstance(a, Var) and a in varying for a in join.inputs]
    if all(varies) or any(isinstance(a, Var) and a in varying for a in weights.values()):
        return None
    # `[x, h] @ W + b`, x (2,), h (3,), W (5, 4): rows 0 to 2 of W meet x, rows 2 to 5 meet h. The
    # loop computes `base + h @ W[2:] + b` with `base = x @ W[:2]` of all steps, computed before it.
    ends = np.cumsum([0, *(a.shape[axis] for a in join.inputs)]).tolist()
    named = lambda operands: dict(zip(weights, operands, strict=True))
    shapes = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in weights.items()}
    part = lambda start, stop, *operands: operator.part(named(operands), axis, start, stop)
    cut: list[Callable[..., Any]] = [partial(part, *between) for between in pairwise(ends)]
    cut.append(lambda *operands: operator.without_input(named(operands)))
    likes = jax.eval_shape(lambda *operands: [f(*operands) for f in cut], *shapes.values())
    if any(like is None for like in likes):
        return None
    *rows, bias = (Var(like.shape, like.dtype) for like in likes)

    def total(*arrays):
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return reduce(add, (operator.of_part(x, w) for x, w in pairs))

    def complete(base, bias, *arrays):
        # The bias is added in the loop: one fused addition, and not another array of all steps.
        return base + total(*arrays) + bias

    meets = list(zip(varies, join.inputs, rows, strict=True))
    of = lambda now: [a for v, *pair in meets if v == now for a in pair]
    constant, per_step = of(False), of(True)
    y, operands = eqn.outputs[0], tuple(weights.values())
    base = Var(y.shape, y.dtype)
    first = [_derived(eqn, f, operands, v) for f, v in zip(cut, (*rows, bias), strict=True)]
    evaluate_all_steps([*first, _derived(eqn, total, tuple(constant), base)], values, length)
    return _derived(eqn, complete, (base, bias, *per_step), y)


def _derived(eqn: Equation, function: Any, inputs: tuple[Atom, ...], output: Var) -> Equation:
    primitive = Inlined(f"{eqn.name}_part", function)
    return replace(eqn, primitive=primitive, inputs=inputs, outputs=(output,), params={})


def needed(program: Program, targets: Sequence[Atom], values: StepValues) -> list[Equation]:
    """The equations that the targets need, of those whose outputs have no value yet."""
    open_ = {a for a in targets if isinstance(a, Var)}
    out = []
    for eqn in reversed(program.equations):
        if any(o in open_ and o not in values for o in eqn.outputs):
            out.append(eqn)
            open_.update(a for a in eqn.inputs if isinstance(a, Var))
    return out[::-1]


def evaluate_all_steps(equations: Sequence[Equation], values: StepValues, length: int) -> None:
    """Evaluate equations for all steps at once."""
    varying = []
    for eqn in equations:
        atoms = [a for a in eqn.inputs if isinstance(a, Var)]
        if all(a in values.shared for a in atoms):
            evaluate([eqn], values.shared)
        else:
            varying.append(eqn)
            values.timed.update(dict.fromkeys(eqn.outputs))
    if not varying:
        return
    outputs = [o for e in varying for o in e.outputs]
    read = dict.fromkeys(a for e in varying for a in e.inputs if isinstance(a, Var))
    sliced = [v for v in read if v in values.timed and v not in set(outputs)]

    def one(*slices):
        env = {**values.shared, **dict(zip(sliced, slices, strict=True))}
        evaluate(varying, env)
        return [env[v] for v in outputs]

    mapped = not any(map(cannot_be_mapped, varying))
    arrays = map_steps(length, one, *(values.timed[v] for v in sliced), mapped=mapped)
    values.timed.update(zip(outputs, arrays, strict=True))


def evaluate(equations: Sequence[Equation], env: dict[Var, Array]) -> None:
    """Apply equations to an environment, and extend it."""
    for eqn in equations:
        operands = [_value(a, env) for a in eqn.inputs]
        env.update(zip(eqn.outputs, bind(eqn, operands), strict=True))


def _value(atom: Atom, env: Mapping[Var, Array]) -> Any:
    return atom.value if isinstance(atom, Const) else env[atom]
