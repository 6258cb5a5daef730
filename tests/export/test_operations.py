"""Every operation that becomes C gives what JAX gives: all of them in one program."""

# ruff: noqa: E501

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import build, difference, run
from jax import lax

from braintrace.export import Leaf, OneUpdate, Role, write_c
from braintrace.export._formulas import FLOATING
from braintrace.export._lower import TABLE
from braintrace.program import flatten

A = np.random.default_rng(0).normal(size=(3, 4))
B = np.random.default_rng(1).uniform(0.1, 0.9, size=(3, 4))
N = np.array([2, 0, 1, 5], np.int32)
IMAGE = np.random.default_rng(2).normal(size=(2, 6, 5, 4))
KERNEL = np.random.default_rng(3).normal(size=(3, 2, 2, 6))

BINARY = ("add", "sub", "mul", "div", "max", "min", "atan2", "rem", "pow", "eq", "ne", "lt", "ge")
UNARY = [n for n in FLOATING if n not in (*BINARY, "acosh")]


def convolved(x, k, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, dimension_numbers=numbers, **options)


def chosen(a, i):
    return lax.switch(i, [lambda a: a, lambda a: -a, lambda a: a * 2], a)


CASES = {
    **{name: (lambda a, b, n, x, k, f=name: getattr(lax, f)(b)) for name in UNARY},
    **{
        name: (lambda a, b, n, x, k, f=name: 1.0 * getattr(lax, f)(b, jnp.abs(a)))
        for name in BINARY
    },
    "acosh": lambda a, b, n, x, k: lax.acosh(1 + b),
    "clamp": lambda a, b, n, x, k: lax.clamp(-0.5, a, 0.5),
    "select": lambda a, b, n, x, k: jnp.where(a > 0, a, b),
    "select of four": lambda a, b, n, x, k: lax.select_n(n[:4] % 3, *(a[i] for i in range(3))),
    "integer powers": lambda a, b, n, x, k: a**5 + b**-3 + a**0,
    "finite": lambda a, b, n, x, k: jnp.isfinite(a / (a - a[0, 0])) * 1.0,
    "transpose": lambda a, b, n, x, k: x.transpose(2, 0, 3, 1) * 2,
    "reshape": lambda a, b, n, x, k: (a * 2).reshape(2, 6) + a.T.reshape(2, 6),
    "slices": lambda a, b, n, x, k: x[:, 1:5:2, ::-1, 2:] + 1,
    "parts of a row": lambda a, b, n, x, k: (lambda t: t[:6] * 2 + t[6:])(jnp.tanh(a.reshape(-1))),
    "concatenate": lambda a, b, n, x, k: jnp.concatenate([a * 2, b, a[:1]], 0),
    "stack": lambda a, b, n, x, k: jnp.stack([a, b], 1),
    "pad": lambda a, b, n, x, k: lax.pad(a, 7.0, ((1, -1, 2), (-2, 3, 1))),
    "cut off": lambda a, b, n, x, k: lax.pad(a, 7.0, ((-1, -1, 0), (0, -1, 2))),
    "matrix": lambda a, b, n, x, k: a @ b.T,
    "matrix left": lambda a, b, n, x, k: a.T @ b,
    "long sum": lambda a, b, n, x, k: jnp.einsum("nhwc,nhwd->cd", x, x * 2),
    "batched": lambda a, b, n, x, k: jnp.einsum("nhwc,nhvc->nwhv", x, x + 1),
    "outer": lambda a, b, n, x, k: jnp.einsum("i,j->ij", a[0], b[0]),
    "sums": lambda a, b, n, x, k: x.sum((1, 3)) * 2 + x.sum((1, 3)),
    "sum of all": lambda a, b, n, x, k: (x * x).sum(),
    "maximum": lambda a, b, n, x, k: x.max(1) - x.min(1),
    "product": lambda a, b, n, x, k: a.prod(1),
    "all": lambda a, b, n, x, k: jnp.all(a > 0, 0) + 2.0 * jnp.any(b > a, 0),
    "largest integer": lambda a, b, n, x, k: n.max() + 1.0 * n.min(),
    "running sum": lambda a, b, n, x, k: jnp.cumsum(x, 1),
    "running maximum": lambda a, b, n, x, k: lax.cummax(a, 1, reverse=True),
    "rows": lambda a, b, n, x, k: a[n[:3]],
    "entries": lambda a, b, n, x, k: a.at[n[:3], n[1:]].get(mode="fill", fill_value=3.0),
    "from a place on": lambda a, b, n, x, k: lax.dynamic_slice(a, (n[0], n[3]), (2, 2)),
    "into a place": lambda a, b, n, x, k: lax.dynamic_update_slice(x, x[:1, :2] * 2, (n[2], n[3], n[1], n[1])),
    "an entry of one": lambda a, b, n, x, k: (lambda one: one[n[1]] + one.at[n[1]].add(a[0, 1])[0])(jnp.tanh(a[:1, 0]) + a[:1, 1]),
    "scattered": lambda a, b, n, x, k: a.at[n[:3]].add(b),
    "scattered columns": lambda a, b, n, x, k: a.at[:, n].set(b, mode="drop"),
    "scattered entries": lambda a, b, n, x, k: a.at[n[:2], n[1:3]].add(b[0, :2]),
    "convolution": lambda a, b, n, x, k: convolved(x, k[:, :, :1].repeat(4, 2), window_strides=(1, 1), padding="SAME"),
    "convolution in groups": lambda a, b, n, x, k: convolved(
        x, k, window_strides=(2, 1), padding=((1, 0), (2, 1)), rhs_dilation=(1, 2), feature_group_count=2
    ),
    "convolution, spread": lambda a, b, n, x, k: convolved(
        x, k[:, :, :1].repeat(4, 2), window_strides=(1, 1), padding=((0, 1), (2, 0)), lhs_dilation=(2, 1)
    ),
    "gradient of a convolution": lambda a, b, n, x, k: jax.grad(
        lambda k: (convolved(x, k, window_strides=(2, 1), padding="SAME", feature_group_count=2) ** 2).sum()
    )(k),
    "branches": lambda a, b, n, x, k: chosen(a, n[2]) + chosen(a, n[3]),
    "loop": lambda a, b, n, x, k: lax.scan(lambda c, v: (jnp.tanh(c + v), c * v), a[0], b)[1],
    "gradient of a loop": lambda a, b, n, x, k: jax.grad(
        lambda r: (lax.scan(lambda c, v: (jnp.tanh(c * v), c * r), r, b)[1] ** 2).sum()
    )(a[0]),
    "counted loop": lambda a, b, n, x, k: lax.fori_loop(0, 3, lambda i, c: c * b + i, a),
    "complex": lambda a, b, n, x, k: jnp.abs((a + 1j * b) * jnp.exp(1j * a) / (b - 2j)),
    "complex powers": lambda a, b, n, x, k: ((a + 1j * b) ** 3 / (b + 1j * a) ** 2).imag,
    "complex zeros": lambda a, b, n, x, k: jnp.where(a + 1j * b == a + 1j * a, b, a) * (a != 1j),
    "complex loop": lambda a, b, n, x, k: lax.scan(lambda c, v: (c * v, c), a[0] + 1j, b - 1j * a)[1].real,
    "complex branches": lambda a, b, n, x, k: lax.cond(n[0] > 1, lambda c: c * 2, lambda c: c + 1j, a + 1j * b).imag,
    "complex rows": lambda a, b, n, x, k: (a + 1j * b).at[n[:3]].add(b - 1j)[n[:2]].imag,
    "complex matrix": lambda a, b, n, x, k: ((a + 1j * b) @ (b - 1j * a).T).imag,
    "integers": lambda a, b, n, x, k: ((n * 7 - 3) // 2 % 5 + (n & 3) | 8) ^ 1,
    "shifts": lambda a, b, n, x, k: (n << 3) + ((n - 3) >> 1) + lax.shift_right_logical(n - 3, n + 28) + (n << (n + 30)),
    "small products": lambda a, b, n, x, k: (n.astype(np.uint16) + np.uint16(65530)) * np.uint16(65535),
    "bits": lambda a, b, n, x, k: lax.bitcast_convert_type(a, np.int64) % 1000 + lax.bitcast_convert_type(n, np.float32),
    "inverse of erf near 1": lambda a, b, n, x, k: lax.erf_inv(1 - 2.0 ** (-20 * b)) + lax.erf_inv(b[0].astype(np.float32)),
    "types": lambda a, b, n, x, k: a.astype(jnp.float32) * 3 + n.astype(jnp.float32),
    "softmax": lambda a, b, n, x, k: jax.nn.log_softmax(a) + jax.nn.gelu(a),
    "norm": lambda a, b, n, x, k: a / jnp.sqrt(jnp.mean(a**2, 1, keepdims=True) + 1e-6),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What C computes, and what JAX does."""
    args = (A, B, N, IMAGE, KERNEL)
    names = tuple(CASES)

    def update(*args):
        outs = [jnp.asarray(CASES[name](*args)) for name in names]
        return [*outs, sum(jnp.sum(o) for o in outs if o.dtype.kind == "f")]

    leaves = [Leaf(n, Role.INPUT, a) for n, a in zip("abnxk", args, strict=True)]
    outputs = tuple(f"out[{i}]" for i in range(len(names)))
    one = OneUpdate(update, tuple(leaves), outputs, "all operations")
    done = write_c(one, tmp_path_factory.mktemp("c"), "ops")
    found = run(done, build(done), {n: [a] for n, a in zip("abnxk", args, strict=True)})
    truth = jax.jit(update)(*args)
    assert done.sizes.scratch <= 1.5 * done.sizes.live
    return dict(zip(names, zip(found.outputs[0], truth, strict=False), strict=True)), found, truth


@pytest.mark.parametrize("name", CASES)
def test_operation_is_that_of_jax(name, results):
    found, truth = results[0][name]
    assert str(truth.dtype) in str(found.dtype) or truth.dtype == bool
    assert difference(found, truth) < (1e-6 if truth.dtype == np.float32 else 1e-12), (found, truth)


def test_sum_of_all_operations_is_that_of_jax(results):
    _, found, truth = results
    assert difference(found.losses[0], truth[-1]) < 1e-10


def test_table_has_no_operation_that_is_not_tried():
    seen = set()
    for case in CASES.values():
        program, _ = flatten(jax.make_jaxpr(case)(A, B, N, IMAGE, KERNEL))
        seen |= {e.name for e in program.equations}
    same = {"stop_gradient", "device_put", "optimization_barrier", "copy", "copy_p", "pvary", "pcast",
            "name", "sharding_constraint", "scatter_add", "add_any", "iota", "empty", "empty2"}  # fmt: skip
    assert set(TABLE) - seen - same - {"cumprod", "cummin", "reduce_xor"} == set()
