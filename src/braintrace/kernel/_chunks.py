"""A step on tiles, iterated by a kernel: a tile of units per program, the steps inside.

A loop of few units whose new states are affine in the old ones is split over time. A first kernel
finds the map `h -> A h + b` of each chunk from its steps; in a second one, each chunk applies the
maps of those before it to the first states, and goes through its steps again, with results. Of one
value per unit, six steps in three chunks, h' = d h + x:

    chunk 0    b = d1 x0 + x1    A = d1 d0    starts from h
    chunk 1    b = d3 x2 + x3    A = d3 d2    starts from A0 h + b0
    chunk 2                                   starts from A1 (A0 h + b0) + b1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program import Program, evaluate, prune
from ._tiles import Leaf

Array = jax.Array

_AHEAD = 16  # steps whose operands are loaded before they are needed, at most
_LOADS = 64  # values that wait in registers for these steps
_WRITTEN_OUT = 512  # operations of the steps that are written out one after another
_FILLED = 1 << 15  # units that fill a device: of fewer, an affine loop is split over time,
_CHUNK = 64  # into chunks of so many steps or more,
_FEWEST_CHUNKS = 8  # if there are so many of them,


@dataclass(frozen=True, slots=True)
class TiledStep:
    """A step on tiles: of states, slices and constants, new states and results."""

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
                at = _Program(pl.program_id(0), pl.program_id(1), chunks, length, reverse)
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
        # 1,000 steps of 128 units: at most 15 chunks of 64 steps, of 256 that would fill the
        # device; 10 is the most of equal ones, of 100 steps: 20 programs, with 2 tiles of 64 units.
        most = min(length // _CHUNK, _FILLED // prod(self.units))
        # Every step is taken twice. All chunks have the same number of them.
        if most < _FEWEST_CHUNKS or not self.affine:
            return 1
        chunks = next(n for n in range(most, 0, -1) if length % n == 0)
        return chunks if chunks >= _FEWEST_CHUNKS else 1

    def _kernel(self, here: _Program, refs: Sequence[Any], local: bool) -> None:
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
            # Unit 7 of units (2, 4) is (1, 3). In an array with lead (1, 4) it is at 3, with (2, 1)
            # at 1: of the axes that the array has, the digits of the unit, in order.
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

        # Locally, a step takes what zeros became (b), and a column of A for each value of a unit. A
        # step is affine, so its derivative is its linear part wherever it is taken: with
        # h' = d_t h + x_t, from (b, A) = (0, 1)
        #
        #     t = 0    (x_0, d_0)    t = 1    (d_1 x_0 + x_1, d_1 d_0)
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

        # Of 10 steps with 4 ahead: several, rest = 2, 2. The operands of steps 0 to 3 are loaded
        # before the loop; turn 0 loads those of 4 to 7 and runs 0 to 3 meanwhile, turn 1 loads them
        # once more (there is nothing after) and runs 4 to 7; steps 8 and 9 load their own.
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


class _Program(NamedTuple):
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


def _compiled(tile: int) -> dict[str, Any]:
    from jax.experimental.pallas import triton

    return {"compiler_params": triton.CompilerParams(num_warps=max(1, tile // 32), num_stages=1)}


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
    # Six parts of trail (2, 3), in order: by threes along the last axis, then by twos before it.
    for depth, n in enumerate(reversed(leaf.trail), 1):
        parts = [jnp.stack(parts[i : i + n], -depth) for i in range(0, len(parts), n)]
    return parts[0]
