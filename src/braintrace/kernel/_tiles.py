"""The step of a loop as arithmetic on tiles of units.

The unit axes of an array are the tile. What it has behind them are short axes, whose entries are
separate values: of two slots per unit, (units, 2), `q[..., 0:1]` is the first of two tiles. So all
that moves, joins or adds up along short axes costs nothing, and the rest is element-wise. A complex
number is a pair of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..program import (
    ELEMENTWISE,
    MOVES,
    Atom,
    Const,
    Equation,
    Line,
    Program,
    bind,
    inlined,
    lines,
    moved,
    parameters,
    scan_layout,
)

_MOST_PARTS = 16  # values of a unit in one array: the entries of D between four slots
_MOST_EQUATIONS = 512  # of a step, with inner loops written out

# Element-wise primitives that can be compiled into a kernel, for these types.
_COMPILED = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil clamp
    convert_element_type cos cosh div eq erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le
    log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or pow rem rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan
    tanh xor
    """.split()
)
_TYPES = frozenset("bool int8 int16 int32 int64 uint8 uint32 uint64 float32 float64".split())
_IDENTITY = {"stop_gradient", "pvary", "pcast"}
_SUMS = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


class Refused(Exception):
    """A step that is no arithmetic on tiles, and why."""

    @staticmethod
    def at(eqn: Equation, what: str) -> Refused:
        where = eqn.where()
        return Refused(f"{eqn.name} {what}" + (f" ({where})" if where else ""))


def has_units(shape: tuple[int, ...], units: tuple[int, ...]) -> bool:
    """Whether the first axes are the unit axes, of full size or one."""
    lead = shape[: len(units)]
    return 0 < len(units) == len(lead) and all(
        n in (1, m) for n, m in zip(lead, units, strict=True)
    )


class Leaf(NamedTuple):
    """An array of a loop: its unit axes, of full size or one, and the short axes behind them."""

    shape: tuple[int, ...]
    dtype: np.dtype
    lead: tuple[int, ...]
    trail: tuple[int, ...]

    @staticmethod
    def of(atom: Atom, units: tuple[int, ...]) -> Leaf:
        shape = tuple(atom.shape)
        axes = len(units) if has_units(shape, units) else 0
        trail = shape[axes:]
        if prod(trail) > _MOST_PARTS:
            raise Refused(f"units meet: {shape} beside {units}")
        if str(atom.dtype) not in (*_TYPES, "complex64", "complex128"):
            raise Refused(f"a value is {atom.dtype}")
        return Leaf(shape, np.dtype(atom.dtype), shape[:axes], trail)

    @property
    def unit(self) -> bool:
        return bool(self.lead)

    @property
    def parts(self) -> int:
        return prod(self.trail)

    @property
    def stored(self) -> list[np.dtype]:
        """The types it has in memory: complex numbers are two arrays, flags are bytes."""
        if self.dtype.kind == "c":
            return [np.dtype(f"f{self.dtype.itemsize // 2}")] * 2
        return [np.dtype(np.int8) if self.dtype.kind == "b" else self.dtype]


class Value(NamedTuple):
    """What stands for an array: its entries along short axes, each a tile or a number.

    `unit` says that the array has the unit axes in front.
    """

    parts: np.ndarray
    unit: bool

    @staticmethod
    def of(trail: tuple[int, ...], parts: Sequence[Any], unit: bool) -> Value:
        array = np.empty(len(parts), object)
        for i, part in enumerate(parts):
            array[i] = part
        return Value(array.reshape(trail), unit)

    @staticmethod
    def number(value: Any) -> Value:
        array = np.asarray(value)
        flat = [array.dtype.type(a) for a in array.reshape(-1)]
        complex_ = array.dtype.kind == "c"
        return Value.of(
            array.shape, [_Pair(a.real, a.imag) if complex_ else a for a in flat], False
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A complex number."""

    re: Any
    im: Any


def loaded(items: Iterator[Any], leaf: Leaf) -> Value:
    """A leaf from the tiles of its parts."""
    every = [[next(items) for _ in leaf.stored] for _ in range(leaf.parts)]
    if leaf.dtype.kind == "c":
        return Value.of(leaf.trail, [_Pair(*p) for p in every], leaf.unit)
    flag = leaf.dtype.kind == "b"
    return Value.of(leaf.trail, [p != 0 if flag else p for (p,) in every], leaf.unit)


def stored(value: Value, leaf: Leaf, tile: int) -> list[Any]:
    """The inverse of `loaded`."""
    out = []
    for part in value.parts.reshape(-1):
        halves = _halves(part) if len(leaf.stored) == 2 else (part,)
        for half, dtype in zip(halves, leaf.stored, strict=True):
            half = jnp.asarray(half).astype(dtype)
            out.append(jnp.broadcast_to(half, (tile,)) if leaf.unit else half)
    return out


def check(program: Program) -> None:
    """Refuse a step on tiles that cannot be compiled."""
    if len(program.equations) > _MOST_EQUATIONS:
        raise Refused(f"a step has {len(program.equations)} operations")
    for eqn in program.equations:
        if eqn.name not in _COMPILED or (eqn.name == "select_n" and len(eqn.inputs) > 3):
            raise Refused.at(eqn, "is not in the language of kernels")
        for o in eqn.outputs:
            if str(o.dtype) not in _TYPES:
                raise Refused.at(eqn, f"computes {o.dtype}")


class Tiles:
    """The equations of a step, applied to values of these unit axes."""

    def __init__(self, units: tuple[int, ...]):
        self.units, self.axes = units, len(units)

    def run(self, equations: Sequence[Equation], env: dict[Atom, Value]) -> None:
        """Apply equations to an environment, and extend it."""
        for eqn in equations:
            values = [Value.number(a.value) if isinstance(a, Const) else env[a] for a in eqn.inputs]
            env.update(zip(eqn.outputs, self._apply(eqn, values), strict=True))

    def _apply(self, eqn: Equation, values: list[Value]) -> list[Value]:
        if eqn.name in _IDENTITY:
            return values
        if eqn.name in ELEMENTWISE:
            return [_elementwise(eqn, self._aligned(eqn, values))]
        if eqn.name in MOVES:
            return [self._moved(eqn, values)]
        if eqn.name in _SUMS:
            return [self._summed(eqn, values[0])]
        if eqn.name == "scan":
            return self._iterated(eqn, values)
        inner = inlined(eqn)
        if inner is None:
            raise Refused.at(eqn, "is not element-wise")
        return self._called(*inner, values)

    def _called(self, program: Program, consts: Sequence[Any], values: list[Value]) -> list[Value]:
        if any(np.size(c) > _MOST_PARTS for c in consts):
            raise Refused("it reads a constant array")
        env: dict[Atom, Value] = dict(zip(program.consts, map(Value.number, consts), strict=True))
        env.update(zip(program.inputs, values, strict=True))
        self.run(program.equations, env)
        return [Value.number(o.value) if isinstance(o, Const) else env[o] for o in program.outputs]

    def _iterated(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """A short inner loop over nothing but what it carries, written out."""
        (body,) = eqn.bodies
        n_consts, n_carry = scan_layout(eqn.params)
        length = eqn.params["length"]
        alone = len(values) == n_consts + n_carry and len(eqn.outputs) == n_carry
        if not alone or length * len(body.program.equations) > _MOST_EQUATIONS:
            raise Refused.at(eqn, "is a loop inside the step")
        consts, carry = values[:n_consts], values[n_consts:]
        for _ in range(length):
            carry = self._called(body.program, body.values, [*consts, *carry])
        return carry

    def _aligned(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """Beside values of units, arrays without them: they must not differ along unit axes."""
        if not any(v.unit for v in values):
            return values
        out = []
        for v in values:
            if v.unit or v.parts.ndim == 0:
                out.append(v)
            elif prod(v.parts.shape[: self.axes]) == 1:
                out.append(Value(v.parts.reshape(v.parts.shape[self.axes :]), False))
            else:
                raise Refused.at(eqn, "is of short axes and of units")
        return out

    # ---------------------------------------------------------------------- along short axes

    def _lines(self, eqn: Equation, values: Sequence[Value]) -> list[Line] | None:
        """The lines of the units, that every value keeps where they are; None if none has units."""
        # Units (2, 4), q (2, 4, 3): of `q[:, :, 1:]` axes 0 and 1 of the result run along axes 0
        # and 1 of q, where they are, so each unit keeps its place and the slice is one of the three
        # parts. Of `transpose(q, (1, 0, 2))` axis 0 runs along axis 1: it moves units, refused.
        result = tuple(eqn.outputs[0].shape)
        at = {line.result: line for line in lines(eqn) if line.alike}

        def stays(d: int) -> bool:
            for atom, value, axis in zip(eqn.inputs, values, at[d].operands, strict=True):
                # A tile has no axis of units: one of size one is every unit's, wherever it lies.
                if value.unit and axis != d and not (axis is None and atom.shape[d] == 1):
                    return False
                if not value.unit and axis is not None and atom.shape[axis] > 1:
                    return False
            return True

        units = range(self.axes)
        if has_units(result, self.units) and all(d in at and stays(d) for d in units):
            return [at[d] for d in units]
        if any(v.unit for v in values):
            raise Refused.at(eqn, "moves units")
        return None

    def _moved(self, eqn: Equation, values: list[Value]) -> Value:
        """Along short axes a move is a move of the parts: the same equation of one unit.

        Of two units with three slots, `q[:, 1:]` slices (2, 3), and the parts as (1, 3).
        """
        lead = self._lines(eqn, values)
        if lead is None:
            return Value(moved(eqn, [v.parts for v in values]), False)
        for line in lead:
            eqn = replace(eqn, params=parameters(eqn, line, 1))
        one = (1,) * self.axes
        arrays = [v.parts.reshape((*one, *v.parts.shape)) if v.unit else v.parts for v in values]
        result = moved(eqn, arrays)
        return Value(result.reshape(result.shape[self.axes :]), True)

    def _summed(self, eqn: Equation, value: Value) -> Value:
        # q (2, 4, 3) summed over axis 2: three tiles of 8 units are added up, one tile is left.
        lead = 0 if self._lines(eqn, [value]) is None else self.axes
        along = [a - lead for a in eqn.params["axes"]]
        behind = np.moveaxis(value.parts, along, range(len(along)))
        shape = behind.shape[len(along) :]
        rows = behind.reshape((-1, prod(shape)))
        if any(isinstance(p, _Pair) for p in rows.flat):
            raise Refused.at(eqn, "adds up complex numbers")
        join = _SUMS[eqn.name]
        return Value.of(shape, [reduce(join, rows[:, i]) for i in range(prod(shape))], value.unit)


# ----------------------------------------------------------------------------- element by element


def _elementwise(eqn: Equation, values: list[Value]) -> Value:
    trail = np.broadcast_shapes(*(v.parts.shape for v in values))
    wide = [np.broadcast_to(v.parts, trail).reshape(-1) for v in values]
    parts = [_one(eqn, list(operands)) for operands in zip(*wide, strict=True)]
    return Value.of(trail, parts, any(v.unit for v in values))


def _one(eqn: Equation, operands: list[Any]) -> Any:
    out = eqn.outputs[0].dtype
    if np.issubdtype(out, np.complexfloating) or any(isinstance(a, _Pair) for a in operands):
        if eqn.name not in _COMPLEX:
            raise Refused.at(eqn, "is of complex numbers")
        return _COMPLEX[eqn.name](eqn, *operands)
    shapes = [jnp.shape(a) for a in operands]
    if eqn.name in ("select_n", "clamp") and len(set(shapes)) > 1:
        operands = [jnp.broadcast_to(a, max(shapes)) for a in operands]
    return bind(eqn, operands)[0]


def _halves(a: Any) -> tuple[Any, Any]:
    return (a.re, a.im) if isinstance(a, _Pair) else (a, jnp.zeros_like(a))


def _each(eqn: Equation, *operands: _Pair) -> _Pair:
    re, im = zip(*map(_halves, operands), strict=True)
    return _Pair(bind(eqn, re)[0], bind(eqn, im)[0])


def _product(a: _Pair, b: _Pair) -> _Pair:
    return _Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def _quotient(eqn: Equation, a: _Pair, b: _Pair) -> _Pair:
    scale = b.re * b.re + b.im * b.im
    product = _product(a, _Pair(b.re, -b.im))
    return _Pair(product.re / scale, product.im / scale)


def _power(eqn: Equation, a: _Pair) -> _Pair:
    n = eqn.params["y"]
    if not 0 < n <= 8:
        raise Refused.at(eqn, "is of complex numbers")
    return reduce(_product, [a] * n)


def _exponential(eqn: Equation, a: _Pair) -> _Pair:
    size = jnp.exp(a.re)
    return _Pair(size * jnp.cos(a.im), size * jnp.sin(a.im))


def _converted(eqn: Equation, a: Any) -> Any:
    dtype = np.dtype(eqn.params["new_dtype"])
    if dtype.kind != "c":
        return jnp.asarray(_halves(a)[0]).astype(dtype)
    return _Pair(*(jnp.asarray(h).astype(f"f{dtype.itemsize // 2}") for h in _halves(a)))


def _chosen(eqn: Equation, which: Any, *cases: _Pair) -> _Pair:
    halves = ([_halves(c)[i] for c in cases] for i in (0, 1))
    return _Pair(*(_one_real(eqn, [which, *h]) for h in halves))


def _one_real(eqn: Equation, operands: list[Any]) -> Any:
    shape = max(map(jnp.shape, operands))
    return bind(eqn, [jnp.broadcast_to(a, shape) for a in operands])[0]


_COMPLEX: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "neg", "add_any"), _each),
    "mul": lambda eqn, a, b: _product(a, b),
    "div": _quotient,
    "integer_pow": _power,
    "square": lambda eqn, a: _product(a, a),
    "exp": _exponential,
    "abs": lambda eqn, a: jnp.sqrt(a.re * a.re + a.im * a.im),
    "complex": lambda eqn, re, im: _Pair(re, im),
    "real": lambda eqn, a: a.re,
    "imag": lambda eqn, a: a.im,
    "conj": lambda eqn, a: _Pair(_halves(a)[0], -_halves(a)[1]),
    "convert_element_type": _converted,
    "select_n": _chosen,
    "eq": lambda eqn, a, b: (a.re == b.re) & (a.im == b.im),
    "ne": lambda eqn, a, b: (a.re != b.re) | (a.im != b.im),
}
