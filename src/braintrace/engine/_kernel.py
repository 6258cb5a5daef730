"""A loop over time as one kernel: a tile of units per program, the steps inside.

A step of `lax.scan` costs a GPU tens of microseconds, whatever it computes. Where units do not meet
in a step, every program of one kernel takes its units through all steps alone. The body is traced;
what does not depend on the loop is computed before it, and the rest is arithmetic on tiles
(`_tiles`). Anything else stays a `lax.scan`, and the run says why.

A loop of few units whose new states are affine in the old ones is split over time. A first kernel
finds the map `h -> A h + b` of each chunk from its steps; in a second one, each chunk applies the
maps of those before it to the first states, and goes through its steps again, with results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import value_error
from ..ops import on_mesh
from ..program import (
    Atom,
    Const,
    Equation,
    Program,
    PyTree,
    Var,
    bind,
    evaluate,
    is_traced,
    prune,
    trace,
)
from ._placement import UNITS, Placement
from ._tiles import Leaf, Refused, Tiles, Value, check, loaded, stored

Array = jax.Array

_TILE = 64  # units per program: two warps, a unit per thread
_AHEAD = 16  # steps whose operands are loaded before they are needed, at most
_LOADS = 64  # values that wait in registers for these steps
_WRITTEN_OUT = 512  # operations of the steps that are written out one after another
_FILLED = 1 << 15  # units that fill a device: of fewer, an affine loop is split over time,
_CHUNK = 64  # into chunks of so many steps or more,
_FEWEST_CHUNKS = 8  # if there are so many of them,
_MOST_STATES = 2  # and a unit has no more values than these: of four, XLA compiles for a minute


class Engine(Enum):
    """What runs loops over time: a kernel where body and device allow, or always `lax.scan`.

    KERNEL takes the kernel on every device, interpreted where it cannot be compiled.
    """

    AUTO = "auto"
    SCAN = "scan"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class TimeLoop:
    """A loop over time: its steps, and why it is not one kernel; None if it is."""

    steps: int
    reason: str | None = None


@dataclass(slots=True)
class _Running:
    engine: Engine = Engine.AUTO
    placement: Placement | None = None
    loops: list[TimeLoop] = field(default_factory=list)


_running: ContextVar[_Running | None] = ContextVar("loops over time", default=None)


def check_engine(engine: str) -> Engine:
    """The engine of this name."""
    names = [e.value for e in Engine]
    if engine not in names:
        raise value_error(
            f"engine={engine!r}.",
            why="a loop over time is a kernel where that is possible ('auto'), or a lax.scan",
            do=f"choose one of {', '.join(map(repr, names))}",
        )
    return Engine(engine)


def recorded(function: Callable, engine: Engine, placement: Placement | None = None) -> Callable:
    """`function` with loops over time by `engine`; its attribute `loops` are those of its trace.

    With a `placement`, its blocks leave states and traces there.
    """

    def run(*args: Any) -> Any:
        now = _Running(engine, placement)
        with _set(now):
            out = function(*args)
        traced.loops = tuple(now.loops)
        return out

    traced: Any = run
    traced.loops = ()
    return run


@contextmanager
def _set(now: _Running | None) -> Iterator[None]:
    token = _running.set(now)
    try:
        place = None if now is None else now.placement
        with on_mesh(0 if place is None else place.shards(UNITS)):
            yield
    finally:
        _running.reset(token)


def running_placement() -> Placement | None:
    """Where the function that is being traced leaves its arrays."""
    now = _running.get()
    return None if now is None else now.placement


def as_running(function: Callable) -> Callable:
    """A function that is called later, with the engine of now."""
    now = _running.get()

    def call(*args: Any) -> Any:
        with _set(now):
            return function(*args)

    return call


def scan_time(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: PyTree,
    xs: PyTree,
    length: int,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`lax.scan`, as kernels where it can be; a single step is written out.

    Nothing is differentiated through it.
    """
    if length == 1:
        carry, out = body(carry, jax.tree.map(lambda a: a[0], xs))
        return carry, jax.tree.map(lambda a: a[None], out)
    how = _running.get() or _Running()
    plain = lambda carry, xs: lax.scan(body, carry, xs, length, reverse=reverse, unroll=unroll)
    device = jax.default_backend()
    kernel, reason = None, _refusal(how.engine, device)
    if reason is None:
        try:
            kernel = _kernel_of(body, carry, xs, length, reverse)
        except Refused as refused:
            reason = str(refused)
    how.loops.append(TimeLoop(length, reason))
    if kernel is None:
        return plain(carry, xs)
    interpreted = lambda *arrays: kernel(True, *arrays)
    if device != "gpu":
        return interpreted(carry, xs)
    other = plain if how.engine is Engine.AUTO else interpreted
    return lax.platform_dependent(carry, xs, cuda=lambda *a: kernel(False, *a), default=other)


def kernels_allowed() -> bool:
    """Whether loops over time may be kernels: what they compute is then better done inside."""
    return _refusal((_running.get() or _Running()).engine, jax.default_backend()) is None


def _refusal(engine: Engine, device: str) -> str | None:
    """Why no loop is to be a kernel."""
    if engine is Engine.SCAN:
        return "engine='scan'"
    if engine is Engine.KERNEL:
        return None
    if device != "gpu":
        return f"the device is a {device.upper()}"
    if "rocm" in jax.devices()[0].client.platform_version:
        return "the GPU does not run CUDA"
    # The compiler cannot split a kernel over devices, and would collect its operands on each.
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "there are several devices, and no shard_map"
    return None


# ----------------------------------------------------------------------------------------- bodies


class _Component(NamedTuple):
    """Equations of a body that share values, and the numbers of what they read and compute."""

    equations: list[Equation]
    carried: list[int]
    sliced: list[int]
    results: list[int]
    fixed: list[Var]


def _kernel_of(
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
    plans = [_planned(program, part, fixed, n) for part in _components(program, inside, fixed, n)]

    def run(interpret: bool, carry: PyTree, xs: PyTree) -> tuple[Any, Any]:
        states, arrays = jax.tree.leaves(carry), jax.tree.leaves(xs)
        out: list[Any] = [None] * len(program.outputs)
        for plan in plans:
            part = plan.part
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
) -> list[_Component]:
    """The parts of a body that share no value: layers of other shapes are other kernels."""
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
    parts: dict[Var, _Component] = {}

    def part(var: Any) -> _Component:
        return parts.setdefault(root(var), _Component([], [], [], [], []))

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


# ---------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class _Plan:
    """A component as a step on tiles: states, slices and constants to new states and results."""

    part: _Component
    step: Program
    numbers: tuple[Any, ...]
    units: tuple[int, ...]
    tile: int
    affine: bool
    states: list[Leaf]
    slices: list[Leaf]
    constants: list[Leaf]
    results: list[Leaf]

    def call(
        self,
        states: Sequence[Array],
        slices: Sequence[Array],
        constants: Sequence[Array],
        length: int,
        reverse: bool,
        interpret: bool,
    ) -> list[Array]:
        """The states after the loop, and the results of all steps."""
        from jax.experimental import pallas as pl

        rows = lambda arrays, leaves, *time: [
            a for s, leaf in zip(arrays, leaves, strict=True) for a in _rows(s, leaf, *time)
        ]
        read = [*rows(slices, self.slices, length), *rows(constants, self.constants)]
        chunks = self._chunks(length)
        grid = (-(-prod(self.units) // self.tile), chunks)
        how = {"interpret": True} if interpret else _compiled(self.tile)

        def run(local: bool, operands: Sequence[Array], shapes: Sequence[Any]) -> list[Array]:
            def kernel(*refs):
                at = _Place(pl.program_id(0), pl.program_id(1), chunks, length, reverse)
                self._kernel(at, refs, local)

            call = pl.pallas_call(kernel, shapes, grid=grid, name="loop_over_time", **how)
            return call(*operands)

        ends = [s for leaf in self.states for s in _shapes(leaf, (chunks,))]
        results = [s for leaf in self.results for s in _shapes(leaf, (length,))]
        maps = run(True, read, ends * (1 + len(ends))) if chunks > 1 else []
        outs = iter(run(False, [*rows(states, self.states), *maps, *read], [*ends, *results]))
        after = [_array(outs, leaf, chunks)[-1] for leaf in self.states]
        return after + [_array(outs, leaf, length) for leaf in self.results]

    def _chunks(self, length: int) -> int:
        """In how many chunks of time the units are run side by side, to fill the device."""
        most = min(length // _CHUNK, _FILLED // prod(self.units))
        # Every step is taken twice. All chunks have the same number of them.
        if most < _FEWEST_CHUNKS or not self.affine:
            return 1
        chunks = next(n for n in range(most, 0, -1) if length % n == 0)
        return chunks if chunks >= _FEWEST_CHUNKS else 1

    def _kernel(self, here: _Place, refs: Sequence[Any], local: bool) -> None:
        """The steps of a chunk; `local` only finds what they make of its first states.

        That is an affine map: where zeros end, and the columns of a matrix.
        """
        unit = here.program * self.tile + lax.iota(np.int32, self.tile)
        if prod(self.units) % self.tile:  # the last one is computed more than once, to the same
            unit = jnp.minimum(unit, prod(self.units) - 1)

        def row(lead: tuple[int, ...]) -> Array:
            """Where the units of a tile are in an array with some unit axes of size one."""
            if lead == self.units:
                return unit
            out = jnp.zeros_like(unit)
            for i, n in enumerate(lead):
                if n > 1:
                    out = out * n + unit // prod(self.units[i + 1 :]) % n
            return out

        def places(leaves: Sequence[Leaf]) -> list[tuple[Any, Any]]:
            """References and columns of all parts."""
            out = []
            for leaf in leaves:
                at = row(leaf.lead) if leaf.unit else 0
                out += [(next(items), at) for _ in range(leaf.parts) for _ in leaf.stored]
            return out

        items, chunk, length = iter(refs), here.chunk, here.length // here.chunks
        dtypes = [d for leaf in self.states for _ in range(leaf.parts) for d in leaf.stored]
        n = len(dtypes)
        starts = [] if local else places(self.states)
        split = here.chunks > 1 and not local
        maps = [places(self.states) for _ in range(1 + n)] if split else []
        slices, constants = places(self.slices), places(self.constants)
        ends = [p for _ in range(1 + n if local else 1) for p in places(self.states)]
        results = [] if local else places(self.results)
        fixed = [ref[at] for ref, at in constants]
        load = lambda t: tuple(ref[here.when(t), at] for ref, at in slices)
        step = prune(self.step, self.step.outputs[:n]) if local else self.step

        def one(t: Any, state: tuple, now: tuple) -> tuple:
            advance = lambda *state: evaluate(step, self.numbers, [*state, *now, *fixed])
            if local:
                zero, *columns = (state[i : i + n] for i in range(0, len(state), n))
                pushed = [jax.jvp(advance, zero, c) for c in columns]
                return tuple(v for part in (pushed[0][0], *(c for _, c in pushed)) for v in part)
            out = advance(*state)
            for (ref, at), value in zip(results, out[n:], strict=True):
                ref[here.when(t), at] = value
            return tuple(out[:n])

        # Memory answers after hundreds of cycles: the next steps are loaded while these run.
        ahead = max(1, min(_AHEAD, _LOADS // max(1, len(slices)), length))
        size = len(step.equations) * (1 + n if local else 1)
        ahead = max(1, min(ahead, _WRITTEN_OUT // max(1, size)))
        several, rest = divmod(length, ahead)
        first = lambda k: np.int32(ahead) * k

        def steps(k: Any, both: tuple) -> tuple:
            state, now = both
            start = first(jnp.minimum(k + 1, several - 1))
            later = tuple(load(start + u) for u in range(ahead))
            for u in range(ahead):
                state = one(first(k) + u, state, now[u])
            return state, later

        def mapped(i: Any, state: tuple) -> tuple:
            """The states after a chunk."""
            end, *columns = ([ref[i, at] for ref, at in part] for part in maps)
            # What overflows in a chunk is nothing to a state of zero.
            moved = [
                [jnp.where(s == 0, s, a * s) for a in c]
                for c, s in zip(columns, state, strict=True)
            ]
            return tuple(sum(terms[1:], terms[0]) for terms in zip(end, *moved, strict=True))

        if local:
            unit_of = lambda j, i: jnp.full(self.tile, float(i == j), dtypes[i])
            state = tuple(unit_of(j, i) for j in range(-1, n) for i in range(n))
        else:
            state = tuple(ref[at] for ref, at in starts)
        now = tuple(load(u) for u in range(ahead))
        if split:
            state = lax.fori_loop(np.int32(0), chunk, mapped, state)
        state, _ = lax.fori_loop(np.int32(0), np.int32(several), steps, (state, now))
        if rest:
            last = lambda t, state: one(t, state, load(t))
            state = lax.fori_loop(np.int32(length - rest), np.int32(length), last, state)
        for (ref, at), value in zip(ends, state, strict=True):
            ref[chunk, at] = value


class _Place(NamedTuple):
    """A program of a kernel: its tile of units, and its chunk of time."""

    program: Array
    chunk: Array
    chunks: int
    length: int
    reverse: bool

    def when(self, t: Any) -> Any:
        """The number of a step of the chunk among all."""
        t = t if self.chunks == 1 else self.chunk * np.int32(self.length // self.chunks) + t
        return self.length - 1 - t if self.reverse else t


def _is_affine(step: Program, n: int) -> bool:
    """Whether the first `n` outputs of a step on tiles are affine in its first `n` inputs."""
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


def _compiled(tile: int) -> dict[str, Any]:
    from jax.experimental.pallas import triton

    return {"compiler_params": triton.CompilerParams(num_warps=max(1, tile // 32), num_stages=1)}


def _planned(program: Program, part: _Component, fixed: Mapping[Var, Any], n: int) -> _Plan:
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
    for k in range(axes, -1, -1):
        units = shapes[0][:k] if shapes else ()
        try:
            return _on_tiles(program, part, fixed, states, slices, units)
        except Refused as refused:
            refusals.append(refused)
    raise refusals[0]


def _on_tiles(
    program: Program,
    part: _Component,
    fixed: Mapping[Var, Any],
    states: Sequence[Var],
    slices: Sequence[Var],
    units: tuple[int, ...],
) -> _Plan:
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
    return _Plan(part, tiles, numbers, units, tile, affine, *leaves)


def _rows(array: Array, leaf: Leaf, length: int | None = None) -> list[Array]:
    """An array as it is passed: one of (steps, units) for each value of a unit."""
    time = () if length is None else (length,)
    array = jnp.asarray(array, leaf.dtype)
    # Taken apart before it is reshaped: the compiler then sees through a stack of slots.
    parts = [array[(..., *index)] for index in np.ndindex(leaf.trail)]
    if leaf.dtype.kind == "c":
        parts = [half for part in parts for half in (part.real, part.imag)]
    return [part.astype(leaf.stored[0]).reshape((*time, prod(leaf.lead))) for part in parts]


def _shapes(leaf: Leaf, time: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((*time, prod(leaf.lead)), dtype)
        for _ in range(leaf.parts)
        for dtype in leaf.stored
    ]


def _array(rows: Iterator[Array], leaf: Leaf, length: int | None = None) -> Array:
    """The inverse of `_rows`."""
    time = () if length is None else (length,)
    parts = []
    for _ in range(leaf.parts):
        halves = [next(rows).reshape((*time, *leaf.lead)) for _ in leaf.stored]
        parts.append(lax.complex(*halves) if len(halves) == 2 else halves[0].astype(leaf.dtype))
    for depth, n in enumerate(reversed(leaf.trail), 1):
        parts = [jnp.stack(parts[i : i + n], -depth) for i in range(0, len(parts), n)]
    return parts[0]
