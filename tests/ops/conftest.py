"""One registry of operator uses; every test that asks for a `case` runs on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO

from braintrace import ops

RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A use of an operator, the plain formula it must equal, and arrays for both."""

    name: str
    call: Callable[..., Any]
    plain: Callable[..., Any]
    x: Any
    weights: tuple[Any, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.weights if self.x is None else (self.x, *self.weights)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape))


def dense(n: int, m: int) -> np.ndarray:
    return RNG.normal(size=(n, m)) * (RNG.random((n, m)) < 0.6)


def conv_case(
    name: str, x: tuple, kernel: tuple, bias: tuple | None = None, **options: Any
) -> Case:
    def plain(x, k, b=None):
        window = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **options}
        if "strides" in window:
            window["window_strides"] = window.pop("strides")
        dtype = jnp.result_type(x, k)
        y = lax.conv_general_dilated(x.astype(dtype), k.astype(dtype), **window)
        if b is None:
            return y
        if b.ndim > 1:
            return y + b
        dims = lax.conv_dimension_numbers(x.shape, k.shape, options.get("dimension_numbers"))
        return jnp.moveaxis(jnp.moveaxis(y, dims.out_spec[1], -1) + b, -1, dims.out_spec[1])

    weights = (normal(*kernel),) if bias is None else (normal(*kernel), normal(*bias))
    return Case(name, lambda *args: ops.conv(*args, **options), plain, normal(*x), weights)


def sparse_case(name: str, x: tuple, n: int, m: int, bias: bool = False, pad: int = 0) -> Case:
    matrix = dense(n, m)
    rows, cols = np.nonzero(matrix)
    # `BCOO.fromdense` would compile programs whenever tests are collected.
    at = np.concatenate([np.stack([rows, cols], 1), np.full((pad, 2), (n, m))])
    data = np.concatenate([matrix[rows, cols], np.zeros(pad)])
    structure = BCOO((data, at), shape=(n, m), indices_sorted=True, unique_indices=True)

    def call(x, w, b=None):
        return ops.sparse_matmul(x, w, sparse_mat=structure, bias=b)

    def plain(x, w, b=0.0):
        return x @ jnp.zeros((n, m), w.dtype).at[rows, cols].set(w[: len(rows)]) + b

    weights = (normal(len(structure.data)),) + ((normal(m),) if bias else ())
    return Case(name, call, plain, normal(*x), weights)


def lora(x, b, a, bias=None):
    return ops.lora_matmul(x, b, a, alpha=0.5, bias=bias)


def einsum_case(name: str, equation: str, x: tuple, w: tuple) -> Case:
    call = lambda x, w: ops.einsum(equation, x, w)
    return Case(name, call, lambda x, w: jnp.einsum(equation, x, w), normal(*x), (normal(*w),))


def plain_matmul(x, w, b=0.0):
    return x @ w + b


def plain_grouped(x, w, b=0.0):
    return jnp.einsum("...gk,gkn->...gn", x, w) + b


def plain_lora(x, b, a, bias=0.0):
    return 0.5 * x @ b @ a + bias


CASES = [
    Case("mv", ops.matmul, plain_matmul, normal(3), (normal(3, 4),)),
    Case("mv_bias", ops.matmul, plain_matmul, normal(3), (normal(3, 4), normal(4))),
    Case("mm", ops.matmul, plain_matmul, normal(2, 3), (normal(3, 4),)),
    Case("mm_bias", ops.matmul, plain_matmul, normal(2, 3), (normal(3, 4), normal(4))),
    Case("mm_square", ops.matmul, plain_matmul, normal(3, 3), (normal(3, 3), normal(3))),
    Case("mm_ones", ops.matmul, plain_matmul, normal(1, 1), (normal(1, 1), normal(1))),
    Case(
        "mm_hooks",
        lambda x, w, b: ops.matmul(x, w, b, weight_fn=jnp.square, bias_fn=jnp.exp),
        lambda x, w, b: x @ w**2 + jnp.exp(b),
        normal(2, 3),
        (normal(3, 4), normal(4)),
    ),
    Case("gmv", ops.grouped_matmul, plain_grouped, normal(2, 3), (normal(2, 3, 4), normal(2, 4))),
    Case("gmm", ops.grouped_matmul, plain_grouped, normal(5, 2, 3), (normal(2, 3, 4),)),
    Case(
        "gmm_bias",
        ops.grouped_matmul,
        plain_grouped,
        normal(5, 2, 3),
        (normal(2, 3, 4), normal(2, 4)),
    ),
    Case("emb_v", ops.embedding, lambda i, w: w[i], jnp.asarray(2), (normal(4, 3),)),
    Case("emb", ops.embedding, lambda i, w: w[i], jnp.asarray([2, 0, 2]), (normal(4, 3),)),
    Case("elemwise", ops.element_wise, lambda w: w, None, (normal(2, 3),)),
    Case("elemwise_scalar", ops.element_wise, lambda w: w, None, (normal(),)),
    Case(
        "elemwise_fn",
        lambda w: ops.element_wise(w, jax.nn.softplus),
        jax.nn.softplus,
        None,
        (normal(4),),
    ),
    einsum_case("einsum_mm", "bi,io->bo", (2, 3), (3, 4)),
    einsum_case("einsum_shared", "bti,io->bto", (2, 3, 4), (4, 5)),
    einsum_case("einsum_turned", "bik,okj->bjoi", (2, 3, 4), (5, 4, 2)),
    einsum_case("einsum_diagonal", "btg,gt->bgt", (2, 3, 4), (4, 3)),
    einsum_case("einsum_summed", "bsi,oi->bo", (2, 3, 4), (5, 4)),
    sparse_case("sp_mv", (4,), 4, 5),
    sparse_case("sp_mv_bias", (4,), 4, 5, bias=True),
    sparse_case("sp_mm", (2, 4), 4, 5),
    sparse_case("sp_mm_bias", (2, 4), 4, 5, bias=True),
    sparse_case("sp_mm_padded", (2, 4), 4, 3, pad=2),
    Case("lora_mv", lora, plain_lora, normal(3), (normal(3, 2), normal(2, 4))),
    Case("lora_mm", lora, plain_lora, normal(2, 3), (normal(3, 2), normal(2, 4))),
    Case("lora_bias", lora, plain_lora, normal(2, 3), (normal(3, 2), normal(2, 4), normal(4))),
    conv_case("conv1d", (2, 3, 6), (4, 3, 3), (4,)),
    conv_case("conv1d_strided", (2, 3, 7), (4, 3, 2), strides=(2,), padding=((1, 0),)),
    conv_case("conv1d_dilated", (2, 1, 6), (1, 1, 2), (1,), rhs_dilation=(2,), padding="VALID"),
    conv_case("conv1d_upsampled", (2, 3, 4), (2, 3, 3), lhs_dilation=(2,), padding=((1, 1),)),
    conv_case("conv1d_feature_groups", (2, 4, 5), (6, 2, 3), (6,), feature_group_count=2),
    conv_case("conv1d_batch_groups", (4, 2, 3), (4, 2, 2), batch_group_count=2),
    conv_case("conv1d_bias_map", (2, 3, 4), (4, 3, 3), (4, 4)),
    conv_case("conv1d_bias_row", (2, 3, 4), (4, 3, 3), (1, 4, 1)),
    conv_case("conv1d_bias_batch", (2, 3, 4), (2, 3, 3), (2, 1, 1)),
    conv_case("conv2d", (2, 2, 4, 3), (3, 2, 2, 2), (3,), strides=(2, 1)),
    conv_case(
        "conv2d_channels_last",
        (2, 3, 4, 2),
        (2, 3, 2, 3),
        (3,),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    conv_case(
        "conv2d_mixed_axes",
        (3, 2, 4, 4),
        (2, 4, 2, 3),
        (4,),
        dimension_numbers=("HNCW", "IOHW", "WHNC"),
        feature_group_count=2,
        padding="VALID",
    ),
]


# One use of every operator, for what does not depend on the details of a use.
SAMPLES = """mv_bias mm_bias gmv gmm_bias emb_v emb elemwise einsum_turned sp_mv sp_mm_bias lora_mv
lora_bias conv1d""".split()


CHOICES = {
    "case": CASES,
    "sample": [c for c in CASES if c.name in SAMPLES],
    "pulled": [c for c in CASES if c.name.startswith(("mv", "mm", "gm", "einsum", "sp"))],
    "one_input": [c for c in CASES if c.x is not None and "batch" not in c.name],
    "axes_sample": [c for c in CASES if c.name in SAMPLES and c.x is not None and c.x.ndim],
    "floating_sample": [
        c
        for c in CASES
        if c.name in SAMPLES and c.x is not None and jnp.issubdtype(c.x.dtype, jnp.inexact)
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in CHOICES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[c.name for c in cases])
