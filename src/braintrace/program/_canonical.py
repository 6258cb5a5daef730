"""The language of programs: the primitives that a pass has to know, and the sugar that it does not.

JAX has many primitives for few ideas. `flatten` rewrites the sugar, in tangents too, which JAX
derives from programs and which are flattened again:

    b = reshape[dimensions=(1, 0)] a      t = transpose a;  b = reshape t
    b = squeeze a                         b = reshape a
    c = stack[axis=0] a b                 p = reshape a;  q = reshape b;  c = concatenate p q
    p, q = split a                        p = slice a;  q = slice a
    b = tile[reps=(2,)] a                 r = broadcast_in_dim a;  b = reshape r
    b = copy a                            (a)

A primitive that is not in `CANONICAL` is one that no pass knows more about than that all of its
results may depend on all that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jax import lax

from ._records import Atom, Equation, Params, Var

# An element of the result depends on the elements at the same place of the operands only.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type cos cosh device_put digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to
    lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square
    optimization_barrier or pcast polygamma polynomial population_count pow pvary real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """.split()
)
# And is zero where all of these are.
ZERO_AT_ZERO = frozenset(
    """
    abs add add_any asin asinh atan atanh cbrt ceil conj convert_element_type device_put erf erf_inv
    expm1 floor imag log1p max min neg pcast pvary real reduce_precision round select_n
    sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
    """.split()
)
REDUCTIONS = frozenset(
    f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or", "xor")
) | {"argmax", "argmin"}
CUMULATIVE = frozenset(f"cum{how}" for how in ("sum", "logsumexp", "prod", "max", "min"))
SCATTERS = frozenset(
    ("scatter", *(f"scatter{j}{how}" for j in "-_" for how in ("add", "mul", "sub")))
)
# What moves elements, and what joins them, along axes that its parameters name.
STRUCTURAL = (
    frozenset(
        """
        broadcast_in_dim concatenate conv_general_dilated dot_general dynamic_slice
        cholesky dynamic_update_slice fft gather iota pad reduce_window_max reduce_window_min
        reduce_window_sum reshape rev select_and_gather_add slice sort top_k transpose
        triangular_solve
        """.split()
    )
    | REDUCTIONS
    | CUMULATIVE
    | SCATTERS
)
CONTROL = frozenset(("cond", "scan", "while"))
CANONICAL = ELEMENTWISE | STRUCTURAL | CONTROL
# Calls that mean nothing beyond the equations inside them.
INLINED = frozenset("jit pjit closed_call core_call remat remat2 checkpoint in_parts".split())


@dataclass(slots=True)
class Rewriting:
    """What takes the place of an equation: `equations`, which end in the atoms of its results."""

    eqn: Equation
    equations: list[Equation]

    def apply(
        self, primitive: Any, operands: Sequence[Atom], shape: Sequence[int], params: Params
    ) -> Var:
        out = Var(tuple(shape), operands[0].dtype)
        self.equations.append(
            replace(
                self.eqn,
                primitive=primitive,
                inputs=tuple(operands),
                outputs=(out,),
                params=params,
            )
        )
        return out

    def reshape(self, a: Atom, shape: Sequence[int]) -> Atom:
        if tuple(a.shape) == tuple(shape):
            return a
        params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
        return self.apply(lax.reshape_p, [a], shape, params)

    def slice(self, a: Atom, axis: int, start: int, stop: int) -> Atom:
        first, last = [0] * len(a.shape), list(a.shape)
        first[axis], last[axis] = int(start), int(stop)
        shape = [e - s for s, e in zip(first, last, strict=True)]
        params = {"start_indices": tuple(first), "limit_indices": tuple(last), "strides": None}
        return a if shape == list(a.shape) else self.apply(lax.slice_p, [a], shape, params)


def rewritten(eqn: Equation) -> tuple[list[Equation], Sequence[Atom]] | None:
    """The equations in the place of one that is sugar, and its results; None if it is none."""
    if (rule := REWRITTEN.get(eqn.name)) is None:
        return None
    rewriting = Rewriting(eqn, [])
    outs = rule(rewriting, eqn.params, eqn.inputs, eqn.outputs)
    return None if outs is None else (rewriting.equations, outs)


Rule = Callable[[Rewriting, Params, Sequence[Atom], Sequence[Var]], Sequence[Atom] | None]


def _reshape(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    order = p["dimensions"]
    if order is None:
        return a if a[0].shape == out[0].shape else None
    moved = a[0]
    if tuple(order) != tuple(range(len(order))):
        shape = [a[0].shape[i] for i in order]
        moved = to.apply(lax.transpose_p, a, shape, {"permutation": tuple(order)})
    return [to.reshape(moved, out[0].shape)]


def _of_same_elements(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    return [to.reshape(a[0], out[0].shape)]


def _same(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    return a


def _along_ones(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    """A reduction or cumulation of single elements."""
    axes = p["axes"] if "axes" in p else (p["axis"],)
    return [to.reshape(a[0], out[0].shape)] if all(a[0].shape[d] == 1 for d in axes) else None


def _each(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    """Several values that are passed on side by side."""
    if len(a) == 1:
        return None
    apart = lambda v, i: (v[i],) if isinstance(v, tuple | list) and len(v) == len(a) else v
    params = [{k: apart(v, i) for k, v in p.items()} for i in range(len(a))]
    return [to.apply(to.eqn.primitive, [v], v.shape, q) for v, q in zip(a, params, strict=True)]


def _rev(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    turned = tuple(d for d in p["dimensions"] if a[0].shape[d] != 1)
    if turned == tuple(p["dimensions"]):
        return None
    return [to.apply(lax.rev_p, a, a[0].shape, {"dimensions": turned})] if turned else a


def _stack(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    axis, shape = p["axis"] % len(out[0].shape), list(out[0].shape)
    shape[axis] = 1
    parts = [to.reshape(v, shape) for v in a]
    if len(parts) == 1:
        return parts
    return [to.apply(lax.concatenate_p, parts, out[0].shape, {"dimension": axis})]


def _unstack(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    axis = p["axis"] % len(a[0].shape)
    return [to.reshape(to.slice(a[0], axis, i, i + 1), o.shape) for i, o in enumerate(out)]


def _split(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    ends = pairwise(np.cumsum([0, *p["sizes"]]))
    return [to.slice(a[0], p["axis"] % len(a[0].shape), *end) for end in ends]


def _tile(to: Rewriting, p: Params, a: Sequence[Atom], out: Sequence[Var]):
    pairs = list(zip(p["reps"], a[0].shape, strict=True))
    wide = tuple(n for r, n in pairs for n in ((r, n) if r != 1 else (n,)))
    at = tuple(np.cumsum([2 if r != 1 else 1 for r, _ in pairs]).tolist())
    dims = tuple(end - 1 for end in at)
    if all(r == 1 for r, _ in pairs):
        return a
    params = {"shape": wide, "broadcast_dimensions": dims, "sharding": None}
    return [to.reshape(to.apply(lax.broadcast_in_dim_p, a, wide, params), out[0].shape)]


REWRITTEN: dict[str, Rule] = {
    "reshape": _reshape,
    "squeeze": _of_same_elements,
    "expand_dims": _of_same_elements,
    "rev": _rev,
    **dict.fromkeys(("device_put", "optimization_barrier"), _each),
    "stack": _stack,
    "unstack": _unstack,
    "split": _split,
    "tile": _tile,
    **dict.fromkeys(("copy", "copy_p", "name"), _same),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _along_ones),
    **dict.fromkeys(CUMULATIVE, _along_ones),
}
