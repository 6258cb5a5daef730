"""Calls of torch that use every operator of the table: shapes, broadcasting, types, negative axes.

A sample is (function, *arguments). Floating arguments are differentiated by.
"""
# ruff: noqa: E501

import math

import torch
import torch.nn.functional as F

float64 = torch.float64
generator = torch.Generator().manual_seed(0)


def normal(*shape, dtype=float64):
    return torch.randn(shape, dtype=dtype, generator=generator)


def positive(*shape):
    return torch.rand(*shape, dtype=float64, generator=generator) + 0.1


def unit(*shape):
    return torch.rand(*shape, dtype=float64, generator=generator) * 0.98 + 0.01


def integers(*shape, low=0, high=5):
    return torch.randint(low, high, shape, generator=generator)


def mask(*shape):
    return torch.rand(*shape, generator=generator) > 0.5


def method(name, *args, **options):
    """A method of the first argument."""
    return lambda x, *more: getattr(x, name)(*more, *args, **options)


def distinct(*shape):
    """Values without ties."""
    n = math.prod(shape)
    return (torch.randperm(n, generator=generator).double() / n - 0.4).reshape(shape)


REAL = (
    "abs asinh atan ceil cos cosh deg2rad erf erfc exp exp2 expm1 floor frac i0 neg rad2deg relu "
    "round sgn sigmoid sign sin sinc sinh square tan tanh trunc"
).split()
POSITIVE = "digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt".split()
SPECIAL = "entr i0e i1 i1e log_ndtr ndtr".split()
ACTIVATIONS = (
    "elu celu selu gelu silu mish softplus hardswish hardtanh hardshrink softshrink "
    "leaky_relu logsigmoid relu6 tanhshrink softsign"
).split()
KINKS = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 30.0], dtype=float64)
BINARY = (
    "add sub mul div maximum minimum fmax fmin atan2 logaddexp logaddexp2 hypot copysign".split()
)
COMPARED = "eq ne lt le gt ge".split()
BITS = "bitwise_and bitwise_or bitwise_xor gcd lcm".split()
REDUCED = "sum mean prod amax amin".split()

element_wise = [
    *((getattr(torch, n), normal(2, 3)) for n in REAL),
    *((getattr(torch, n), normal(3, dtype=torch.float32)) for n in ("exp", "tanh", "sigmoid")),
    *((getattr(torch, n), integers(4, low=1)) for n in ("exp", "sqrt", "sin", "abs", "neg", "sgn")),
    *((getattr(torch, n), positive(2, 3)) for n in POSITIVE),
    *((getattr(torch.special, n), positive(2, 3)) for n in SPECIAL),
    *((getattr(torch, n), unit(5) * 2 - 1) for n in ("acos", "asin", "atanh", "erfinv")),
    (torch.acosh, positive(4) + 1),
    (torch.special.xlog1py, normal(3), positive(3)),
    *((getattr(F, n), normal(3, 4)) for n in ACTIVATIONS),
    *((getattr(F, n), KINKS) for n in ("relu", "elu", "leaky_relu", "relu6", "softplus", "gelu")),
    *((getattr(F, n), KINKS + 0.01) for n in ("hardswish", "hardtanh")),
    (F.hardsigmoid, normal(4, dtype=torch.float32)),  # torch rounds its slope to float32
    (lambda x: F.gelu(x, approximate="tanh"), normal(4)),
    (lambda x: F.softplus(x, beta=2.0, threshold=1.0), normal(6)),
    (lambda x: F.elu(x, alpha=0.7), normal(6)),
    (lambda x: F.leaky_relu(x, 0.2), normal(6)),
    (lambda x, w: F.prelu(x, w), normal(2, 3), positive(3)),
    (lambda x: F.threshold(x, 0.1, 7.0), normal(5)),
    (lambda x: F.glu(x, 0), normal(4, 3)),
    (lambda x: F.glu(x), normal(4, 6)),
    (lambda x: torch.logit(x), unit(4)),
    (lambda x: torch.logit(x, 0.2), unit(6)),
    (lambda x: torch.round(x, decimals=1), normal(4)),
    (lambda x: torch.nan_to_num(torch.where(x > 0, x, math.nan), 2.0), normal(5)),
    (lambda x: torch.clamp(x, -0.5, 0.5), KINKS),
    (lambda x: torch.clamp(x, max=0.5), KINKS),
    (lambda x, y: torch.clamp(x, min=y), normal(4), normal(4)),
    (lambda x: x.clamp_min(0.1), normal(4)),
    (lambda x: x.clamp_max(0.1), normal(4)),
    *((getattr(torch, n), normal(2, 3), normal(2, 3)) for n in BINARY),
    *((getattr(torch, n), normal(2, 1, 3), normal(4, 1)) for n in BINARY[:6]),
    *((getattr(torch, n), normal(3, dtype=torch.float32), normal()) for n in ("add", "mul", "div")),
    *((getattr(torch, n), integers(3), normal(3)) for n in ("add", "sub", "mul")),
    (torch.div, integers(3), integers(3, low=1)),
    (lambda x: x + 1, integers(3)),
    (lambda x: x * 0.5, integers(3)),
    (lambda x: 2 - x, normal(3)),
    (lambda x: 2 / x, positive(3)),
    (lambda x, y: torch.add(x, y, alpha=3), normal(3), normal(3)),
    (lambda x, y: torch.sub(x, y, alpha=3), normal(3), normal(3)),
    (lambda x, y: torch.rsub(x, y, alpha=2), normal(3), normal(3)),
    (lambda x, y: torch.div(x, y, rounding_mode="floor"), normal(5), normal(5)),
    (lambda x, y: torch.div(x, y, rounding_mode="trunc"), normal(5), normal(5)),
    (lambda x, y: torch.div(x, y, rounding_mode="trunc"), integers(5, low=-9), integers(5, low=1)),
    (lambda x: x.detach() // 0.3, normal(4)),
    (lambda x: torch.floor_divide(x, 2), integers(4, low=-9)),
    (lambda x: torch.remainder(x, 0.7), normal(4)),
    (lambda x: torch.fmod(x, 0.7), normal(4)),
    (lambda x: x % 3, integers(5, low=-9)),
    (lambda x, y: x**y, positive(4), normal(4)),
    (lambda x: x**3, normal(4)),
    (lambda x: x**-0.5, positive(4)),
    (lambda x: 2.0**x, normal(4)),
    (lambda x: x**2, integers(4)),
    (lambda x, y: torch.heaviside(x.detach(), y.detach()), normal(4).round(), normal(4)),
    (torch.xlogy, normal(3), positive(3)),
    (lambda x: torch.lerp(x, x.flip(0), 0.3), normal(4)),
    (torch.lerp, normal(4), normal(4), unit(4)),
    (lambda x, a, b: torch.addcmul(x, a, b, value=0.5), normal(3), normal(3), normal(3)),
    (lambda x, a, b: torch.addcdiv(x, a, b, value=0.5), normal(3), normal(3), positive(3)),
    *((getattr(torch, n), integers(6), integers(6)) for n in COMPARED),
    *((getattr(torch, n), normal(2, 3), normal(3)) for n in COMPARED[2:]),
    (lambda x: x > 0, normal(4)),
    *((getattr(torch, n), integers(6, low=1), integers(6, low=1)) for n in BITS),
    *((getattr(torch, n), mask(6), mask(6)) for n in ("logical_and", "logical_or", "logical_xor")),
    (torch.logical_not, mask(4)),
    (torch.bitwise_not, integers(4)),
    (lambda x: ~x, mask(4)),
    (lambda x, y: x & y, mask(4), mask(4)),
    (lambda x: (x << 2) + torch.bitwise_left_shift(x, 1), integers(4)),
    (lambda x: (x >> 1) + torch.bitwise_right_shift(x, 2), integers(4)),
    (lambda x: torch.stack([x.isnan(), x.isinf(), x.isposinf(), x.isneginf()]), normal(3) / 0),
    (torch.signbit, normal(4)),
    (torch.where, mask(2, 3), normal(3), normal(2, 1)),
    (lambda m, x: torch.where(m, x, 0.0), mask(3), normal(3)),
    (lambda x, m: x.masked_fill(m, -1.0), normal(2, 3), mask(3)),
    (lambda x, y: torch.complex(x, y).abs(), normal(3), normal(3)),
    (lambda x, y: torch.view_as_real(torch.complex(x, y).exp()), normal(3), normal(3)),
    (lambda x, y: torch.polar(x, y).real, positive(3), normal(3)),
    (lambda x, y: torch.view_as_complex(torch.stack([x, y], -1)).imag, normal(3), normal(3)),
    (lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).real, normal(3), normal(3)),
    (lambda x, y: torch.conj_physical(torch.complex(x, y)).imag, normal(3), normal(3)),
    (lambda x, y: torch.complex(x, y).angle(), normal(3), normal(3)),
]

products = [
    (torch.mm, normal(2, 3), normal(3, 4)),
    (torch.bmm, normal(2, 3, 4), normal(2, 4, 5)),
    (torch.mv, normal(2, 3), normal(3)),
    (torch.dot, normal(3), normal(3)),
    (torch.vdot, normal(3), normal(3)),
    (torch.outer, normal(3), normal(4)),
    *(
        (torch.matmul, normal(*a), normal(*b))
        for a, b in [((3,), (3,)), ((2, 3), (3,)), ((4, 2, 3), (3, 5))]
    ),
    (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        normal(4),
        normal(2, 3),
        normal(3, 4),
    ),
    (torch.addmv, normal(2), normal(2, 3), normal(3)),
    (torch.addbmm, normal(3, 5), normal(2, 3, 4), normal(2, 4, 5)),
    (torch.baddbmm, normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5)),
    (torch.addr, normal(3, 4), normal(3), normal(4)),
    (F.linear, normal(2, 3), normal(4, 3), normal(4)),
    (F.linear, normal(5, 2, 3), normal(4, 3)),
    (lambda x, y: torch.einsum("bij,bkj->bik", x, y), normal(2, 3, 4), normal(2, 5, 4)),
    (torch.kron, normal(2, 2), normal(2, 3)),
    (torch.tensordot, normal(2, 3), normal(2, 3)),
    (F.conv1d, normal(2, 3, 8), normal(4, 3, 3), normal(4)),
    (F.conv1d, normal(3, 8), normal(4, 3, 3)),
    (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2),
        normal(2, 3, 9, 8),
        normal(4, 3, 3, 3),
    ),
    (lambda x, w: F.conv2d(x, w, groups=2), normal(2, 4, 5, 5), normal(6, 2, 3, 3)),
    (lambda x, w: F.conv2d(x, w, padding="same"), normal(1, 2, 5, 5), normal(3, 2, 3, 3)),
    (F.conv3d, normal(1, 2, 4, 4, 4), normal(3, 2, 2, 2, 2)),
    (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        normal(2, 3, 4, 4),
        normal(3, 4, 3, 3),
        normal(4),
    ),
    (lambda x, w: F.conv_transpose1d(x, w, groups=2, dilation=2), normal(2, 4, 5), normal(4, 3, 3)),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k), normal(2, 3, 4), normal(2, 5, 4)),
]

reductions = [
    *((getattr(torch, n), distinct(2, 3)) for n in REDUCED),
    *((method(n, 1), distinct(2, 3, 4)) for n in REDUCED),
    *((method(n, -1, keepdim=True), distinct(2, 3)) for n in REDUCED),
    *((method(n, (0, -1)), distinct(2, 3, 4)) for n in ("sum", "mean", "amax", "amin")),
    *((method(n), integers(2, 3)) for n in ("sum", "prod", "max", "min")),
    *((method(n), mask(2, 3)) for n in ("sum", "all", "any")),
    (method("sum", dtype=float64), integers(3)),
    *((method(n, -1), mask(2, 3)) for n in ("all", "any")),
    *((getattr(torch, n), distinct(2, 3)) for n in ("max", "min", "aminmax", "argmax", "argmin")),
    *((method(n, 1), distinct(2, 3)) for n in ("max", "min", "argmax", "argmin")),
    *((method(n, -2, keepdim=True), distinct(2, 3)) for n in ("max", "min", "argmax")),
    (method("aminmax", dim=1, keepdim=True), distinct(2, 3)),
    (torch.max, normal(3), normal(3)),
    (torch.min, normal(3), normal(3)),
    (torch.count_nonzero, integers(3, 4, high=2)),
    *((getattr(torch, n), normal(3, 4)) for n in ("var", "std", "var_mean", "std_mean")),
    *((method(n, 1, unbiased=False), normal(3, 4)) for n in ("var", "std")),
    (lambda x: torch.var(x, (0, 2), correction=0, keepdim=True), normal(2, 3, 4)),
    (lambda x: torch.var_mean(x, -1, keepdim=True), normal(2, 3)),
    (torch.linalg.vector_norm, normal(2, 3)),
    *((lambda x, p=p: x.norm(p, dim=-1), normal(2, 3)) for p in (1, 2, 3, math.inf)),
    (lambda x: torch.linalg.vector_norm(x, 0), normal(4)),
    (lambda x: F.normalize(x, dim=1), normal(2, 3)),
    (lambda x: torch.logsumexp(x, -1), normal(2, 3)),
    (lambda x: torch.logsumexp(x, (0, 1), keepdim=True), normal(2, 3)),
    *(
        (method(n, -1), distinct(2, 4))
        for n in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
    ),
    (method("cumsum", 0), integers(4)),
    *(
        (method("sort", dim, descending), distinct(3, 4))
        for dim, descending in [(0, True), (-1, False)]
    ),
    (lambda x: torch.sort(x, stable=True), integers(6)),
    (method("argsort", -1, descending=True), distinct(2, 4)),
    (method("topk", 2), distinct(2, 4)),
    (method("topk", 2, dim=0, largest=False), distinct(4, 2)),
    (lambda x: F.softmax(x, -1), normal(2, 3)),
    (lambda x: F.log_softmax(x, 0), normal(2, 3)),
    (lambda x: F.softmax(x, 0, dtype=float64), normal(3, dtype=torch.float32)),
    (torch.trace, normal(3, 3)),
]

shapes = [
    (method("view", 6), normal(2, 3)),
    (method("reshape", -1, 2), normal(3, 4)),
    (method("flatten", 1), normal(2, 3, 2)),
    (method("permute", 2, 0, 1), normal(2, 3, 4)),
    (method("transpose", -1, 0), normal(2, 3, 4)),
    (lambda x: x.permute(1, 0).reshape(-1), normal(2, 3)),
    (lambda x: x.permute(1, 0).contiguous().view(-1), normal(2, 3)),
    (lambda x: x.T, normal(2, 3)),
    (lambda x: x.t(), normal(2, 3)),
    (lambda x: x.mT, normal(2, 3)),
    (method("unsqueeze", -1), normal(2, 3)),
    (method("squeeze"), normal(2, 1, 1)),
    (method("squeeze", -1), normal(2, 1, 1)),
    (method("squeeze", (0, 2)), normal(1, 2, 1)),
    (method("expand", 4, -1, 3), normal(2, 1)),
    (lambda x, y: x.expand_as(y), normal(3), normal(2, 3)),
    (lambda x: x[:, -2:], normal(2, 4)),
    (lambda x: x[::2, 1], normal(4, 3)),
    (lambda x: x[..., None, -1], normal(2, 3)),
    (method("narrow", 1, 1, 2), normal(2, 4)),
    (method("select", -1, -2), normal(2, 3)),
    (method("split", 2, -1), normal(2, 5)),
    (method("split", [1, 3]), normal(4, 2)),
    (method("unsafe_split", 2), normal(4, 2)),
    (lambda x: torch.unsafe_split_with_sizes(x, [1, 3]), normal(4, 2)),
    (method("chunk", 3, -1), normal(2, 7)),
    (method("unbind", 1), normal(2, 3)),
    (lambda x, y: torch.cat([x, y], -1), normal(2, 3), normal(2, 1)),
    (lambda x, y: torch.cat([x, y]), torch.zeros(0, dtype=float64), normal(2, 3)),
    (lambda x, y: torch.stack([x, y], -1), normal(2, 3), normal(2, 3)),
    (lambda x, y: torch.hstack([x, y]), normal(2, 3), normal(2, 3)),
    (method("repeat", 2, 1, 3), normal(2, 3)),
    (lambda x: torch.tile(x, (2,)), normal(2, 3)),
    (lambda x: x.repeat_interleave(2, dim=1), normal(2, 3)),
    (method("flip", 0, -1), normal(2, 3)),
    (method("roll", 1, -1), normal(2, 3)),
    (method("roll", 2), normal(2, 3)),
    (method("roll", (1, 2), (0, 1)), normal(2, 3)),
    (method("rot90"), normal(2, 3)),
    (method("movedim", 0, -1), normal(2, 3, 4)),
    (method("detach"), normal(3)),
    (method("clone"), normal(3)),
    (method("to", torch.float32), normal(3)),
    (method("long"), normal(3) * 5),
    (method("bool"), integers(3)),
    (method("alias"), normal(3))
    if hasattr(torch.Tensor, "alias")
    else (torch.ops.aten.alias, normal(3)),
    (method("diagonal"), normal(3, 4)),
    (method("diagonal", 1, -2, -1), normal(2, 3, 4)),
    (lambda x: torch.diag_embed(x, 1), normal(2, 3)),
    (lambda x: torch.diag_embed(x, -1, 0, 2), normal(2, 3)),
    (torch.diag, normal(3)),
    (method("tril", -1), normal(3, 3)),
    (method("triu", 1), normal(2, 3, 4)),
    (method("unfold", -1, 3, 2), normal(2, 8)),
    (lambda x: F.pad(x, (1, -1, 2, 0), value=3.0), normal(2, 4)),
    *((lambda x, m=m: F.pad(x, (1, 2), mode=m), normal(2, 3, 4)) for m in ("reflect", "replicate")),
    *(
        (lambda x, m=m: F.pad(x, (1, 2, 0, 1), mode=m), normal(1, 2, 3, 4))
        for m in ("reflect", "replicate")
    ),
    *(
        (lambda x, m=m: F.pad(x, (1, 1, 0, 1, 1, 0), mode=m), normal(1, 2, 3, 3, 3))
        for m in ("reflect", "replicate")
    ),
    (lambda x, i: x[i], normal(5, 2), integers(3)),
    (lambda x, i: x[:, i, 1], normal(2, 5, 3), integers(3)),
    (lambda x, i, j: x[i, j], normal(5, 5), integers(3), integers(3)),
    (lambda x, i: torch.ops.aten._unsafe_index(x, [None, i]), normal(2, 5), integers(3)),
    (
        lambda x, i, y: torch.ops.aten._unsafe_index_put(x, [i], y),
        normal(5),
        integers(1),
        normal(1),
    ),
    (lambda x, i: x.index_put((i,), torch.ones(1, dtype=x.dtype)), normal(5), integers(2)),
    (lambda x, i, y: x.index_put((i,), y, accumulate=True), normal(5), integers(3), normal(3)),
    (lambda x, m: x.clone().index_put_((m,), torch.tensor(2.0, dtype=x.dtype)), normal(5), mask(5)),
    (method("index_select", -1, torch.tensor([2, 0])), normal(2, 3)),
    (lambda x, y: x.index_add(0, torch.tensor([1, 1]), y, alpha=2), normal(3, 2), normal(2, 2)),
    (lambda x, y: x.index_copy(0, torch.tensor([2, 0]), y), normal(3, 2), normal(2, 2)),
    (lambda x: x.index_fill(1, torch.tensor([2, 0]), 7.0), normal(2, 3)),
    (lambda x, i: x.gather(-1, i), normal(2, 5), integers(2, 3)),
    (lambda x, i: torch.take_along_dim(x, i, 1), normal(2, 5), integers(2, 3)),
    (lambda x, y: x.scatter(1, torch.tensor([[0, 2], [1, 3]]), y), normal(2, 5), normal(2, 2)),
    (lambda x: x.scatter(1, torch.tensor([[0], [1]]), 3.0), normal(2, 5)),
    (lambda x, i, y: x.scatter_add(1, i, y), normal(2, 5), integers(2, 3), normal(2, 3)),
    (lambda x, y: x.select_scatter(y, -1, 1), normal(2, 3), normal(2)),
    (lambda x, y: x.slice_scatter(y, 1, 0, 4, 2), normal(2, 5), normal(2, 2)),
    (lambda x, y: torch.diagonal_scatter(x, y, 1), normal(3, 4), normal(3)),
    (lambda x, i: torch.take(x, i), normal(2, 3), integers(4)),
    (F.embedding, integers(2, 3), normal(5, 4)),
    (lambda i, w: F.embedding(i, w, padding_idx=2), torch.tensor([[2, 0], [1, 2]]), normal(5, 4)),
    *(
        (lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode), integers(2, 3), normal(5, 4))
        for mode in ("sum", "mean")
    ),
    (
        lambda i, w, s: F.embedding_bag(
            i, w, torch.tensor([0, 0, 2]), mode="sum", per_sample_weights=s, padding_idx=1
        ),
        torch.tensor([1, 4, 1, 2]),
        normal(5, 4),
        normal(4),
    ),
    (F.bilinear, normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5)),
    (torch.linalg.matrix_exp, normal(3, 3)),
    (
        lambda x, y: (
            torch.div(x, y, out=torch.empty(2, 3, dtype=float64)) if not x.requires_grad else x / y
        ),
        normal(2, 3),
        positive(2, 3),
    ),
    (lambda i: F.one_hot(i, 5), integers(2, 3)),
    *((getattr(torch, n), normal(2, 3)) for n in ("zeros_like", "ones_like")),
    (lambda x: torch.full_like(x, 2), normal(2, 3)),
    (lambda x: torch.empty_like(x).fill_(1.0) * x, normal(2, 3)),
    (lambda x: x.new_zeros(2) + x, normal(2)),
    (lambda x: x.new_ones(2, dtype=torch.int64) + x, normal(2)),
    (lambda x: x.new_full((2,), 3.0) + x, normal(2)),
    (lambda x: x.new_empty(2).zero_() + x, normal(2)),
]

in_place = [
    (lambda x: x.clone().add_(1).mul_(2).sigmoid_(), normal(3)),
    (lambda x: (y := x.clone(), y[0].mul_(3), y)[-1], normal(2, 3)),
    (lambda x, y: (z := x.clone(), z[:, 1:].copy_(y), z)[-1], normal(2, 3), normal(2, 2)),
    (lambda x: (y := x.clone(), z := y[1], y.mul_(2), z)[-1], normal(2, 3)),
    (lambda x: (y := x.clone(), y.t()[0].fill_(4.0), y.view(-1)[3:].add_(1), y)[-1], normal(2, 3)),
    (lambda x: (y := torch.zeros(2, 3), y[:, 0].copy_(x), y)[-1], normal(2)),
    (lambda x: (y := torch.zeros(3, dtype=torch.int64), y[1:].add_(x), y)[-1], integers(2)),
    (
        lambda x: (y := x.clone(), y[y > 0].sum() if False else y.masked_fill_(y > 0, 0.0), y)[-1],
        normal(4),
    ),
    (lambda x: (y := x.clone(), y.__setitem__(y > 0, 9.0), y)[-1], normal(4)),
    (lambda x: (y := x.clone(), y.diagonal().zero_(), y)[-1], normal(3, 3)),
    (lambda x: x.clone().detach_() * x, normal(3)),
    (lambda x: x.clone().clamp_(-0.1, 0.1).pow_(2).neg_(), normal(3)),
    (lambda x: (a := x.split(2), a[0] * a[1])[-1], normal(4)),
]

layers = [
    (lambda x, w, b: F.layer_norm(x, (3,), w, b), normal(2, 3), normal(3), normal(3)),
    (lambda x: F.layer_norm(x, (3, 4)), normal(2, 3, 4)),
    (lambda x, w, b: F.group_norm(x, 2, w, b), normal(2, 4, 3), normal(4), normal(4)),
    (lambda x, w: F.rms_norm(x, (3,), w), normal(2, 3), normal(3)),
    (lambda x: F.rms_norm(x, (3,)), normal(2, 3)),
    (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), normal(4, 3), normal(3), normal(3)),
    (lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), normal(4, 3, 2), normal(3), positive(3)),
    (lambda x: F.instance_norm(x), normal(2, 3, 5)),
    (lambda x: F.avg_pool1d(x, 2), normal(2, 3, 6)),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), normal(2, 3, 6, 5)),
    (lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False), normal(1, 2, 4, 4)),
    (lambda x: F.avg_pool3d(x, 2), normal(1, 2, 4, 4, 4)),
    (lambda x: F.max_pool1d(x, 2), distinct(2, 3, 6)),
    (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), distinct(2, 2, 6, 5)),
    (lambda x: F.max_pool2d(x, 2, dilation=2), distinct(1, 2, 5, 5)),
    (lambda x: F.max_pool3d(x, 2), distinct(1, 1, 4, 4, 4)),
    (lambda x: F.adaptive_avg_pool1d(x, 3), normal(2, 3, 7)),
    (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), normal(2, 3, 5, 7)),
    (lambda x: F.adaptive_avg_pool3d(x, 2), normal(1, 2, 3, 4, 5)),
    *((lambda x: F.interpolate(x, scale_factor=2), normal(1, 2, *[3] * n)) for n in (1, 2, 3)),
    (lambda x: F.interpolate(x, size=5), normal(1, 2, 3)),
    (lambda x: F.pixel_shuffle(x, 2), normal(1, 4, 2, 2)),
    *((getattr(F, n), normal(2, 3), normal(2, 3)) for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    *((lambda x, y, r=r: F.mse_loss(x, y, reduction=r), normal(2, 3), normal(2, 3)) for r in ("sum", "none")),
    (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), normal(5), normal(5)),
    (lambda x, y: F.huber_loss(x, y, delta=0.5), normal(5), normal(5)),
    (lambda x, y: F.soft_margin_loss(x, y.detach()), normal(4), normal(4).sign()),
    (F.binary_cross_entropy, unit(2, 3), unit(2, 3)),
    (F.binary_cross_entropy_with_logits, normal(2, 3), unit(2, 3)),
    (lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach()), normal(2, 3), unit(2, 3), positive(3)),
    (F.cross_entropy, normal(4, 5), integers(4)),
    (F.cross_entropy, normal(4, 5), F.softmax(normal(4, 5), -1)),
    (lambda x, y: F.cross_entropy(x, y, ignore_index=1, reduction="sum"), normal(4, 5), integers(4)),
    (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), normal(4, 5), integers(4)),
    (lambda x, y, w: F.nll_loss(x, y, w.detach(), reduction="none"), normal(4, 5), integers(4), positive(5)),
    (F.nll_loss, normal(2, 5, 3), integers(2, 3)),
    (F.nll_loss, normal(2, 5, 3, 2), integers(2, 3, 2)),
    (lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean"), normal(2, 3), normal(2, 3)),
    (F.cosine_similarity, normal(2, 3), normal(2, 3)),
    (lambda x, w, b: F.multi_head_attention_forward(
        x, x, x, 4, 2, w, b, None, None, False, 0.0, w[:4], b[:4], need_weights=False
    )[0], normal(3, 2, 4), normal(12, 4), normal(12)),
]  # fmt: skip

SAMPLES = {
    "element_wise": element_wise,
    "products": products,
    "reductions": reductions,
    "shapes": shapes,
    "in_place": in_place,
    "layers": layers,
}
