"""The language of programs: the primitives that a pass has to know, and the sugar that it does not.

JAX has many primitives for few ideas. `flatten` rewrites the sugar, in tangents too, which JAX
derives from programs and which are flattened again:

    b = reshape[dimensions=(1, 0)] a      t = transpose a;  b = reshape t
    b = squeeze a                         b = reshape a
    c = stack[axis=0] a b                 p = reshape a;  q = reshape b;  c = concatenate p q
    p, q = split a                        p = slice a;  q = slice a
    b = tile[reps=(2,)] a                 r = broadcast_in_dim a;  b = reshape r
    b = copy a                            (a)

A primitive that is not in `_axes.CANONICAL` is one that no pass knows more about than that all of
its results may depend on all that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jax import lax

from ._records import Atom, Equation
from ._rewriting import Rewriting, Rule

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
CONTROL = frozenset(("cond", "scan", "while"))
# Calls that mean nothing beyond the equations inside them.
INLINED = frozenset("jit pjit closed_call core_call remat remat2 checkpoint in_parts".split())


def canonical(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
    """What is written in the place of an equation that is sugar; None if it is none."""
    rule = REWRITTEN.get(eqn.name)
    return None if rule is None else rule(to, eqn)


def _reshape(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
    (a,), shape, order = eqn.inputs, eqn.outputs[0].shape, eqn.params["dimensions"]
    if order is None:
        return [a] if a.shape == shape else None
    return [to.reshape(to.transpose(a, order), shape)]


def _of_same_elements(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    return [to.reshape(eqn.inputs[0], eqn.outputs[0].shape)]


def _same(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    return eqn.inputs


def _along_ones(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
    """A reduction or cumulation of single elements."""
    p, (a,) = eqn.params, eqn.inputs
    ones = all(a.shape[d] == 1 for d in (p["axes"] if "axes" in p else (p["axis"],)))
    return [to.reshape(a, eqn.outputs[0].shape)] if ones else None


def _each(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
    """Several values that are passed on side by side."""
    n, p = len(eqn.inputs), eqn.params
    if n == 1:
        return None
    apart = lambda v, i: (v[i],) if isinstance(v, tuple | list) and len(v) == n else v
    params = [{k: apart(v, i) for k, v in p.items()} for i in range(n)]
    pairs = zip(eqn.inputs, params, strict=True)
    return [to.apply(eqn.primitive, [a], a.shape, own) for a, own in pairs]


def _rev(to: Rewriting, eqn: Equation) -> Sequence[Atom] | None:
    (a,), dimensions = eqn.inputs, eqn.params["dimensions"]
    turned = tuple(d for d in dimensions if a.shape[d] != 1)
    if turned == tuple(dimensions):
        return None
    return [to.apply(lax.rev_p, [a], a.shape, {"dimensions": turned}) if turned else a]


def _stack(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    (out,) = eqn.outputs
    axis, shape = eqn.params["axis"] % len(out.shape), list(out.shape)
    shape[axis] = 1
    parts = [to.reshape(a, shape) for a in eqn.inputs]
    if len(parts) == 1:
        return parts
    return [to.apply(lax.concatenate_p, parts, out.shape, {"dimension": axis})]


def _unstack(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    (a,) = eqn.inputs
    axis, outs = eqn.params["axis"] % len(a.shape), enumerate(eqn.outputs)
    return [to.reshape(to.slice(a, axis, i, i + 1), o.shape) for i, o in outs]


def _split(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    (a,), ends = eqn.inputs, pairwise(np.cumsum([0, *eqn.params["sizes"]]))
    return [to.slice(a, eqn.params["axis"] % len(a.shape), *end) for end in ends]


def _tile(to: Rewriting, eqn: Equation) -> Sequence[Atom]:
    (a,), reps = eqn.inputs, eqn.params["reps"]
    pairs = list(zip(reps, a.shape, strict=True))
    wide = tuple(n for r, n in pairs for n in ((r, n) if r != 1 else (n,)))
    if len(wide) == len(pairs):
        return [a]
    dims = tuple((np.cumsum([2 if r != 1 else 1 for r in reps]) - 1).tolist())
    params = {"shape": wide, "broadcast_dimensions": dims, "sharding": None}
    repeated = to.apply(lax.broadcast_in_dim_p, [a], wide, params)
    return [to.reshape(repeated, eqn.outputs[0].shape)]


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
