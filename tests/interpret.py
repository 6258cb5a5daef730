"""Run a function equation by equation: small programs that run once are not worth compiling.

`interpreted(fn)` traces `fn` and evaluates its jaxpr: the commonest primitives with numpy, the
others with kernels that JAX compiles once per primitive and shape, for all programs together. Loops
turn in Python, a choice takes its branch. `computed(fn)` does that by default, and compiles
`fn` as one program in `make test-all` and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax.extend import core

from braintrace.program import DerivedPrimitive, scan_layout
from thinned import ALL

COMPILED = ALL or jax.default_backend() != "cpu"  # on a GPU its own programs are what is tested


def interpreted(fn: Callable[[], Any], lower: bool = True) -> Any:
    """The value of `fn()`, computed without compiling it as a whole; states stay as they are.

    `lower` also hands it to XLA uncompiled: what has no lowering is an error in any branch.
    """
    return _evaluated(_stateful(fn), (), lower)[0]


def computed(fn: Callable[[], Any]) -> Any:
    """The value of `fn()`: interpreted, by XLA in `make test-all`."""
    return brainstate.transform.jit(fn)() if COMPILED else interpreted(fn, lower=False)


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`brainstate.transform.jit(fn)`, but interpreted by default; states are written."""
    if COMPILED:
        return brainstate.transform.jit(fn)
    stateful = _stateful(fn)

    def call(*args: Any) -> Any:
        out, states, values = _evaluated(stateful, args, lower=False)
        for state, value in zip(states, values, strict=True):
            state.value = jax.tree.map(jnp.asarray, value)
        return out

    return call


def _stateful(fn: Callable[..., Any]) -> Any:
    return brainstate.transform.StatefulFunction(fn, return_only_write=False)


def _evaluated(stateful: Any, args: tuple[Any, ...], lower: bool) -> tuple[Any, Any, Any]:
    """The result, the states that it reads or writes, and their new values."""
    stateful.make_jaxpr(*args)
    key = stateful.get_arg_cache_key(*args)
    states = stateful.get_state_trace_by_cache(key).states
    closed = stateful.get_jaxpr_by_cache(key)
    operands = jax.tree.leaves((args, [s.value for s in states]))
    if lower:
        jax.jit(core.jaxpr_as_fun(closed)).lower(*operands)
    with np.errstate(all="ignore"):
        found = run(closed, operands)
    tree = jax.tree.structure(stateful.get_out_shapes_by_cache(key))
    out, values = jax.tree.unflatten(tree, found)
    return out, states, values


def run(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any]) -> list[Any]:
    p = eqn.params
    match eqn.primitive.name:
        case "jit" | "pjit" | "closed_call" | "core_call" | "in_parts":
            return run(p.get("jaxpr") or p["call_jaxpr"], values)
        case "checkpoint" | "remat" | "remat2":
            return run(core.ClosedJaxpr(p["jaxpr"], ()), values)
        case "custom_jvp_call" | "custom_vjp_call":
            return run(p["call_jaxpr"], values)
        case "cond":
            index = min(max(int(values[0]), 0), len(p["branches"]) - 1)
            return run(p["branches"][index], values[1:])
        case "while":
            return _while(p, values)
        case "scan":
            return _scan(p, values)
    return _kernel(eqn, values)


def _while(p: Any, values: list[Any]) -> list[Any]:
    first = p["cond_nconsts"]
    last = first + p["body_nconsts"]
    test, body, carry = values[:first], values[first:last], values[last:]
    while np.any(going := np.asarray(run(p["cond_jaxpr"], [*test, *carry])[0])):
        new = run(p["body_jaxpr"], [*body, *carry])
        if going.ndim:  # mapped: each place stops by itself
            new = [jnp.where(_wide(going, a), b, a) for a, b in zip(carry, new, strict=True)]
        carry = new
    return carry


def _wide(flags: Any, like: Any) -> Any:
    return flags.reshape(flags.shape + (1,) * (np.ndim(like) - flags.ndim))


def _scan(p: Any, values: list[Any]) -> list[Any]:
    first, carried = scan_layout(p)
    last = first + carried
    carry, rows = values[first:last], []
    order = range(p["length"])
    for t in reversed(order) if p["reverse"] else order:
        slices = [x[t] for x in values[last:]]
        out = run(p["jaxpr"], [*values[:first], *carry, *slices])
        carry = out[: last - first]
        rows.append(out[last - first :])
    if not rows:  # no turn
        none = p["jaxpr"].out_avals[last - first :]
        return [*carry, *(np.zeros((0, *aval.shape), aval.dtype) for aval in none)]
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(_stacked(column) for column in zip(*rows, strict=True))]


def _stacked(column: Sequence[Any]) -> Any:
    plain = all(isinstance(c, np.ndarray | np.generic) for c in column)
    return np.stack(column) if plain else jax.numpy.stack(column)


def _kernel(eqn: Any, values: list[Any]) -> list[Any]:
    known = NUMPY.get(eqn.primitive.name)
    if known is not None and all(_of_numpy(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)):
        out = known([np.asarray(v) for v in values], eqn.params)
        if out is not NotImplemented:
            outs = out if eqn.primitive.multiple_results else [out]
            return [np.asarray(o, v.aval.dtype) for o, v in zip(outs, eqn.outvars, strict=True)]
    if isinstance(eqn.primitive, DerivedPrimitive):
        return run(_function(eqn.primitive, eqn.params, [v.aval for v in eqn.invars]), values)
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ((), found) if isinstance(found, dict) else found  # JAX >= 0.9: one dict
    out = eqn.primitive.bind(*functions, *values, **params)
    outs = out if eqn.primitive.multiple_results else [out]
    pairs = zip(outs, eqn.outvars, strict=True)
    return [np.asarray(o) if _of_numpy(v.aval.dtype) else o for o, v in pairs]


def _function(primitive: DerivedPrimitive, params: dict[str, Any], avals: list[Any]) -> Any:
    """What XLA is given for an operator."""
    key = (primitive, tuple(params.items()), tuple((a.shape, a.dtype, a.weak_type) for a in avals))
    try:
        if key in _functions:
            return _functions[key]
    except TypeError:  # a parameter that has no hash
        key = None
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    closed = jax.make_jaxpr(lambda *args: primitive.impl(*args, **params))(*shapes)
    if key is not None:
        _functions[key] = closed
    return closed


_functions: dict[Any, Any] = {}


def _of_numpy(dtype: Any) -> bool:
    """No key, and no number of 16 bits that numpy rounds in its own way or does not have."""
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return not extended and np.dtype(dtype).isbuiltin == 1 and dtype != np.float16


Kernel = Callable[[list[Any], dict[str, Any]], Any]


def _ufunc(f: Callable) -> Kernel:
    return lambda values, p: f(*values)


def _div(values: list[Any], p: Any) -> Any:
    exact = np.issubdtype(values[0].dtype, np.inexact)
    return values[0] / values[1] if exact else NotImplemented


def _broadcast(values: list[Any], p: Any) -> Any:
    shape = [1] * len(p["shape"])
    for axis, n in zip(p["broadcast_dimensions"], values[0].shape, strict=True):
        shape[axis] = n
    return np.broadcast_to(values[0].reshape(shape), p["shape"])


def _reshape(values: list[Any], p: Any) -> Any:
    order = p.get("dimensions")  # the operand is transposed first
    operand = values[0] if order is None else values[0].transpose(order)
    return operand.reshape(p["new_sizes"])


def _power(values: list[Any], p: Any) -> Any:
    exact = np.issubdtype(values[0].dtype, np.inexact)
    return values[0] ** float(p["y"]) if exact else NotImplemented


def _slice(values: list[Any], p: Any) -> Any:
    steps = p["strides"] or (1,) * values[0].ndim
    return values[0][tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _pad(values: list[Any], p: Any) -> Any:
    if any(low < 0 or high < 0 or inner for low, high, inner in p["padding_config"]):
        return NotImplemented
    pairs = [(low, high) for low, high, _ in p["padding_config"]]
    return np.pad(values[0], pairs, constant_values=values[1])


def _dynamic_slice(values: list[Any], p: Any) -> Any:
    sizes = p["slice_sizes"]
    ends = zip(values[1:], values[0].shape, sizes, strict=True)
    starts = [min(max(int(i), 0), n - size) for i, n, size in ends]
    return values[0][tuple(slice(i, i + size) for i, size in zip(starts, sizes, strict=True))]


def _iota(values: list[Any], p: Any) -> Any:
    shape, axis = p["shape"], p["dimension"]
    column = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(column, shape)


def _dot(values: list[Any], p: Any) -> Any:
    (ca, cb), (ba, bb) = p["dimension_numbers"]
    a, b = list(range(values[0].ndim)), [20 + i for i in range(values[1].ndim)]
    for i, j in zip((*ca, *ba), (*cb, *bb), strict=True):
        b[j] = a[i]
    free = lambda letters, gone: [l for i, l in enumerate(letters) if i not in gone]
    out = [a[i] for i in ba] + free(a, (*ca, *ba)) + free(b, (*cb, *bb))
    return np.einsum(values[0], a, values[1], b, out)


def _rem(values: list[Any], p: Any) -> Any:
    whole = not np.issubdtype(values[0].dtype, np.inexact)
    return NotImplemented if whole and not np.all(values[1]) else np.fmod(*values)


def _update_slice(values: list[Any], p: Any) -> Any:
    operand, update, *starts = values
    ends = zip(starts, operand.shape, update.shape, strict=True)
    at = [min(max(int(i), 0), n - size) for i, n, size in ends]
    out = np.array(operand)
    out[tuple(slice(i, i + size) for i, size in zip(at, update.shape, strict=True))] = update
    return out


def _select(values: list[Any], p: Any) -> Any:
    which = values[0]
    return np.where(which, values[2], values[1]) if which.dtype == bool else NotImplemented


def _convert(values: list[Any], p: Any) -> Any:
    """Out of range XLA saturates and numpy wraps around; of a complex number each drops a part."""
    plain = np.can_cast(values[0].dtype, p["new_dtype"], "same_kind")
    return values[0].astype(p["new_dtype"]) if plain else NotImplemented


NUMPY: dict[str, Kernel] = {
    **{k: _ufunc(getattr(np, k)) for k in "tanh exp log log1p expm1 sin cos sqrt square".split()},
    **{k: _ufunc(getattr(np, k)) for k in "abs sign floor".split()},
    **dict(mul=_ufunc(np.multiply), add=_ufunc(np.add), add_any=_ufunc(np.add)),
    **dict(sub=_ufunc(np.subtract), neg=_ufunc(np.negative), div=_div, atan2=_ufunc(np.arctan2)),
    **dict(max=_ufunc(np.maximum), min=_ufunc(np.minimum), eq=_ufunc(np.equal)),
    **dict(ne=_ufunc(np.not_equal), lt=_ufunc(np.less), le=_ufunc(np.less_equal)),
    **dict(gt=_ufunc(np.greater), ge=_ufunc(np.greater_equal), erf=_ufunc(scipy.special.erf)),
    **{"and": _ufunc(np.bitwise_and), "or": _ufunc(np.bitwise_or), "not": _ufunc(np.bitwise_not)},
    **{k: _ufunc(lambda v: v) for k in ("copy", "copy_p", "stop_gradient")},
    "logistic": _ufunc(lambda v: 1 / (1 + np.exp(-v))),
    "integer_pow": _power,
    "select_n": _select,
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda values, p: values[0].squeeze(p["dimensions"]),
    "expand_dims": lambda values, p: np.expand_dims(values[0], p["dimensions"]),
    "transpose": lambda values, p: values[0].transpose(p["permutation"]),
    "rev": lambda values, p: np.flip(values[0], p["dimensions"]),
    "slice": _slice,
    "pad": _pad,
    "concatenate": lambda values, p: np.concatenate(values, p["dimension"]),
    "reduce_sum": lambda values, p: values[0].sum(tuple(p["axes"])),
    "reduce_max": lambda values, p: values[0].max(tuple(p["axes"])),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "rem": _rem,
    "stack": lambda values, p: np.stack(values, p["axis"]),
    "iota": _iota,
    "split": lambda values, p: np.split(values[0], np.cumsum(p["sizes"])[:-1], p["axis"]),
}
