"""Operators of ATen as functions of arrays: the one table of what torch computes.

A key is an operator, `mul` for all its overloads or `max.dim` for one. Its function gets the
arguments of the schema, tensors as arrays. It need not care for types: what it returns is
converted to the type that torch says. In-place operators are their functional ones (`add_` is
`add`), and what torch itself composes of others (`linear`, `gru_cell`, `einsum`) is not here.

Where a function has a kink, its derivative there is that of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

Array = jax.Array
Function = Callable[..., Any]
Axes = int | Sequence[int] | None


# --------------------------------------------------------------------------------- element-wise


def clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    """Inside and on the bounds the derivative is one."""
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    whole = all(jnp.issubdtype(jnp.result_type(a), jnp.integer) for a in (x, y))
    return lax.div(*jnp.broadcast_arrays(x, y)) if whole else jnp.trunc(jnp.true_divide(x, y))


def gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    straight = x * beta > threshold
    return jnp.where(straight, x, jnp.log1p(jnp.exp(jnp.where(straight, 0, x * beta))) / beta)


def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    low = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return scale * jnp.where(x > 0, x, low)


def leaky_relu(x: Array, slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


def hardtanh(x: Array, low: float = -1, high: float = 1) -> Array:
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def logit(x: Array, eps: float | None = None) -> Array:
    return special.logit(x if eps is None else clamp(x, eps, 1 - eps))


def nan_to_num(
    x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


def round_to(x: Array, *, decimals: int = 0) -> Array:
    return jnp.round(x, decimals)


def add(x: Any, y: Any, *, alpha: Any = 1) -> Array:
    return jnp.add(x, y if alpha == 1 else y * alpha)


def subtract(x: Any, y: Any, *, alpha: Any = 1) -> Array:
    return jnp.subtract(x, y if alpha == 1 else y * alpha)


def hard_sigmoid(x: Array) -> Array:
    return hardtanh(x / 6 + 0.5, 0, 1)


ELEMENTWISE: dict[str, Function] = {
    **{
        name: getattr(jnp, name)
        for name in (
            *("acos acosh asin asinh atan atanh ceil cos cosh deg2rad exp exp2 expm1".split()),
            *("floor isnan isinf isposinf isneginf log log10 log1p log2 logical_not".split()),
            *("rad2deg sign signbit sin sinc sinh sqrt tan tanh trunc".split()),
            *("atan2 copysign fmax fmin fmod gcd hypot heaviside lcm logaddexp".split()),
            *("logaddexp2 logical_and logical_or logical_xor maximum minimum".split()),
            *("remainder floor_divide bitwise_and bitwise_or bitwise_xor bitwise_not".split()),
        )
    },
    **{name: getattr(special, name) for name in ("digamma", "erf", "erfc", "erfinv", "xlogy")},
    "abs": lambda x: jnp.abs(x),
    "neg": jnp.negative,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "frac": lambda x: x - lax.stop_gradient(jnp.trunc(x)),
    "lgamma": special.gammaln,
    "special_xlog1py": special.xlog1py,
    "special_entr": special.entr,
    "special_log_ndtr": special.log_ndtr,
    "i0": jnp.i0,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "sgn": jnp.sign,
    "round": round_to,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "mish": lambda x: x * jnp.tanh(softplus(x)),
    "hardsigmoid": hard_sigmoid,
    "hardswish": lambda x: x * clamp(x + 3, 0, 6) / 6,
    "hardtanh": hardtanh,
    "hardshrink": lambda x, lambd=0.5: jnp.where(jnp.abs(x) > lambd, x, 0),
    "softshrink": lambda x, lambd=0.5: jnp.where(jnp.abs(x) > lambd, x - jnp.sign(x) * lambd, 0),
    "threshold": lambda x, threshold, value: jnp.where(x > threshold, x, value),
    "log_sigmoid_forward": lambda x: (jax.nn.log_sigmoid(x), jnp.exp(-jnp.abs(x))),
    "gelu": gelu,
    "softplus": softplus,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "_prelu_kernel": lambda x, slope: jnp.where(x > 0, x, x * slope),
    "glu": lambda x, dim=-1: jax.nn.glu(x, dim),
    "logit": logit,
    "nan_to_num": nan_to_num,
    "add": add,
    "sub": subtract,
    "rsub": lambda x, y, alpha=1: y - x * alpha,
    "mul": jnp.multiply,
    "div": divide,
    "pow": jnp.power,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), jnp.left_shift),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), jnp.right_shift),
    "lerp": lambda x, end, weight: x + weight * (end - x),
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "where": jnp.where,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": lambda x, high: clamp(x, None, high),
    "angle": jnp.angle,
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "complex": lax.complex,
    "polar": lambda r, angle: lax.complex(r * jnp.cos(angle), r * jnp.sin(angle)),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
}


# ------------------------------------------------------------------------------------- products


def addmm(bias: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """Also `addmv` and `baddbmm`: a bias, and a product."""
    product = jnp.matmul(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    n = weight.ndim - 2
    batched = x.ndim == weight.ndim
    x = x if batched else x[None]
    each = lambda sizes: tuple(sizes) if len(sizes) == n else tuple(sizes) * n
    stride, padding, dilation = each(stride), each(padding), each(dilation)
    pads, spread = [(p, p) for p in padding], (1,) * n
    if transposed:
        # (in, out / groups, *k) -> (out, in / groups, *k), with the kernel turned around.
        shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.swapaxes(weight.reshape(shape), 1, 2)
        weight = jnp.flip(weight.reshape(-1, *weight.shape[2:]), tuple(range(2, n + 2)))
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        more = each(output_padding)
        pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, more, strict=True)]
        stride, spread = spread, stride
    out = lax.conv_general_dilated(
        x, weight, stride, pads, lhs_dilation=spread, rhs_dilation=dilation,
        feature_group_count=groups,
    )  # fmt: skip
    out = out if bias is None else out + bias.reshape(-1, *(1,) * n)
    return out if batched else out[0]


def trilinear(
    a: Array, b: Array, c: Array, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Array:  # fmt: skip
    """The product of three arrays that lack some of the axes, summed over some."""
    axes = range(a.ndim + len(expand1))
    names = [[i for i in axes if i not in lacks] for lacks in (expand1, expand2, expand3)]
    out = [i for i in axes if i not in sumdim]
    return jnp.einsum(a, names[0], b, names[1], c, names[2], out)


PRODUCTS: dict[str, Function] = {
    "mm": jnp.matmul,
    "bmm": jnp.matmul,
    "mv": jnp.matmul,
    "dot": jnp.dot,
    "vdot": jnp.vdot,
    "addmm": addmm,
    "addmv": addmm,
    "baddbmm": addmm,
    "addbmm": lambda b, x, y, beta=1, alpha=1: beta * b + alpha * jnp.einsum("bij,bjk->ik", x, y),
    "addr": lambda b, x, y, beta=1, alpha=1: beta * b + alpha * jnp.outer(x, y),
    "convolution": convolution,
    "_trilinear": trilinear,
    "linalg_matrix_exp": jax.scipy.linalg.expm,
}


# ----------------------------------------------------------------------------------- reductions


def _axes(x: Array, dim: Axes) -> tuple[int, ...]:
    """Axes as torch gives them: none are all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


def reduction(function: Function) -> Function:
    return lambda x, dim=None, keepdim=False: function(x, axis=_axes(x, dim), keepdims=keepdim)


def _correction(unbiased: Any, correction: Any) -> Any:
    if correction is not None:
        return correction
    return 1 if unbiased is None else int(unbiased)


def variance(x: Array, dim: Any = None, *rest: Any, **options: Any) -> Array:
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, rest = None, (dim, *rest)
    unbiased = options.get("unbiased", rest[0] if rest else None)
    keep = options.get("keepdim", rest[1] if len(rest) > 1 else False)
    ddof = _correction(unbiased, options.get("correction"))
    axes = _axes(x, dim)
    count = math.prod(x.shape[a] for a in axes)
    centred = x - jnp.mean(x, axes, keepdims=True)
    return jnp.sum(jnp.real(centred * jnp.conj(centred)), axes, keepdims=keep) / (count - ddof)


def variance_and_mean(x: Array, dim: Any = None, *rest: Any, **options: Any) -> tuple[Array, Array]:
    keep = options.get("keepdim", rest[1] if len(rest) > 1 else False)
    axes = _axes(x, None if isinstance(dim, bool) else dim)
    return variance(x, dim, *rest, **options), jnp.mean(x, axes, keepdims=keep)


def _picked(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The values at these positions, and these."""
    index = jnp.expand_dims(index, dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def extremum(argument: Function) -> Function:
    """`max` or `min` along an axis, with the derivative at the position it returns."""

    def along(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), int)
        return _picked(x, argument(x, axis=dim), dim, keepdim)

    return along


def argument(function: Function) -> Function:
    return lambda x, dim=None, keepdim=False: (
        function(x, axis=dim, keepdims=keepdim) if x.ndim else jnp.zeros((), int)
    )


def vector_norm(x: Array, ord: float = 2, dim: Axes = None, keepdim: bool = False) -> Array:
    axes = _axes(x, dim)
    size = jnp.abs(x)
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(size, axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, axes, keepdims=keepdim)
    total = jnp.sum(jnp.real(x * jnp.conj(x)) if ord == 2 else size**ord, axes, keepdims=keepdim)
    safe = jnp.where(total == 0, 1, total)  # at zero the derivative is zero
    return jnp.where(total == 0, 0, safe ** (1 / ord))


def logsumexp(x: Array, dim: Axes, keepdim: bool = False) -> Array:
    return jax.nn.logsumexp(x, _axes(x, dim), keepdims=keepdim)


def along(function: Function) -> Function:
    """A scan along an axis, which a number does not have."""
    return lambda x, dim: function(x, axis=dim) if x.ndim else x


def running_extremum(scan: Function) -> Function:
    """`cummax` or `cummin`: the last position that a value was reached at."""

    def function(x: Array, dim: int) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), int)
        dim = dim % x.ndim
        reached = x == scan(x, axis=dim)
        at = jnp.where(reached, lax.broadcasted_iota(int, x.shape, dim), 0)
        index = lax.cummax(at, axis=dim)
        return jnp.take_along_axis(x, index, dim), index

    return function


def sort(x: Array, *args: Any, **options: Any) -> tuple[Array, Array]:
    """`sort(x, dim, descending)` and `sort.stable(x, *, stable, dim, descending)`."""
    if args and (args[0] is None or isinstance(args[0], bool)):
        args = args[1:]
    dim = options.get("dim", args[0] if args else -1)
    descending = options.get("descending", args[1] if len(args) > 1 else False)
    if not x.ndim:
        return x, jnp.zeros((), int)
    index = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, index, dim), index


def topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    index = jnp.argsort(x, axis=dim, stable=True, descending=largest)
    index = lax.slice_in_dim(index, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, index, dim), index


def softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)


def log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)


REDUCTIONS: dict[str, Function] = {
    "sum": reduction(jnp.sum),
    "mean": reduction(jnp.mean),
    "prod": reduction(jnp.prod),
    "amax": reduction(jnp.max),
    "amin": reduction(jnp.min),
    "all": reduction(jnp.all),
    "any": reduction(jnp.any),
    "max": lambda x: jnp.max(x),
    "min": lambda x: jnp.min(x),
    "max.dim": extremum(jnp.argmax),
    "min.dim": extremum(jnp.argmin),
    "aminmax": lambda x, dim=None, keepdim=False: (
        jnp.min(x, dim, keepdims=keepdim), jnp.max(x, dim, keepdims=keepdim)
    ),
    "argmax": argument(jnp.argmax),
    "argmin": argument(jnp.argmin),
    "count_nonzero": lambda x, dim=None: jnp.sum(x != 0, _axes(x, dim)),
    "var": variance,
    "var_mean": variance_and_mean,
    "std": lambda *args, **options: jnp.sqrt(variance(*args, **options)),
    "linalg_vector_norm": vector_norm,
    "logsumexp": logsumexp,
    "cumsum": along(jnp.cumsum),
    "cumprod": along(jnp.cumprod),
    "logcumsumexp": along(lambda x, axis: lax.cumlogsumexp(x, axis=axis % x.ndim)),
    "cummax": running_extremum(lambda x, axis: lax.cummax(x, axis=axis)),
    "cummin": running_extremum(lambda x, axis: lax.cummin(x, axis=axis)),
    "sort": sort,
    "topk": topk,
    "_softmax": softmax,
    "_log_softmax": log_softmax,
    "trace": jnp.trace,
}  # fmt: skip


# ------------------------------------------------------------------- axes, positions, and copies


def squeeze(x: Array, dim: Axes = None) -> Array:
    axes = range(x.ndim) if dim is None else _axes(x, dim)
    return jnp.squeeze(x, tuple(a for a in axes if x.shape[a] == 1))


def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    new = len(size) - x.ndim
    shape = [x.shape[i - new] if n == -1 else n for i, n in enumerate(size)]
    return jnp.broadcast_to(x, shape)


def cut(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1):
    """`slice`: bounds count from the end if negative, and stop at it."""
    start, end, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, start, max(start, end), step, dim % x.ndim)


def select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, dim, keepdims=False)


def split(x: Array, size: int, dim: int = 0) -> list[Array]:
    whole = x.shape[dim]
    return jnp.split(x, list(range(size, whole, size)), dim) if whole > size else [x]


def split_in(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def unbind(x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


def concatenate(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Empty vectors count for nothing, whatever the others are."""
    kept = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept or list(tensors), dim)


def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, repeats)


def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not len(dims):
        return jnp.roll(x, shifts[0])
    return jnp.roll(x, tuple(shifts), tuple(dims))


def diagonal_embedding(x: Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Array:
    n = x.shape[-1] + abs(offset)
    rows, columns = max(-offset, 0), max(offset, 0)
    placed = x[..., :, None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    pad = [(0, 0)] * (x.ndim - 1)
    ends = [(rows, n - rows - x.shape[-1]), (columns, n - columns - x.shape[-1])]
    return jnp.moveaxis(jnp.pad(placed, [*pad, *ends]), (-2, -1), (dim1, dim2))


def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    if not x.ndim:
        return x.reshape(1)
    dim = dimension % x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


def pad_constant(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Pairs of what is added before and after, from the last axis on; negative ones cut."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    config = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(a, b, 0) for a, b in pairs]
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def padding(mode: str) -> Function:
    def padded(x: Array, pad: Sequence[int]) -> Array:
        pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
        return jnp.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, mode=mode)

    return padded


def index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if i is None else i for i in indices)]


def index_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, *_: Any
) -> Array:
    place = tuple(slice(None) if i is None else i for i in indices)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == bool:
        mask = jnp.reshape(indices[0], indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        if jnp.size(values) == 1:  # by a mask: one value for all positions
            values = jnp.reshape(values, ())
            return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[place]
    values = jnp.asarray(values, x.dtype)
    return at.add(values) if accumulate else at.set(values)


def gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if not x.ndim:
        return jnp.broadcast_to(x, index.shape)
    return x[_places(x, dim, index)]


def _places(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Every element of `index` at its own position, but along `dim`."""
    grid = [lax.broadcasted_iota(index.dtype, index.shape, a) for a in range(x.ndim)]
    grid[dim % x.ndim] = jnp.where(index < 0, index + x.shape[dim], index)
    return tuple(grid)


def scatter(x: Array, dim: int, index: Array, src: Any, *, reduce: str | None = None) -> Array:
    src = src if jnp.ndim(src) == 0 else src[tuple(slice(n) for n in index.shape)]
    at = x.at[_places(x, dim, index)]
    src = jnp.asarray(src, x.dtype)
    if reduce is None:
        return at.set(src)
    return at.add(src) if reduce == "add" else at.multiply(src)


def scatter_add(x: Array, dim: int, index: Array, src: Array) -> Array:
    return scatter(x, dim, index, src, reduce="add")


def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    place = (slice(None),) * (dim % x.ndim) + (index,)
    return x.at[place].add(alpha * source)


def index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source)


def index_fill(x: Array, dim: int, index: Array, value: Any) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(value)


def index_select(x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, jnp.atleast_1d(index), axis=dim) if x.ndim else x


def select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(src)


def slice_scatter(
    x: Array, src: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(src)


def diagonal_scatter(x: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    i = np.arange(src.shape[-1])
    filled = moved.at[..., i + max(-offset, 0), i + max(offset, 0)].set(src)
    return jnp.moveaxis(filled, (-2, -1), (dim1, dim2))


def embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    by_count: bool = False,
    sparse: bool = False,
) -> Array:
    """Rows; the one of the padding has no gradient."""
    if by_count:
        raise NotImplementedError("embeddings with scale_grad_by_freq")
    rows = weight[indices]
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def embedding_bag(
    weight: Array, indices: Array, offsets: Array, by_count: bool = False, mode: int = 0,
    sparse: bool = False, share: Array | None = None, last: bool = False, padding_idx: int = -1,
) -> tuple[Array, ...]:  # fmt: skip
    """Sums or means of rows, in bags that begin at `offsets`."""
    if mode == 2:
        raise NotImplementedError("embedding bags with mode='max'")
    rows = embedding(weight, indices, padding_idx, by_count)
    counted = jnp.ones(indices.shape, weight.dtype)
    if padding_idx >= 0:
        counted = jnp.where(indices == padding_idx, 0, counted)
    rows = rows * (counted if share is None else counted * share)[:, None]
    places = jnp.arange(len(indices))
    bags = jnp.searchsorted(offsets, places, side="right") - 1
    number = len(offsets) - last
    out = jax.ops.segment_sum(rows, bags, number)
    sizes = jax.ops.segment_sum(counted, bags, number)
    out = out / jnp.maximum(sizes, 1)[:, None] if mode == 1 else out
    return out, bags, sizes, jnp.zeros(0, indices.dtype)


def constant_like(value: Any) -> Function:
    return lambda x, *_, **__: jnp.full(x.shape, value, x.dtype)


def new_constant(value: Any) -> Function:
    return lambda x, size, *_, **__: jnp.full(size, value, x.dtype)


SHAPES: dict[str, Function] = {
    "view": lambda x, size: x.reshape(size),
    "_unsafe_view": lambda x, size: x.reshape(size),
    "permute": lambda x, dims: jnp.transpose(x, dims),
    "transpose": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
    "t": jnp.transpose,
    "unsqueeze": jnp.expand_dims,
    "squeeze": squeeze,
    "expand": expand,
    "slice": cut,
    "select": select,
    "split": split,
    "unsafe_split": split,
    "split_with_sizes": split_in,
    "unsafe_split_with_sizes": split_in,
    "unbind": unbind,
    "cat": concatenate,
    "stack": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "repeat": repeat,
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "roll": roll,
    "rot90": lambda x, k=1, dims=(0, 1): jnp.rot90(x, k, tuple(dims)),
    "alias": lambda x: x,
    "detach": lax.stop_gradient,
    "clone": lambda x: x,
    "_to_copy": lambda x: x,
    "copy": lambda x, src, *_: jnp.broadcast_to(src, x.shape),
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    "diag_embed": diagonal_embedding,
    "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "unfold": unfold,
    "constant_pad_nd": pad_constant,
    **{f"reflection_pad{n}d": padding("reflect") for n in (1, 2, 3)},
    **{f"replication_pad{n}d": padding("edge") for n in (1, 2, 3)},
    "index": index,
    "index_put": index_put,
    "_unsafe_index": index,
    "_unsafe_index_put": index_put,
    "index_select": index_select,
    "index_add": index_add,
    "index_copy": index_copy,
    "index_fill": index_fill,
    "gather": gather,
    "scatter": scatter,
    "scatter_add": scatter_add,
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    "diagonal_scatter": diagonal_scatter,
    "take": lambda x, index: x.ravel()[index],
    "embedding": embedding,
    "_embedding_bag_forward_only": embedding_bag,
    "fill": lambda x, value: jnp.full(x.shape, value, x.dtype),
    "zero": constant_like(0),
    "zeros_like": constant_like(0),
    "ones_like": constant_like(1),
    "empty_like": constant_like(0),
    "full_like": lambda x, value, **_: jnp.full(x.shape, value),
    "new_zeros": new_constant(0),
    "new_ones": new_constant(1),
    "new_empty": new_constant(0),
    "new_full": lambda x, size, value, **_: jnp.full(size, value),
}


# ----------------------------------------------------------------------- layers, pools and losses


def layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = jnp.mean(x, axes, keepdims=True)
    scale = lax.rsqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + eps)
    out = (x - mean) * scale
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, scale


def group_norm(
    x: Array, weight: Array | None, bias: Array | None, N: int, C: int, HxW: int,
    group: int, eps: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    parts = x.reshape(N, group, -1)
    out, mean, scale = layer_norm(parts, parts.shape[2:], None, None, eps)
    out = out.reshape(x.shape)
    each = (1, C, *(1,) * (x.ndim - 2))
    out = out if weight is None else out * weight.reshape(each)
    out = out if bias is None else out + bias.reshape(each)
    return out, mean[..., 0], scale[..., 0]


def _pooled(x: Array, n: int, size: Sequence[int], stride: Sequence[int], padding: Any) -> Any:
    """Window sizes, strides and paddings of all axes of a pool over the last `n`."""
    each = lambda sizes: tuple(sizes) if len(sizes) == n else tuple(sizes) * n
    size = each(size)
    stride = each(stride) if len(stride) else size
    one = (1,) * (x.ndim - n)
    pads = [(0, 0)] * (x.ndim - n) + [(p, p) for p in each(padding)]
    return (*one, *size), (*one, *stride), pads


def average_pool(n: int) -> Function:
    def pool(
        x: Array, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        ceil_mode: bool = False, count_include_pad: bool = True, divisor: int | None = None,
    ) -> Array:  # fmt: skip
        if ceil_mode:
            raise NotImplementedError("average pools with ceil_mode")
        window = _pooled(x, n, size, stride, padding)
        total = lax.reduce_window(x, 0.0, lax.add, *window)
        if divisor is None and not count_include_pad:
            return total / lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, *window)
        return total / (divisor or math.prod(window[0]))

    return pool


def max_pool(n: int) -> Function:
    """The maxima of windows, and their positions in the unpadded image."""

    def pool(
        x: Array, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> tuple[Array, Array]:  # fmt: skip
        if ceil_mode:
            raise NotImplementedError("max pools with ceil_mode")
        sizes, strides, pads = _pooled(x, n, size, stride, padding)
        spread = (*(1,) * (x.ndim - n), *(tuple(dilation) * n)[:n])
        image = x.shape[x.ndim - n :]
        place = jnp.arange(math.prod(image)).reshape(image)
        padded = jnp.pad(x, pads, constant_values=-jnp.inf)
        place = jnp.broadcast_to(jnp.pad(place, pads[x.ndim - n :]), padded.shape)
        views, places = [], []
        for offset in np.ndindex(*sizes):  # few: a window of a pool is small
            starts = [o * d for o, d in zip(offset, spread, strict=True)]
            spans = zip(padded.shape, sizes, spread, strict=True)
            ends = [s + n - d * (k - 1) for s, (n, k, d) in zip(starts, spans, strict=True)]
            views.append(lax.slice(padded, starts, ends, strides))
            places.append(lax.slice(place, starts, ends, strides))
        stacked, which = jnp.stack(views), jnp.argmax(jnp.stack(views), 0)[None]
        value = jnp.take_along_axis(stacked, which, 0)[0]
        return value, jnp.take_along_axis(jnp.stack(places), which, 0)[0]

    return pool


def adaptive_average(n: int) -> Function:
    """Means over windows that cover the image evenly, one product per axis."""

    def pool(x: Array, size: Sequence[int]) -> Array:
        for axis, out in zip(range(x.ndim - n, x.ndim), size, strict=True):
            whole = x.shape[axis]
            starts = [i * whole // out for i in range(out)]
            ends = [-(-(i + 1) * whole // out) for i in range(out)]
            parts = [
                jnp.mean(lax.slice_in_dim(x, a, b, axis=axis), axis, keepdims=True)
                for a, b in zip(starts, ends, strict=True)
            ]
            x = jnp.concatenate(parts, axis)
        return x

    return pool


def nearest(n: int) -> Function:
    def upsample(x: Array, size: Sequence[int], *scales: float | None) -> Array:
        for axis, out in zip(range(x.ndim - n, x.ndim), size, strict=True):
            scale = scales[axis - x.ndim + n] if scales else None
            ratio = 1 / scale if scale else x.shape[axis] / out
            at = np.minimum((np.arange(out) * ratio).astype(int), x.shape[axis] - 1)
            x = jnp.take(x, at, axis=axis)
        return x

    return upsample


def _reduced(loss: Array, how: int) -> Array:
    """The reductions of torch's losses: none, mean, sum."""
    return (lambda a: a, jnp.mean, jnp.sum)[how](loss)


def binary_cross_entropy(x: Array, y: Array, weight: Any = None, reduction: int = 1) -> Array:
    log = lambda a: jnp.maximum(jnp.log(a), -100)
    loss = -(y * log(x) + (1 - y) * log(1 - x))
    return _reduced(loss if weight is None else loss * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Array, y: Array, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Array:
    positive = y if pos_weight is None else y * pos_weight
    loss = -(positive * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x))
    return _reduced(loss if weight is None else loss * weight, reduction)


def negative_log_likelihood(
    x: Array, y: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    """Classes are axis 1, or the only one."""
    axis = 0 if x.ndim == 1 else 1
    counted = y != ignore_index
    label = jnp.where(counted, y, 0)
    picked = jnp.take_along_axis(x, jnp.expand_dims(label, axis), axis).squeeze(axis)
    share = jnp.ones((), x.dtype) if weight is None else weight[label]
    share = jnp.where(counted, share, 0)
    total = jnp.sum(share)
    loss = -picked * share
    if reduction == 1:
        return jnp.sum(loss) / total, total
    return _reduced(loss, reduction), total if reduction else jnp.zeros((), x.dtype)


def smooth_l1(x: Array, y: Array, reduction: int = 1, beta: float = 1.0) -> Array:
    e = jnp.abs(x - y)
    return _reduced(
        jnp.where(e < beta, 0.5 * e**2 / beta, e - 0.5 * beta) if beta else e, reduction
    )


def huber(x: Array, y: Array, reduction: int = 1, delta: float = 1.0) -> Array:
    e = jnp.abs(x - y)
    return _reduced(jnp.where(e < delta, 0.5 * e**2, delta * (e - 0.5 * delta)), reduction)


LAYERS: dict[str, Function] = {
    "native_layer_norm": layer_norm,
    "native_group_norm": group_norm,
    **{f"avg_pool{n}d": average_pool(n) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": max_pool(n) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": adaptive_average(n) for n in (2, 3)},
    **{f"upsample_nearest{n}d": nearest(n) for n in (1, 2, 3)},
    "mse_loss": lambda x, y, reduction=1: _reduced((x - y) ** 2, reduction),
    "smooth_l1_loss": smooth_l1,
    "huber_loss": huber,
    "soft_margin_loss": lambda x, y, reduction=1: _reduced(jnp.log1p(jnp.exp(-y * x)), reduction),
    "binary_cross_entropy": binary_cross_entropy,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "nll_loss_forward": negative_log_likelihood,
    "nll_loss2d_forward": negative_log_likelihood,
}

TABLE: dict[str, Function] = {**ELEMENTWISE, **PRODUCTS, **REDUCTIONS, **SHAPES, **LAYERS}
