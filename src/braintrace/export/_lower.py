"""Programs as nodes: one table from the primitives of a program to few kinds of node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np

from .._errors import not_supported
from ..program import (
    Atom,
    Const,
    Equation,
    Program,
    Var,
    evaluate,
    inlined,
    is_key,
    scan_layout,
    words_of,
)
from ._formulas import REDUCTIONS, TYPES, formula
from ._nodes import Axis, Node, Nodes, Pair, Piece
from ._random import RANDOM

MOST_EQUATIONS = 50_000  # of a program whose loops are written out
_MOST_KNOWN = 1 << 20  # elements of an array that is computed beforehand
_REPEATS = {"broadcast_in_dim", "iota"}  # small to compute, large to keep


Value: TypeAlias = Node | Pair
Lowering: TypeAlias = Callable[["Lowerer", Equation, Sequence[Any]], Sequence[Value]]


def refused(eqn: Equation, why: str, do: str) -> Exception:
    """The error for an equation that has no C."""
    return not_supported(f"{eqn.name} cannot be exported.", where=eqn.where(), why=why, do=do)


@dataclass(slots=True)
class Lowerer:
    """Turns equations into nodes, one after another; calls and loops are written out."""

    nodes: Nodes = field(default_factory=Nodes)
    count: int = 0

    def run(self, program: Program, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """The values of a program's outputs, given those of its inputs."""
        env: dict[Atom, Any] = dict(zip(program.inputs, inputs, strict=True))
        env.update((v, self.const(c)) for v, c in zip(program.consts, consts, strict=True))
        read = lambda a: self.const(a.value) if isinstance(a, Const) else env[a]
        for eqn in program.equations:
            if all(o.dtype == jax.dtypes.float0 for o in eqn.outputs):
                env.update((o, None) for o in eqn.outputs)  # derivatives of integers: no values
                continue
            values = self.apply(eqn, [read(a) for a in eqn.inputs])
            env.update(zip(eqn.outputs, values, strict=True))
        return [read(o) for o in program.outputs]

    def apply(self, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
        """The values of an equation's outputs."""
        self.count += 1
        if self.count > MOST_EQUATIONS:
            raise refused(eqn, *_TOO_LONG)
        if eqn.name in _WHY:
            raise refused(eqn, *_WHY[eqn.name])
        inner = inlined(eqn)
        if inner is not None:
            return self.run(*inner, values)
        _check_types(eqn)
        if eqn.name in RANDOM:
            return RANDOM[eqn.name](self.nodes, eqn.params, values)
        if eqn.name not in CONTROL and any(_is_pair(a) for a in (*eqn.inputs, *eqn.outputs)):
            return self.complex(eqn, values)
        if eqn.name in TABLE:
            return TABLE[eqn.name](self, eqn, values)
        if not eqn.inputs or formula(eqn.name, str(eqn.inputs[0].dtype)) is None:
            raise refused(eqn, *_NO_FORMULA)
        return [self.nodes.map(eqn.name, eqn.outputs[0].dtype, values)]

    def const(self, value: Any) -> Value:
        if hasattr(value, "dtype") and is_key(value.dtype):
            words = np.asarray(words_of(value))
            return Pair(self.nodes.const(words[..., 0]), self.nodes.const(words[..., 1]))
        array = np.asarray(value)
        if array.dtype.kind == "c":
            return Pair(self.nodes.const(array.real), self.nodes.const(array.imag))
        return self.nodes.const(array)

    def as_type(self, a: Node, dtype: Any) -> Node:
        """Converted, if it has another type."""
        if a.dtype == dtype:
            return a
        return self.nodes.map("nonzero" if np.dtype(dtype) == bool else "cast", dtype, [a])

    # ------------------------------------------------------------------------ complex numbers

    def parts(self, pairs: Sequence[Pair]) -> list[tuple[Node, Node]]:
        """The real parts of two operands, and the imaginary ones."""
        a, b = pairs
        return [(a.re, b.re), (a.im, b.im)]

    def complex(self, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
        """An equation on complex numbers, as equations on their parts."""
        of = lambda name, *args: self.nodes.map(name, args[0].dtype, args)
        zero = lambda a: self.nodes.broadcast(self.nodes.const(a.dtype.type(0)), a.shape, ())
        if eqn.name in ("real", "imag"):
            return [values[0].re if eqn.name == "real" else values[0].im]
        if eqn.name == "complex":
            return [Pair(*values)]
        if eqn.name in _PARTWISE:  # the same for both parts; places and choices have one
            each = TABLE.get(eqn.name, lambda to, e, v: [of(e.name, *v)])
            of_part = lambda v, part: getattr(v, part) if isinstance(v, Pair) else v
            parts = (each(self, eqn, [of_part(v, p) for v in values]) for p in ("re", "im"))
            return [Pair(*both) for both in zip(*parts, strict=True)]
        pairs = [v if isinstance(v, Pair) else Pair(v, zero(v)) for v in values]
        a = pairs[0]
        if eqn.name == "convert_element_type":
            real = np.zeros((), eqn.params["new_dtype"]).real.dtype
            pair = Pair(self.as_type(a.re, real), self.as_type(a.im, real))
            return [pair if eqn.outputs[0].dtype.kind == "c" else pair.re]
        if eqn.name in ("mul", "dot_general"):
            times = lambda x, y: (
                of("mul", x, y) if eqn.name == "mul" else _dot_general(self, eqn, [x, y])[0]
            )
            b = pairs[1]
            re = of("sub", times(a.re, b.re), times(a.im, b.im))
            return [Pair(re, of("add", times(a.re, b.im), times(a.im, b.re)))]
        if eqn.name in ("eq", "ne"):
            same = [self.nodes.map(eqn.name, bool, [p, q]) for p, q in self.parts(pairs)]
            return [self.nodes.map("and" if eqn.name == "eq" else "or", bool, same)]
        if eqn.name == "conj":
            return [Pair(a.re, of("neg", a.im))]
        if eqn.name in ("exp", "expm1"):
            size = of("exp", a.re)
            re, im = of("mul", size, of("cos", a.im)), of("mul", size, of("sin", a.im))
            if (
                eqn.name == "expm1"
            ):  # (exp(x) - 1) cos(y) - 2 sin(y / 2)^2, which is small where it is
                half = of("sin", of("mul", a.im, self.nodes.const(a.im.dtype.type(0.5))))
                twice = of("mul", of("square", half), self.nodes.const(a.im.dtype.type(2)))
                re = of("sub", of("mul", of("expm1", a.re), of("cos", a.im)), twice)
            return [Pair(re, im)]
        if eqn.name in ("div", "abs", "square", "integer_pow"):
            norm = lambda p: of("add", of("square", p.re), of("square", p.im))
            product = lambda p, q: Pair(
                of("sub", of("mul", p.re, q.re), of("mul", p.im, q.im)),
                of("add", of("mul", p.re, q.im), of("mul", p.im, q.re)),
            )
            if eqn.name == "abs":
                return [of("sqrt", norm(a))]
            if eqn.name == "div":
                b = pairs[1]
                top, size = product(a, Pair(b.re, of("neg", b.im))), norm(b)
                return [Pair(of("div", top.re, size), of("div", top.im, size))]
            power = 2 if eqn.name == "square" else eqn.params["y"]
            out = a
            for _ in range(abs(power) - 1):
                out = product(out, a)
            if power > 0:
                return [out]
            if power < 0:
                size = norm(out)
                return [Pair(of("div", out.re, size), of("neg", of("div", out.im, size)))]
        raise refused(
            eqn, "it is about complex numbers, and has no formula for their parts", _PARTS
        )


_PARTS = "write it with real and imaginary parts, or compute it outside of the step"
_PARTWISE = set(
    """
    add add_any sub neg select_n broadcast_in_dim reshape transpose slice concatenate pad rev
    reduce_sum stop_gradient device_put optimization_barrier copy copy_p gather dynamic_slice
    dynamic_update_slice scatter scatter-add scatter_add
    """.split()
)
_TOO_LONG = (
    f"written out, its loops have more than {MOST_EQUATIONS:,} operations",
    "take fewer turns, or a smaller batch: a device that learns has one sample",
)
_NO_FORMULA = (
    "the table of operations that become C (export/_lower.py) has no entry for it",
    "write it with arithmetic, exp, log, tanh and the like, or compute it outside of the step",
)
_OTHER_GENERATOR = (
    "its generator is not threefry, the one that the emitted C has",
    "make keys by jax.random.key(seed, impl='threefry2x32')",
)
_NOT_BY_NUMBERS = (
    "jax_threefry_partitionable is off, and the emitted C numbers what it draws as if it were on",
    "leave jax.config.jax_threefry_partitionable at its default",
)
_UNTIL_ACCEPTED = (
    "it draws until a number is accepted, and how often that is is known only when it runs",
    "draw it outside, and pass it as an input of the step",
)
_CALLS_BACK = (
    "it calls Python, which is not there where the C runs",
    "leave it out of the step and of the loss",
)
_DYNAMIC = (
    "how often it runs is known only when it runs, and the memory and time of the C are fixed",
    "take a fixed number of turns, lax.fori_loop(0, n, ...) or lax.scan",
)
_SORTS = (
    "the table of operations that become C has no sorting",
    "find what you need with comparisons and sums: max, min, (x[:, None] < x).sum(0)",
)
_WHY = {
    **dict.fromkeys(("sort", "top_k", "argsort", "approx_top_k"), _SORTS),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "debug_print"), _CALLS_BACK),
    "while": _DYNAMIC,
    "random_gamma": _UNTIL_ACCEPTED,
    **dict.fromkeys(("rng_bit_generator", "rng_uniform"), _OTHER_GENERATOR),
}


def _is_pair(atom: Atom) -> bool:
    return is_key(atom.dtype) or atom.dtype.kind == "c"


def _check_types(eqn: Equation) -> None:
    """Refuse an equation about what the C has no type for."""
    for atom in (*eqn.inputs, *eqn.outputs):
        if is_key(atom.dtype):
            if str(atom.dtype) != "key<fry>":
                raise refused(eqn, *_OTHER_GENERATOR)
            if not getattr(jax.config, "jax_threefry_partitionable", True):
                raise refused(eqn, *_NOT_BY_NUMBERS)
        elif str(atom.dtype) not in (*TYPES, "complex64", "complex128"):
            why = f"it is about {atom.dtype}, and the emitted C has float, double and integers"
            raise refused(eqn, why, "compute it in float32 or float64")


def folded(program: Program, consts: Sequence[Any]) -> tuple[Program, list[Any]]:
    """The program with what is made of constants alone computed, as constants.

    What is small to compute and large to keep, a number repeated, stays an equation.
    """
    known = {v for v in program.consts}
    done = []
    for eqn in program.equations:
        small = all(o.size <= (64 if eqn.name in _REPEATS else _MOST_KNOWN) for o in eqn.outputs)
        of_known = all(isinstance(a, Const) or a in known for a in eqn.inputs)
        if of_known and small and not eqn.effects and eqn.name not in _WHY:
            done.append(eqn)
            known.update(eqn.outputs)
    rest = [e for e in program.equations if e not in set(done)]
    read = [a for e in rest for a in e.inputs] + list(program.outputs)
    outputs = tuple(dict.fromkeys(a for a in read if isinstance(a, Var) and a in known))
    part = Program(program.consts, (), tuple(done), outputs)
    found = jax.jit(lambda consts: evaluate(part, consts, ()))(list(consts))
    return Program(outputs, program.inputs, tuple(rest), program.outputs), found


# ---------------------------------------------------------------------------------- the table


def _bitcast(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    (a,), dtype = values, np.dtype(eqn.outputs[0].dtype)
    if a.dtype.itemsize != dtype.itemsize or bool in (a.dtype, dtype):
        why = f"it reads the bits of {a.dtype} as {dtype}, of another size"
        raise refused(eqn, why, "use types of one size")
    return [to.nodes.map("bits", dtype, [a])]


def _empty(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """An array that is filled later: zeros, as on a CPU."""
    (out,) = eqn.outputs
    zero = to.nodes.const(np.dtype(out.dtype).type(0))
    return [to.nodes.broadcast(zero, out.shape, ())]


def _alike(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return values


def _convert(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.as_type(values[0], eqn.outputs[0].dtype)]


def _sum_of_two(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.nodes.map("add", values[0].dtype, values)]


def _power(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    a, b = values
    return [to.nodes.map("pow", a.dtype, [a, to.as_type(b, a.dtype)])]


def _integer_power(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """x^n by squares: x^5 = (x^2)^2 x."""
    (a,), n = values, eqn.params["y"]
    one = to.nodes.broadcast(to.nodes.const(a.dtype.type(1)), a.shape, ())
    out, square, left = None, a, abs(n)
    while left:
        if left & 1:
            out = square if out is None else to.nodes.map("mul", a.dtype, [out, square])
        left >>= 1
        square = to.nodes.map("square", a.dtype, [square]) if left else square
    out = one if out is None else out
    return [out if n >= 0 else to.nodes.map("div", a.dtype, [one, out])]


def _select(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    which, first, *rest = values
    out = first
    for k, case in enumerate(rest, 1):
        here = which
        if which.dtype != bool:
            number = to.nodes.const(which.dtype.type(k))
            here = to.nodes.map("eq", bool, [which, to.nodes.broadcast(number, which.shape, ())])
        out = to.nodes.map("select", out.dtype, [here, out, case])
    return [out]


def _broadcast(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.nodes.broadcast(values[0], eqn.outputs[0].shape, eqn.params["broadcast_dimensions"])]


def _reshape(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.nodes.reshape(values[0], eqn.outputs[0].shape)]


def _transpose(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.nodes.transpose(values[0], eqn.params["permutation"])]


def _slice(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    p = eqn.params
    return [to.nodes.slice(values[0], p["start_indices"], p["limit_indices"], p["strides"])]


def _reverse(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [to.nodes.reverse(values[0], eqn.params["dimensions"])]


def _iota(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    out, axis = eqn.outputs[0], eqn.params["dimension"]
    places = to.nodes.const(np.arange(out.shape[axis]).astype(out.dtype))
    return [to.nodes.broadcast(places, out.shape, (axis,))]


def _reduced(how: str) -> Lowering:
    def lower(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
        out = to.nodes.reduce(how, values[0], eqn.params["axes"])
        return [to.nodes.reshape(out, eqn.outputs[0].shape)]

    return lower


def _running(how: str) -> Lowering:
    def lower(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
        axis, a = eqn.params["axis"], values[0]
        a = to.nodes.reverse(a, (axis,)) if eqn.params["reverse"] else a
        out = to.nodes.node("running", a.shape, a.dtype, (to.nodes.solid(a),), (how, axis))
        return [to.nodes.reverse(out, (axis,)) if eqn.params["reverse"] else out]

    return lower


def _dot_general(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """A sum of products in the space of (batch, left, right, summed) places."""
    a, b = values
    (sum_a, sum_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    free = lambda x, *used: [i for i in range(len(x.shape)) if i not in (*used[0], *used[1])]
    free_a, free_b = free(a, sum_a, batch_a), free(b, sum_b, batch_b)
    n = len(batch_a), len(free_a), len(free_b), len(sum_a)
    at = lambda k: list(range(sum(n[:k]), sum(n[: k + 1])))
    shape = [a.shape[i] for i in (*batch_a, *free_a)]
    shape += [b.shape[i] for i in free_b] + [a.shape[i] for i in sum_a]

    def spread(x: Node, order: Sequence[int], places: Sequence[int]) -> Node:
        moved = to.nodes.transpose(x, order)
        return to.nodes.broadcast(moved, shape, places)

    left = spread(a, (*batch_a, *free_a, *sum_a), (*at(0), *at(1), *at(3)))
    right = spread(b, (*batch_b, *free_b, *sum_b), (*at(0), *at(2), *at(3)))
    dtype = np.zeros((), eqn.outputs[0].dtype).real.dtype
    product = to.nodes.map("mul", dtype, [to.as_type(left, dtype), to.as_type(right, dtype)])
    out = to.nodes.reduce("sum", product, at(3))
    return [to.nodes.reshape(out, eqn.outputs[0].shape)]


def _concatenate(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    axis, n = eqn.params["dimension"], len(values[0].shape)
    values = [v for v in values if v.size]
    if len(values) == 1:
        return values
    shape = list(values[0].shape)
    shape[axis] = sum(v.shape[axis] for v in values)
    pieces, start = [], 0
    for v in values:
        starts = tuple(start if i == axis else 0 for i in range(n))
        pieces.append((v, Piece(starts, (1,) * n)))
        start += v.shape[axis]
    empty = to.nodes.node("empty", shape, values[0].dtype)
    return [to.nodes.write(empty, pieces)]


def _pad(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    return [padded(to, values[0], values[1], eqn.params["padding_config"])]


def padded(to: Lowerer, a: Node, value: Node, config: Sequence[tuple[int, int, int]]) -> Node:
    """`lax.pad`: values before, after and between elements; a negative number cuts off."""
    if all(c == (0, 0, 0) for c in config):
        return a
    sizes = zip(a.shape, config, strict=True)
    wide = [n + max(n - 1, 0) * inner for n, (_, _, inner) in sizes]
    first, last, starts = [], [], []
    for n, (low, high, inner) in zip(wide, config, strict=True):  # the elements that stay
        step = inner + 1
        skipped = -(-max(-low, 0) // step)
        first.append(skipped)
        last.append(max(skipped, (n + min(high, 0) - 1) // step + 1))
        starts.append(low + skipped * step)
    shape = [n + low + high for n, (low, high, _) in zip(wide, config, strict=True)]
    part = to.nodes.slice(a, first, last)
    base = to.nodes.broadcast(value, shape, ())
    steps = tuple(inner + 1 for *_, inner in config)
    return to.nodes.write(base, [(part, Piece(tuple(starts), steps))]) if part.size else base


def _gather(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    p, (a, where) = eqn.params, values
    numbers = p["dimension_numbers"]
    if numbers.operand_batching_dims:
        why = "its operand is mapped together with the places"
        raise refused(eqn, why, "take one sample at a time, or select by comparison and sum")
    mode = str(p["mode"]).rsplit(".", 1)[-1].lower()
    about = (
        tuple(numbers.offset_dims),
        tuple(numbers.collapsed_slice_dims),
        tuple(numbers.start_index_map),
        tuple(p["slice_sizes"]),
        "fill" if "fill" in mode else "clip",
        p["fill_value"],
    )
    args = (to.nodes.solid(a), to.nodes.solid(where))
    return [to.nodes.node("gather", eqn.outputs[0].shape, a.dtype, args, about)]


def _dynamic_slice(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    a, *starts = values
    n = len(a.shape)
    where = _places(to, starts)
    about = (tuple(range(n)), (), tuple(range(n)), tuple(eqn.params["slice_sizes"]), "clip", None)
    args = (to.nodes.solid(a), where)
    return [to.nodes.node("gather", eqn.outputs[0].shape, a.dtype, args, about)]


def _places(to: Lowerer, starts: Sequence[Node]) -> Node:
    """Computed places as one array of integers."""
    empty = to.nodes.node("empty", (len(starts),), np.int32)
    one = lambda s: to.nodes.reshape(to.as_type(s, np.int32), (1,))
    pieces = [(one(s), Piece((i,), (1,))) for i, s in enumerate(starts)]
    return to.nodes.write(empty, pieces)


def _dynamic_update(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    base, part, *starts = values
    places = _places(to, starts)
    about = ((), tuple(range(len(base.shape))), "clip", False)
    args = (base, part, places)
    return [to.nodes.node("scatter", base.shape, base.dtype, args, about)]


def _scatter(add: bool) -> Lowering:
    def lower(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
        base, where, updates = values
        numbers = eqn.params["dimension_numbers"]
        batch = getattr(numbers, "operand_batching_dims", ())
        if batch:
            why = "its operand is mapped together with the places"
            raise refused(eqn, why, "take one sample at a time, or use a sum of comparisons")
        mode = str(eqn.params["mode"]).rsplit(".", 1)[-1].lower()
        window = tuple(numbers.update_window_dims)
        rows = [i for i in range(len(updates.shape)) if i not in window]
        # updates as (places, window), the window with an axis for each of the operand
        updates = to.nodes.transpose(updates, [*rows, *window])
        lead = updates.shape[: len(rows)]
        sizes = iter(updates.shape[len(rows) :])
        inserted = tuple(numbers.inserted_window_dims)
        full = [1 if i in inserted else next(sizes) for i in range(len(base.shape))]
        updates = to.nodes.reshape(updates, (*lead, *full))
        where = to.nodes.reshape(to.as_type(where, np.int32), (*lead, where.shape[-1]))
        axes = tuple(numbers.scatter_dims_to_operand_dims)
        about = (lead, axes, "clip" if "clip" in mode else "drop", add)
        args = (base, updates, to.nodes.solid(where))
        return [to.nodes.node("scatter", base.shape, base.dtype, args, about)]

    return lower


def _convolution(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """A sum over channels and window in the space of (batch, group, feature, place, ...)."""
    p, (x, w) = eqn.params, values
    lhs, rhs, out = (tuple(s) for s in p["dimension_numbers"])
    x, w = to.nodes.transpose(x, lhs), to.nodes.transpose(w, rhs)  # (N, C, ...), (O, I, ...)
    spatial = len(lhs) - 2
    zero = to.nodes.const(x.dtype.type(0))
    spread = zip(p["padding"], p["lhs_dilation"], strict=True)
    config = [(0, 0, 0)] * 2 + [(low, high, d - 1) for (low, high), d in spread]
    x = padded(to, x, zero, config)
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    features, channels = w.shape[:2]
    per_group = features // (groups * batches)
    n = x.shape[0] // batches
    places = [
        (x.shape[2 + i] - (w.shape[2 + i] - 1) * p["rhs_dilation"][i] - 1) // p["window_strides"][i]
        + 1
        for i in range(spatial)
    ]
    # axes: 0 sample, 1 group, 2 feature within it, then places, channel, window
    shape = (n, groups * batches, per_group, *places, channels, *w.shape[2:])
    size = len(shape)
    column = lambda **at: tuple(at.get(f"a{i}", 0) for i in range(size))
    x_axes = [
        Axis(0, column(a0=1, a1=n if batches > 1 else 0)),
        Axis(0, column(a1=channels if groups > 1 else 0, **{f"a{3 + spatial}": 1})),
    ]
    for i in range(spatial):
        steps = {f"a{3 + i}": p["window_strides"][i], f"a{4 + spatial + i}": p["rhs_dilation"][i]}
        x_axes.append(Axis(0, column(**steps)))
    w_axes = [Axis(0, column(a1=per_group, a2=1)), Axis(0, column(**{f"a{3 + spatial}": 1}))]
    w_axes += [Axis(0, column(**{f"a{4 + spatial + i}": 1})) for i in range(spatial)]
    product = to.nodes.map(
        "mul", x.dtype, [to.nodes.view(x, shape, x_axes), to.nodes.view(w, shape, w_axes)]
    )
    total = to.nodes.reduce("sum", product, range(3 + spatial, size))
    total = to.nodes.reshape(total, (n, features, *places))
    order = [0] * len(out)
    for i, axis in enumerate(out):
        order[axis] = i
    return [to.nodes.transpose(total, order)]


def _cond(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """Every branch, and a choice between the results."""
    which, *operands = values
    results = [to.run(body.program, body.values, operands) for body in eqn.bodies]
    return [_chosen(to, which, cases) for cases in zip(*results, strict=True)]


def _chosen(to: Lowerer, which: Node, cases: Sequence[Any]) -> Value:
    """One of several values, by number."""
    if all(case is cases[0] for case in cases):
        return cases[0]
    if isinstance(cases[0], Pair):
        parts = ([getattr(case, part) for case in cases] for part in ("re", "im"))
        return Pair(*(_chosen(to, which, part) for part in parts))  # type: ignore[arg-type]
    limit = to.nodes.const(which.dtype.type(len(cases) - 1))
    low = to.nodes.const(which.dtype.type(0))
    number = to.nodes.map("clamp", which.dtype, [low, which, limit])
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        here = to.nodes.map("eq", bool, [number, to.nodes.const(which.dtype.type(k))])
        out = to.nodes.map("select", out.dtype, [here, out, case])
    return out


def _scan(to: Lowerer, eqn: Equation, values: Sequence[Any]) -> Sequence[Value]:
    """Every turn, one after another."""
    n_consts, n_carry = scan_layout(eqn.params)
    length, (body,) = eqn.params["length"], eqn.bodies
    consts, carry = list(values[:n_consts]), list(values[n_consts : n_consts + n_carry])
    xs = values[n_consts + n_carry :]
    turns = range(length)[::-1] if eqn.params["reverse"] else range(length)
    made: dict[int, list[Any]] = {}

    def at(a: Any, t: int) -> Value:
        if isinstance(a, Pair):
            return Pair(at(a.re, t), at(a.im, t))  # type: ignore[arg-type]
        starts, stops = [t, *[0] * (len(a.shape) - 1)], [t + 1, *a.shape[1:]]
        return to.nodes.reshape(to.nodes.slice(a, starts, stops), a.shape[1:])

    for t in turns:
        outs = to.run(body.program, body.values, [*consts, *carry, *(at(x, t) for x in xs)])
        carry, made[t] = outs[:n_carry], outs[n_carry:]
    ys = zip(*(made[t] for t in range(length)), strict=True)
    return [*carry, *(_stacked(to, rows) for rows in ys)]


def _stacked(to: Lowerer, rows: Sequence[Any]) -> Value:
    if isinstance(rows[0], Pair):
        parts = ([getattr(r, part) for r in rows] for part in ("re", "im"))
        return Pair(*(_stacked(to, part) for part in parts))  # type: ignore[arg-type]
    n = len(rows[0].shape)
    wide = [to.nodes.reshape(r, (1, *r.shape)) for r in rows]
    pieces = [(r, Piece((t, *[0] * n), (1,) * (n + 1))) for t, r in enumerate(wide)]
    empty = to.nodes.node("empty", (len(rows), *rows[0].shape), rows[0].dtype)
    return to.nodes.write(empty, pieces)


CONTROL = ("cond", "scan")
TABLE: dict[str, Lowering] = {
    **dict.fromkeys(
        "stop_gradient device_put optimization_barrier copy copy_p pvary pcast name "
        "sharding_constraint".split(),
        _alike,
    ),
    "add_any": _sum_of_two,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "cond": _cond,
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    **dict.fromkeys(("empty", "empty2"), _empty),  # what the gradient of a scan fills
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "gather": _gather,
    "integer_pow": _integer_power,
    "iota": _iota,
    "pad": _pad,
    "pow": _power,
    "reshape": _reshape,
    "rev": _reverse,
    "scan": _scan,
    "scatter": _scatter(False),
    "scatter-add": _scatter(True),
    "scatter_add": _scatter(True),
    "select_n": _select,
    "slice": _slice,
    "transpose": _transpose,
    **{f"reduce_{how}": _reduced(how) for how in REDUCTIONS},
    **{f"cum{how}": _running(how) for how in ("sum", "prod", "max", "min")},
}
