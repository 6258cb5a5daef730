"""What each linear primitive does to the sets of sources of its operands.

Data movement is executed on the arrays of source numbers themselves; an element-wise primitive
takes the union, and so does a choice: a slice or a gather at a place that is not known may read any
place along the axis. A rule returns the source arrays of the outputs, or the reason why the
equation mixes elements.

A *sum* (`is_sum`) takes each element to one result; whether that mixes units depends on where the
result goes. `spread` is the rule for what mixes anyway: which elements it can mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from .._jaxpr import ELEMENTWISE, Equation, bind
from ._choices import any_gathered, any_scattered, any_slice, any_update
from ._sets import NONE, Result, Sources, joined, union


def move(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    default = _elementwise if eqn.name in ELEMENTWISE else _mixing
    return _RULES.get(eqn.name, default)(eqn, arrays, known)


def _mixing(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    return f"{eqn.name} mixes elements"


def _elementwise(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    shape = eqn.outputs[0].shape
    moving = [a for a in arrays if a is not None]
    moving = [
        a if a.shape[:-1] == shape else np.broadcast_to(a, (*shape, a.shape[-1])) for a in moving
    ]
    return [union(moving)]


def _columns(move: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Apply a data movement to each column of sources."""
    return np.moveaxis(np.stack([move(c) for c in np.moveaxis(array, -1, 0)]), 0, -1)


def _moved(make: Callable[[Equation], Callable[[np.ndarray], np.ndarray]]):
    def rule(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
        array = arrays[0]
        assert array is not None
        if array.shape[-1] == 0:
            return [np.full((*v.shape, 0), NONE) for v in eqn.outputs]
        return [_columns(make(eqn), array)]

    return rule


def _broadcast_in_dim(eqn: Equation):
    shape, dims = eqn.outputs[0].shape, eqn.params["broadcast_dimensions"]

    def move(a: np.ndarray) -> np.ndarray:
        full = [1] * len(shape)
        for n, d in zip(a.shape, dims, strict=True):
            full[d] = n
        return np.broadcast_to(a.reshape(full), shape)

    return move


def _reshape(eqn: Equation):
    order = eqn.params.get("dimensions")  # the operand is transposed first
    return lambda a: (a if order is None else a.transpose(order)).reshape(eqn.outputs[0].shape)


def _slice(eqn: Equation):
    p = eqn.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    at = tuple(map(slice, p["start_indices"], p["limit_indices"], strides))
    return lambda a: a[at]


def _padded(a: np.ndarray, config: Any) -> np.ndarray:
    for axis, (low, high, inner) in enumerate(config):
        n = a.shape[axis]
        shape = list(a.shape)
        shape[axis] = max(n + (n - 1) * inner, 0) if n else 0
        wide = np.full(shape, NONE)
        wide[(slice(None),) * axis + (slice(None, None, inner + 1),)] = a
        widths = [(0, 0)] * a.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        wide = np.pad(wide, widths, constant_values=NONE)
        stop = wide.shape[axis] - max(-high, 0)
        a = wide[(slice(None),) * axis + (slice(max(-low, 0), stop),)]
    return a


def _pad(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    array, filler = arrays
    config = eqn.params["padding_config"]
    shape = eqn.outputs[0].shape
    out = []
    if array is not None:
        out.append(
            _columns(lambda a: _padded(a, config), array)
            if array.shape[-1]
            else np.full((*shape, 0), NONE)
        )
    if filler is not None:
        out.append(np.broadcast_to(filler, (*shape, filler.shape[-1])))
    return [union(out)]


def _side_by_side(eqn: Equation, arrays: list[Sources]) -> list[np.ndarray]:
    """The operands' sources, all of the same width; a constant operand has none."""
    width = max(a.shape[-1] for a in arrays if a is not None)
    parts = [np.full((*atom.shape, width), NONE) for atom in eqn.inputs]
    for part, a in zip(parts, arrays, strict=True):
        if a is not None:
            part[..., : a.shape[-1]] = a
    return parts


def _concatenate(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    return [np.concatenate(_side_by_side(eqn, arrays), axis=eqn.params["dimension"])]


def _split(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    array, axis = arrays[0], eqn.params["axis"]
    assert array is not None
    return np.split(array, np.cumsum(eqn.params["sizes"])[:-1], axis=axis)


def _reduce(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    array = arrays[0]
    assert array is not None
    return [joined(array, eqn.params["axes"])]


def _window(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """Pooling: each result joins the elements of its window."""
    array, p = arrays[0], eqn.params
    assert array is not None
    n = len(p["window_dimensions"])
    dilation = p["base_dilation"] or (1,) * n
    inner = p["window_dilation"] or (1,) * n
    config = [(lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], dilation, strict=True)]
    wide = np.stack([_padded(c, config) for c in np.moveaxis(array, -1, 0)], -1)
    shape = eqn.outputs[0].shape
    parts = []
    for offset in np.ndindex(*p["window_dimensions"]):
        at = tuple(
            slice(o * d, o * d + (k - 1) * s + 1, s)
            for o, d, k, s in zip(offset, inner, shape, p["window_strides"], strict=True)
        )
        parts.append(wide[at])
    return [union(parts)]


def is_sum(eqn: Equation, arrays: list[Sources]) -> bool:
    """Whether an equation takes each moving element to one result, several to the same."""
    if eqn.name == "reduce_sum":
        return any(eqn.inputs[0].shape[a] > 1 for a in eqn.params["axes"])
    if eqn.name in _WINDOWS:
        return True
    if eqn.name != "dot_general":
        return False
    (side,) = [i for i, a in enumerate(arrays) if a is not None][:1]
    contract, _ = eqn.params["dimension_numbers"]
    sums = any(eqn.inputs[side].shape[a] > 1 for a in contract[side])
    return sums and not _fans_out(eqn, side)


def _fans_out(eqn: Equation, side: int) -> bool:
    """Whether the other operand of a product has an axis of its own."""
    contract, batch = eqn.params["dimension_numbers"]
    other = eqn.inputs[1 - side].shape
    taken = {*contract[1 - side], *batch[1 - side]}
    return any(n > 1 for i, n in enumerate(other) if i not in taken)


def _dot_general(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    contract, _ = eqn.params["dimension_numbers"]
    for side, array in enumerate(arrays):
        sums = any(eqn.inputs[side].shape[a] > 1 for a in contract[side])
        if array is not None and sums and _fans_out(eqn, side):
            return "a matrix product mixes units"
    return _product(eqn, arrays, known)


def _product(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    contract, batch = eqn.params["dimension_numbers"]
    shapes = [a.shape for a in eqn.inputs]
    free = [
        [i for i in range(len(s)) if i not in contract[k] and i not in batch[k]]
        for k, s in enumerate(shapes)
    ]
    out = []
    for side, array in enumerate(arrays):
        if array is None:
            continue
        summed = joined(array, contract[side], keep=True)
        order = [*batch[side], *free[side], *contract[side]]
        moved = summed.transpose([*order, summed.ndim - 1])
        nb, nf = len(batch[side]), len(free[side])
        head = moved.shape[:nb]
        own = moved.shape[nb : nb + nf]
        other = (1,) * len(free[1 - side])
        spread = (*head, *(other + own if side else own + other), summed.shape[-1])
        wide = (*eqn.outputs[0].shape, summed.shape[-1])
        out.append(np.broadcast_to(moved.reshape(spread), wide))
    return [union(out)]


def _indexed(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """Gathers and slices at known places: run them on the source numbers."""
    array = arrays[0]
    assert array is not None
    if any(k is None for k in known[1:]):
        return (any_gathered if eqn.name == "gather" else any_slice)(eqn, array, known)
    if array.shape[-1] == 0:
        return [np.full((*eqn.outputs[0].shape, 0), NONE)]
    if "fill_value" in eqn.params:  # what is read outside the array is no element of it
        eqn = replace(eqn, params={**eqn.params, "fill_value": NONE})
    return [_columns(lambda a: _run(eqn, [a, *known[1:]]), array)]


def _overwrite(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """`scatter` and `dynamic_update_slice` at known places."""
    first = 2 if eqn.name == "dynamic_update_slice" else 1
    indices = known[first:] if first == 2 else known[1:2]
    if any(k is None for k in indices):
        return (any_update if first == 2 else any_scattered)(eqn, arrays, known)
    update_at = 1 if first == 2 else 2
    shapes = [a.shape for a in eqn.inputs]
    width = max(a.shape[-1] for a in arrays if a is not None)
    if width == 0:
        return [np.full((*eqn.outputs[0].shape, 0), NONE)]

    def column(at: int, k: int) -> np.ndarray:
        a = arrays[at]
        return a[..., k] if a is not None and k < a.shape[-1] else np.full(shapes[at], NONE)

    columns = []
    for k in range(width):
        values: list[Any] = list(known)
        values[0], values[update_at] = column(0, k), column(update_at, k)
        columns.append(_run(eqn, values))
    return [np.stack(columns, axis=-1)]


def _accumulate(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """`scatter_add` at known places: an element reads its own sources and those added to it."""
    operand, _, updates = arrays
    indices = known[1]
    shape = eqn.outputs[0].shape
    size = int(np.prod(shape, dtype=np.int64))
    if indices is None:
        return any_scattered(eqn, arrays, known)
    if size >= 1 << 24:
        return f"{eqn.name} into {size} elements"
    parts = [] if operand is None else [operand]
    if updates is not None:
        # The transpose of a scatter is a gather: it tells where each update lands (0: nowhere).
        with jax.ensure_compile_time_eval():
            number = jax.numpy.arange(1, size + 1, dtype="float32").reshape(shape)
            zeros = jax.numpy.zeros(shape, "float32")
            update = jax.ShapeDtypeStruct(eqn.inputs[2].shape, "float32")
            gather = jax.linear_transpose(lambda u: bind(eqn, [zeros, indices, u])[0], update)
            landing = np.asarray(gather(number)[0]).astype(np.int64) - 1
        parts.append(_collect(landing.reshape(-1), updates.reshape(landing.size, -1), size, shape))
    return [union(parts)]


def _collect(landing: np.ndarray, sources: np.ndarray, size: int, shape: tuple) -> np.ndarray:
    """Sets of sources per element, from the elements where rows of sources land."""
    row, slot = np.nonzero((sources != NONE) & (landing[:, None] != NONE))
    pairs = np.unique(np.stack([landing[row], sources[row, slot]]), axis=1)
    first = np.searchsorted(pairs[0], pairs[0])
    rank = np.arange(pairs.shape[1]) - first
    out = np.full((size, int(rank.max(initial=-1)) + 1), NONE)
    out[pairs[0], rank] = pairs[1]
    return out.reshape((*shape, out.shape[-1]))


def _each(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """Several values passed on side by side."""
    empty = [np.full((*v.shape, 0), NONE) for v in eqn.outputs]
    return [e if a is None else a for a, e in zip(arrays, empty, strict=True)]


def _select(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    """A choice that is known at compile time reads one side only."""
    which = known[0]
    if which is None:
        return _elementwise(eqn, arrays, known)
    shape = eqn.outputs[0].shape
    width = max(a.shape[-1] for a in arrays if a is not None)
    out = np.full((*shape, width), NONE)
    for case, array in enumerate(arrays[1:]):
        if array is not None:
            chosen = np.broadcast_to(np.asarray(which) == case, shape)
            out[..., : array.shape[-1]][chosen] = array[chosen]
    return [out]


def _stack(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    axis = eqn.params["axis"]
    return [np.stack(_side_by_side(eqn, arrays), axis=axis if axis >= 0 else axis - 1)]


def _unstack(eqn: Equation, arrays: list[Sources], known: list[Any]) -> Result:
    array = arrays[0]
    assert array is not None
    axis = eqn.params["axis"]
    return list(np.moveaxis(array, axis if axis >= 0 else axis - 1, 0))


def _run(eqn: Equation, values: list[Any]) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        out = bind(eqn, [jax.numpy.asarray(v) for v in values])[0]
    return np.maximum(np.asarray(out).astype(np.int64), NONE)  # a fill value of any sign is NONE


def spread(eqn: Equation, arrays: list[Sources], known: list[Any]) -> list[np.ndarray]:
    """The sets of an equation that mixes: precise for products, else everything it reads."""
    if eqn.name == "dot_general":
        return _product(eqn, arrays, known)  # type: ignore[return-value]
    if eqn.name in ("cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin"):
        array = arrays[0]
        assert array is not None
        found = joined(array, [eqn.params["axis"]], keep=True)
        return [np.broadcast_to(found, (*eqn.outputs[0].shape, found.shape[-1]))]
    if eqn.name == "conv_general_dilated" and arrays[1] is None:
        return [_convolved(eqn, arrays[0])]
    met = [np.unique(a[a != NONE]) for a in arrays if a is not None]
    all_of_them = np.unique(np.concatenate(met))
    return [np.broadcast_to(all_of_them, (*v.shape, len(all_of_them))) for v in eqn.outputs]


def _convolved(eqn: Equation, array: Any) -> np.ndarray:
    """The sets of a convolution: the elements under its kernel, in all channels of the input."""
    p = eqn.params
    dims = p["dimension_numbers"]
    spatial = [eqn.inputs[1].shape[a] for a in dims.rhs_spec[2:]]
    if p["batch_group_count"] != 1:
        array = joined(array, [dims.lhs_spec[0]], keep=True)
        array = np.broadcast_to(array, (*eqn.inputs[0].shape, array.shape[-1]))
    moved = array.transpose([*dims.lhs_spec, array.ndim - 1])  # batch, channel, space, sources
    flat = joined(moved, [1], keep=True)
    config = [(0, 0, 0), (0, 0, 0)] + [
        (lo, hi, d - 1) for (lo, hi), d in zip(p["padding"], p["lhs_dilation"], strict=True)
    ]
    wide = np.stack([_padded(c, config) for c in np.moveaxis(flat, -1, 0)], -1)
    shape = tuple(eqn.outputs[0].shape[a] for a in dims.out_spec)
    parts = []
    for offset in np.ndindex(*spatial):
        at = tuple(
            slice(o * d, o * d + (k - 1) * s + 1, s)
            for o, d, k, s in zip(
                offset, p["rhs_dilation"], shape[2:], p["window_strides"], strict=True
            )
        )
        parts.append(wide[(slice(0, shape[0]), slice(None), *at)])
    found = union(parts)
    found = np.broadcast_to(found, (*shape, found.shape[-1]))
    return found.transpose([*np.argsort(dims.out_spec), found.ndim - 1])


_WINDOWS = {"reduce_window_sum", "select_and_gather_add"}
_RULES: dict[str, Callable[[Equation, list[Sources], list[Any]], Result]] = {
    "broadcast_in_dim": _moved(_broadcast_in_dim),
    "reshape": _moved(_reshape),
    "squeeze": _moved(lambda e: lambda a: a.reshape(e.outputs[0].shape)),
    "expand_dims": _moved(lambda e: lambda a: a.reshape(e.outputs[0].shape)),
    "transpose": _moved(lambda e: lambda a: a.transpose(e.params["permutation"])),
    "rev": _moved(lambda e: lambda a: np.flip(a, e.params["dimensions"])),
    "slice": _moved(_slice),
    "concatenate": _concatenate,
    "pad": _pad,
    "split": _split,
    "reduce_sum": _reduce,
    "dot_general": _dot_general,
    "reduce_window_sum": _window,
    "select_and_gather_add": _window,
    "gather": _indexed,
    "dynamic_slice": _indexed,
    "scatter": _overwrite,
    "optimization_barrier": _each,
    "device_put": _each,
    "scatter-add": _accumulate,
    "scatter_add": _accumulate,
    "scatter-mul": _accumulate,
    "scatter_mul": _accumulate,
    "scatter-sub": _accumulate,
    "scatter_sub": _accumulate,
    "select_n": _select,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _moved(lambda e: lambda a: np.tile(a, e.params["reps"])),
    "dynamic_update_slice": _overwrite,
}
