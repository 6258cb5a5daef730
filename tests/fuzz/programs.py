"""Random step programs, written as small nested tuples that print, replay and shrink.

A program is `(states, lets, updates, output)`: the shapes of the hidden states, named expressions,
one expression per state, and what the step returns. An expression is a leaf (a string) or
`(name, *arguments)`. Values of any shape meet: `fit` brings one to the shape of another, so every
part of a program may be replaced by any other, which is what makes shrinking easy.

    'x' 'one' 'count' 'it'             input, constant, step counter, the hole of a body
    'old0' 'new0' 'let0'               a state before and after its update, a named value
    (map | move | mix | index, e)      see UNARY
    (operator, p, transform, e)        an operator on weight p, see OPERATORS and TRANSFORMS
    (binary, e, e)                     see BINARY
    (body, e, ..., e)                  control flow and calls around expressions with a hole: BODIES
"""

from __future__ import annotations

import ast
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import operators
import scipy.sparse
from jax import lax

import braintrace as bt

Spec = tuple
Expr = Any  # str | tuple
Choose = Callable[[Sequence[Any]], Any]

T, N_IN, N_OUT, MOST = 4, 3, 3, 12  # steps, inputs, outputs, elements of a value
SPARSE = scipy.sparse.csr_array(np.array([[1.0, 0, 2], [0, 3, 0], [4, 5, 0]]))


@dataclass
class Env:
    """What expressions read: inputs, states, weights by name and shape."""

    x: Any
    count: Any
    old: list[Any]
    weight: Callable[[str, tuple[int, ...]], Any]
    new: dict[int, Any] = field(default_factory=dict)
    lets: list[Any] = field(default_factory=list)
    it: Any = None

    def inside(self, it: Any) -> Env:
        return Env(self.x, self.count, self.old, self.weight, self.new, self.lets, it)


def fit(v: Any, shape: tuple[int, ...]) -> Any:
    """A value brought to another shape: broadcast, reshaped, cut or padded."""
    v = jnp.asarray(v)
    if v.shape == shape:
        return v
    try:
        return jnp.broadcast_to(v, shape)
    except ValueError:
        n = int(np.prod(shape))
        flat = v.reshape(-1)[:n]
        return jnp.pad(flat, (0, n - flat.size)).reshape(shape)


def _rows(v: Any) -> Any:
    """A value as one row or as rows of features."""
    v = jnp.atleast_1d(v)
    return v if v.ndim <= 2 else v.reshape(-1, v.shape[-1])


def _trim(v: Any) -> Any:
    return v if v.size <= MOST and v.ndim <= 3 else v.reshape(-1)[:MOST]


# ------------------------------------------------------------------------------ element by element


@jax.custom_jvp
def spike(v):
    """A smooth value with a surrogate derivative, forward."""
    return jax.nn.sigmoid(4 * v)


@spike.defjvp
def _(primals, tangents):
    return spike(*primals), tangents[0] / (1 + jnp.abs(3 * primals[0])) ** 2


@jax.custom_vjp
def pulled(v):
    """The same, backward."""
    return jax.nn.sigmoid(4 * v)


pulled.defvjp(lambda v: (pulled(v), v), lambda v, ct: (ct / (1 + jnp.abs(3 * v)) ** 2,))


@jax.custom_vjp
def pulled_norm(v):
    """A function with its own derivative that mixes."""
    return v / (1 + jnp.sqrt((v**2).sum()))


pulled_norm.defvjp(
    lambda v: (pulled_norm(v), v), lambda v, ct: (ct / (1 + jnp.sqrt((v**2).sum())),)
)

_where = lambda env, v: jnp.where(env.x[0] > 0, v, 0.3 * v)
_key = jax.random.PRNGKey(0)
_noise = lambda env, shape: jax.random.normal(jax.random.fold_in(_key, env.count), shape)
MAPS: dict[str, Callable[[Env, Any], Any]] = {
    "tanh": lambda env, v: jnp.tanh(v),
    "half": lambda env, v: 0.5 * v,
    "sin": lambda env, v: jnp.sin(v),
    "sigmoid": lambda env, v: jax.nn.sigmoid(v),
    "abs": lambda env, v: jnp.abs(v + 0.01),
    "relu": lambda env, v: jax.nn.relu(v),
    "square": lambda env, v: 0.3 * v**2,
    "clip": lambda env, v: jnp.clip(v, -0.5, 0.5),
    "spike": lambda env, v: spike(v),
    "pulled": lambda env, v: pulled(v),
    "where": _where,
    "by_input": lambda env, v: v * fit(env.x, v.shape),
    "by_count": lambda env, v: v / (1 + env.count),
    "detach": lambda env, v: lax.stop_gradient(v),
    "round": lambda env, v: jnp.round(2 * v),
    "whole": lambda env, v: v.astype(jnp.int32).astype(v.dtype),
    "erf": lambda env, v: lax.erf(v),
    "atan2": lambda env, v: jnp.arctan2(v, 1 + v**2),
    "barrier": lambda env, v: lax.optimization_barrier(v),
    "noise": lambda env, v: v * _noise(env, v.shape),
    "slope": lambda env, v: jax.grad(lambda w: jnp.sin(w).sum())(v),
    "root": lambda env, v: jnp.sqrt(jnp.abs(v)),
    "callback": lambda env, v: (jax.debug.callback(lambda w: None, v), v)[1],
}

# --------------------------------------------------------------------------------------- movement


def _split(env: Env, v: Any) -> Any:
    first, rest = jnp.split(jnp.atleast_1d(v), [1])
    return jnp.concatenate([rest, first])


_perm = lambda n: np.random.default_rng(n).permutation(n)
_flat = lambda v: jnp.reshape(v, -1)
MOVES: dict[str, Callable[[Env, Any], Any]] = {
    "roll": lambda env, v: jnp.roll(v, 1),
    "flip": lambda env, v: _flat(v)[::-1],
    "reshape": lambda env, v: _flat(v),
    "transpose": lambda env, v: v.T,
    "slice": lambda env, v: _flat(v)[: max(1, v.size - 1)],
    "stride": lambda env, v: _flat(v)[::2],
    "pad": lambda env, v: jnp.pad(_flat(v), (1, 0))[: v.size],
    "split": _split,
    "take": lambda env, v: _flat(v)[_perm(v.size)],
    "take_out": lambda env, v: _flat(v).at[jnp.array([1, 9])].get(mode="fill", fill_value=0.0),
    "set": lambda env, v: _flat(v).at[0].set(0.3),
    "add_at": lambda env, v: jnp.zeros(3).at[jnp.array([0, 2, 0])].add(fit(v, (3,))),
    "repeat": lambda env, v: jnp.repeat(_flat(v)[:2], 2),
    "tile": lambda env, v: jnp.tile(_flat(v)[:3], 2),
    "expand": lambda env, v: jnp.broadcast_to(v, (2, *v.shape)),
    "diag": lambda env, v: jnp.diag(fit(v, (3,))),
    "first": lambda env, v: _flat(v)[0],
    "by_columns": lambda env, v: jnp.ravel(v, order="F"),
    "dimensions": lambda env, v: lax.reshape(fit(v, (2, 3)), (3, 2), (1, 0)),
    "same_size": lambda env, v: lax.reshape(fit(v, (3, 3)), (3, 3), (1, 0)),
    "by_rows": lambda env, v: jnp.reshape(fit(v, (2, 3)), (3, 2), order="F"),
    "swap": lambda env, v: jnp.swapaxes(fit(v, (1, 2, 3)), 0, 2),
    "turn": lambda env, v: jnp.rot90(fit(v, (2, 3))),
    "tril": lambda env, v: jnp.tril(fit(v, (2, 3))),
    "eye_dot": lambda env, v: jnp.eye(3) @ fit(v, (3,)),
}

# ---------------------------------------------------------------------------------------- mixing


def _norm(v: Any) -> Any:
    return (v - v.mean()) / jnp.sqrt(v.var() + 0.1)


def _solve(env: Env, v: Any) -> Any:
    a = fit(v, (3,))
    return jnp.linalg.solve(3 * jnp.eye(3) + 0.3 * jnp.outer(a, a), a)


def _reset_norm(env: Env, v: Any) -> Any:
    """A norm of what a reset has set to zero."""
    v = jnp.where(env.x[0] > 0, 0.0, v)
    return v / (1 + jnp.sqrt((v**2).sum()))


MIXES: dict[str, Callable[[Env, Any], Any]] = {
    "centre": lambda env, v: v - v.mean(),
    "sum": lambda env, v: jnp.broadcast_to(0.3 * v.sum(), v.shape),
    "sum_rows": lambda env, v: jnp.atleast_1d(v).sum(-1),
    "top": lambda env, v: v * v.max(),
    "prod": lambda env, v: jnp.prod(1 + 0.1 * v) * v,
    "softmax": lambda env, v: jax.nn.softmax(jnp.atleast_1d(v)),
    "norm": lambda env, v: _norm(v),
    "logsumexp": lambda env, v: v - jax.nn.logsumexp(v),
    "cumsum": lambda env, v: 0.3 * jnp.cumsum(v),
    "cummax": lambda env, v: lax.cummax(_flat(v)),
    "prefix": lambda env, v: lax.associative_scan(lambda a, b: 0.5 * a + b, _flat(v)),
    "sort": lambda env, v: jnp.sort(_flat(v)),
    "top_k": lambda env, v: lax.top_k(_flat(v), 1)[0],
    "matrix": lambda env, v: 0.3 * fit(v, (3,)) @ np.arange(9.0).reshape(3, 3),
    "gram": lambda env, v: 0.3 * jnp.outer(v, v) @ _flat(v),
    "fft": lambda env, v: 0.3 * jnp.fft.rfft(_flat(v)).real,
    "solve": _solve,
    "pulled_norm": lambda env, v: pulled_norm(v),
    "unit": lambda env, v: v / jnp.linalg.norm(v + 0.1),
    "shrink": lambda env, v: v / (1 + jnp.linalg.norm(v)),
    "reset_norm": _reset_norm,
    # Compartments of a unit, coupled along a short axis.
    "ring_of_3": lambda env, v: 0.6 * fit(v, (2, 3)) + 0.3 * jnp.roll(fit(v, (2, 3)), 1, -1),
    "cable": lambda env, v: fit(v, (3, 2)) + 0.2 * jnp.diff(fit(v, (3, 2)), axis=-1),
    "pair": lambda env, v: fit(v, (3, 2)) + 0.1 * fit(v, (3, 2))[:, ::-1],
}


def _ring(env: Env, v: Any) -> Any:
    return lax.dynamic_update_slice(jnp.zeros(4), 0.5 * fit(v, (1,)), (env.count % 4,))


def _argmax(env: Env, v: Any) -> Any:
    flat = _flat(v)
    return flat[jnp.argmax(flat)] * 0.5 + flat


INDEXES: dict[str, Callable[[Env, Any], Any]] = {
    "at_count": lambda env, v: _flat(v)[env.count % max(1, v.size)],
    "at_data": lambda env, v: jnp.take(_flat(v), (env.x > 0).astype(int), mode="clip"),
    "along": lambda env, v: jnp.take_along_axis(fit(v, (3,)), jnp.argsort(env.x), 0),
    "window": lambda env, v: lax.dynamic_slice(_flat(v), (env.count % 2,), (max(1, v.size - 1),)),
    "ring": _ring,
    "write_at": lambda env, v: fit(v, (4,)).at[env.count % 4].set(env.x[0]),
    "argmax": _argmax,
    "choose": lambda env, v: jnp.stack([v, -v])[(env.x[1] > 0).astype(int)],
    "one_hot": lambda env, v: v * jax.nn.one_hot(env.count % 3, 3)[0],
    "roll_by": lambda env, v: jnp.roll(_flat(v), env.count),
}
SINGULAR = ("root", "shrink", "reset_norm")  # at zero: programs with one start there
UNARY = {**MAPS, **MOVES, **MIXES, **INDEXES}

BINARY: dict[str, Callable[[Env, Any, Any], Any]] = {
    "add": lambda env, a, b: a + fit(b, a.shape),
    "mul": lambda env, a, b: a * fit(b, a.shape),
    "sub": lambda env, a, b: a - fit(b, a.shape),
    "max": lambda env, a, b: jnp.maximum(a, fit(b, a.shape) + 0.01),
    "gate": lambda env, a, b: jax.nn.sigmoid(a) * fit(b, a.shape),
    "div": lambda env, a, b: a / (1 + fit(b, a.shape) ** 2),
    "select": lambda env, a, b: jnp.where(fit(env.x, a.shape) > 0, a, fit(b, a.shape)),
    "select_by": lambda env, a, b: jnp.where(a > 0, fit(b, a.shape), 0.5 * a),
    "join": lambda env, a, b: jnp.concatenate([_flat(a)[:2], _flat(b)[:2]]),
    "stack": lambda env, a, b: jnp.stack([a, fit(b, a.shape)]),
    "write": lambda env, a, b: _flat(a).at[:1].set(fit(b, (1,))),
    "dot": lambda env, a, b: a + 0.2 * jnp.vdot(a, fit(b, a.shape)),
    "outer": lambda env, a, b: jnp.outer(_flat(a)[:3], _flat(b)[:3]),
    "complex": lambda env, a, b: (lax.complex(a, fit(b, a.shape)) ** 2).real,
}

# -------------------------------------------------------------------------------------- operators


def _weight(env: Env, p: int, transform: str, shape: tuple[int, ...]) -> Any:
    return TRANSFORMS[transform](env, p, shape)


def _own(env: Env, p: int, shape: tuple[int, ...]) -> Any:
    return env.weight(f"w{p}", shape)


def _row_of(env: Env) -> Any:
    return jnp.sum(env.x > 0)


TRANSFORMS: dict[str, Callable[[Env, int, tuple[int, ...]], Any]] = {
    "own": _own,
    "mask": lambda env, p, s: _own(env, p, s) * (np.arange(np.prod(s)) % 3 > 0).reshape(s),
    "softplus": lambda env, p, s: jax.nn.softplus(_own(env, p, s)),
    "two": lambda env, p, s: _own(env, p, s) + env.weight(f"v{p}", s) ** 2,
    "T": lambda env, p, s: env.weight(f"w{p}", s[::-1]).T,
    "normed": lambda env, p, s: _own(env, p, s) / (1 + jnp.linalg.norm(_own(env, p, s))),
    "data": lambda env, p, s: _own(env, p, s) * (1 + 0.3 * env.x.sum()),
    "state": lambda env, p, s: _own(env, p, s) * (1 + 0.3 * jnp.tanh(env.old[0].sum())),
    "dropout": lambda env, p, s: jnp.where(_noise(env, s) > 0, _own(env, p, s) / 0.5, 0.0),
    "expert": lambda env, p, s: env.weight(f"e{p}", (2, *s))[env.count % 2],
    "routed": lambda env, p, s: env.weight(f"e{p}", (2, *s))[(env.x[0] > 0).astype(int)],
    "columns": lambda env, p, s: jnp.roll(_own(env, p, s), env.count, -1 if s else None),
    "fixed": lambda env, p, s: jnp.full(s, 0.3),
    "detached": lambda env, p, s: lax.stop_gradient(_own(env, p, s)),
}


def _matmul(env: Env, w: Callable, v: Any) -> Any:
    v = _rows(v)
    return operators.matmul(v, w((v.shape[-1], 3)))


def _biased(env: Env, w: Callable, v: Any) -> Any:
    v = _rows(v)
    return operators.matmul(v, w((v.shape[-1], 3)), w((3,)))


def _plain(env: Env, w: Callable, v: Any) -> Any:
    v = _rows(v)
    return v @ w((v.shape[-1], 3))


def _einsum(env: Env, w: Callable, v: Any) -> Any:
    v = fit(v, (2, 2, 2)) if v.size > 3 else fit(v, (1, 1, v.size))
    return operators.einsum("bti,tio->bto", v, w((*v.shape[1:], 2)))


def _lora(env: Env, w: Callable, v: Any) -> Any:
    v = _rows(v)
    return operators.lora_matmul(v, w((v.shape[-1], 1)), w((1, 3)), alpha=0.7)


# One name, registered for two functions, as a notebook cell that is edited and run again does.
GAINS = tuple(
    bt.register_primitive("fuzz_gain", body)
    for body in (lambda x, weight: x * jnp.exp(weight), lambda x, weight: x * jnp.sin(2 * weight))
)
gain_in_use = [0]  # which of them programs use

OPERATORS: dict[str, Callable[[Env, Callable, Any], Any]] = {
    "matmul": _matmul,
    "biased": _biased,
    "element_wise": lambda env, w, v: v * operators.element_wise(w(v.shape), jnp.tanh),
    "plain": _plain,
    "einsum": _einsum,
    "grouped": lambda env, w, v: operators.grouped_matmul(fit(v, (2, 2)), w((2, 2, 3))),
    "embedding": lambda env, w, v: operators.embedding(_row_of(env), w((4, 3))) * fit(v, (3,)),
    "counted": lambda env, w, v: operators.embedding(jnp.stack([env.count % 4, 1]), w((4, 3))),
    "conv": lambda env, w, v: operators.conv(fit(v, (1, 1, 4)), w((2, 1, 2))),
    "lora": _lora,
    "gain": lambda env, w, v: GAINS[gain_in_use[0]].bind(_flat(v)[:3], w((min(v.size, 3),))),
    "sparse": lambda env, w, v: operators.sparse_matmul(fit(v, (3,)), w((5,)), sparse_mat=SPARSE),
}

# ----------------------------------------------------------------------------------------- bodies

Body = Callable[[Any], Any]  # from the hole to a value of the same shape


def _cond(pred: Callable[[Env, Any], Any]):
    return lambda env, v, f, g: lax.cond(pred(env, v), f, g, v)


def _scan(env: Env, v: Any, f: Body) -> Any:
    return lax.scan(lambda c, _: (f(c), None), v, None, 2)[0]


def _sweep(env: Env, v: Any, f: Body) -> Any:
    def turn(c, gain):
        c = 0.5 * c + gain * f(c)
        return c, jnp.tanh(c)

    last, rows = lax.scan(turn, v, jnp.array([0.3, 0.7]), reverse=True)
    return last + rows[0]


def _rows_of(env: Env, v: Any, f: Body) -> Any:
    return lax.scan(lambda c, row: (0.5 * c + row.sum(), f(row)), 0.0, jnp.atleast_1d(v))[1]


def _while(env: Env, v: Any, f: Body) -> Any:
    turn = lambda c: (c[0] + 1, f(c[1]))
    return lax.while_loop(lambda c: c[0] < 1 + env.count % 2, turn, (0, v))[1]


def _custom(env: Env, v: Any, f: Body) -> Any:
    closed, captured = jax.closure_convert(f, v)

    @jax.custom_vjp
    def call(v, *captured):
        return closed(v, *captured)

    def forward(v, *captured):
        return jax.vjp(closed, v, *captured)

    call.defvjp(forward, lambda pull, ct: pull(ct))
    return call(v, *captured)


BODIES: dict[str, tuple[int, Callable[..., Any]]] = {
    "jit": (1, lambda env, v, f: jax.jit(f)(v)),
    "checkpoint": (1, lambda env, v, f: jax.checkpoint(f)(v)),
    "vmap": (1, lambda env, v, f: jax.vmap(f)(jnp.atleast_1d(v))),
    "map": (1, lambda env, v, f: lax.map(f, jnp.atleast_1d(v))),
    "scan": (1, _scan),
    "sweep": (1, _sweep),
    "scan_rows": (1, _rows_of),
    "fori": (1, lambda env, v, f: lax.fori_loop(0, 2, lambda i, c: f(c), v)),
    "fori_to": (1, lambda env, v, f: lax.fori_loop(0, env.count % 3, lambda i, c: f(c), v)),
    "while": (1, _while),
    "custom": (1, _custom),
    "cond_x": (2, _cond(lambda env, v: env.x[0] > 0)),
    # What is centred adds up to 0 or to 1e-17, as rounding has it: the branches part elsewhere.
    "cond_v": (2, _cond(lambda env, v: v.sum() > 0.01)),
    "switch": (2, lambda env, v, f, g: lax.switch(env.count % 3, [f, g, jnp.sin], v)),
}

# -------------------------------------------------------------------------------------- evaluation


def value(e: Expr, env: Env) -> Any:
    """The value of an expression."""
    if isinstance(e, str):
        return _leaf(e, env)
    name, args = e[0], e[1:]
    if name in UNARY:
        return _trim(UNARY[name](env, value(args[0], env)))
    if name in BINARY:
        return _trim(BINARY[name](env, value(args[0], env), value(args[1], env)))
    if name in OPERATORS:
        p, transform, inner = args
        w = lambda shape: _weight(env, p, transform, shape)
        return _trim(OPERATORS[name](env, w, value(inner, env)))
    *holes, inner = args
    if name == "custom":  # a function with its own derivative must not close over integers
        env = Env(env.x, np.int32(1), env.old, env.weight, env.new, env.lets, env.it)
    bodies = [lambda it, b=b: fit(value(b, env.inside(it)), jnp.shape(it)) for b in holes]
    return _trim(BODIES[name][1](env, value(inner, env), *bodies))


def _leaf(e: str, env: Env) -> Any:
    match e:
        case "x":
            return env.x
        case "one":
            return jnp.ones(3)
        case "count":
            return jnp.asarray(env.count, env.x.dtype) * 0.3
        case "it":
            return env.x if env.it is None else env.it
    k = int(e[3:])
    if e.startswith("let"):
        return env.lets[k] if k < len(env.lets) else env.x
    old = env.old[k % len(env.old)]
    return env.new.get(k % len(env.old), old) if e.startswith("new") else old


def step(spec: Spec, weight: Callable, old: Sequence[Any], count: Any, x: Any) -> tuple[list, Any]:
    """One step as a pure function: new states and output."""
    states, lets, updates, output = spec
    env = Env(x, count, list(old), weight)
    for e in lets:
        env.lets.append(value(e, env))
    for k, e in enumerate(updates):
        env.new[k] = fit(value(e, env), states[k])
    return [env.new[k] for k in range(len(states))], fit(value(output, env), (N_OUT,))


def parameters(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights a program asks for."""
    shapes: dict[str, tuple[int, ...]] = {}

    def weight(name: str, shape: tuple[int, ...]) -> Any:
        shapes[name := named(name, shape)] = shape
        return jnp.zeros(shape)

    old = [jax.ShapeDtypeStruct(s, jnp.float64) for s in spec[0]]
    x = jax.ShapeDtypeStruct((N_IN,), jnp.float64)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(lambda old, count, x: step(spec, weight, old, count, x), old, count, x)
    return shapes


def named(name: str, shape: tuple[int, ...]) -> str:
    return "_".join([name, *map(str, shape)])


def numbers(label: str, *shape: int, scale: float = 0.6) -> jax.Array:
    """Numbers that depend on their name alone."""
    rng = np.random.default_rng(zlib.crc32(label.encode()))
    with jax.ensure_compile_time_eval():  # never a tracer: `sequences` are kept
        return jnp.asarray(scale * rng.normal(size=shape))


def start_of(spec: Spec) -> list[jax.Array]:
    """The states that a program begins with."""
    scale = 0.0 if any(f"'{name}'" in repr(spec) for name in SINGULAR) else 0.6
    return [numbers(f"h{k}", *s, scale=scale) for k, s in enumerate(spec[0])]


class Program(brainstate.nn.Module):
    """A program as a model, in the middle of its life."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        shapes = parameters(spec)
        self.weights = {k: brainstate.ParamState(numbers(k, *s)) for k, s in shapes.items()}
        self.unused = brainstate.ParamState(numbers("unused", 2))
        self.hidden = [brainstate.HiddenState(h) for h in start_of(spec)]
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def update(self, x: Any) -> Any:
        weight = lambda name, shape: self.weights[named(name, shape)].value
        old = [s.value for s in self.hidden]
        new, out = step(self.spec, weight, old, self.count.value, x)
        for state, v in zip(self.hidden, new, strict=True):
            state.value = v
        self.count.value = self.count.value + 1
        return out


@cache
def sequences() -> tuple[jax.Array, jax.Array]:
    return numbers("xs", T, N_IN, scale=1.0), numbers("targets", T, N_OUT, scale=1.0)


def step_fn(net: Any, x: Any, target: Any) -> Any:
    """The loss of one step; `net` is a model or a learner."""
    return 0.5 * jnp.sum((net(x) - target) ** 2)


def forward_grad(spec: Spec) -> dict[tuple, Any]:
    """The gradient by forward mode, the only truth through a `while`; keys as `bptt_grad`'s."""
    model = Program(spec)
    weights = {k: s.value for k, s in model.weights.items()}
    start = [s.value for s in model.hidden]

    def loss(weights):
        weight = lambda name, shape: weights[named(name, shape)]

        def turn(carry, slices):
            new, out = step(spec, weight, *carry, slices[0])
            return (new, carry[1] + 1), 0.5 * jnp.sum((out - slices[1]) ** 2)

        return lax.scan(turn, (start, model.count.value), sequences())[1].sum()

    found = jax.jit(jax.jacfwd(loss))(weights)
    grads = {("weights", k): g for k, g in found.items()}
    return {**grads, ("unused",): jnp.zeros_like(model.unused.value)}


# --------------------------------------------------------------------------------------- generator

LEAVES = ("x", "old0", "new0", "old1", "let0", "new1", "count", "one")
STEADY = ("own", "own", "own", "mask", "softplus", "two", "T", "normed")
VARYING = ("data", "dropout", "expert", "routed", "columns", "state")
ANY_WEIGHT = (*STEADY, *VARYING, "fixed", "detached")
KINDS = ("leaf", "map", "binary", "operator", "body", "move", "mix", "index", "binary", "body")
STATES = (
    ((3,),),
    ((3,), (3,)),
    ((2, 3),),
    ((3,), (2, 3)),
    ((3,), (), (3,)),
    ((2, 3), (2, 3)),
    ((),),
)
SHALLOW = ("leaf", "map", "move", "operator", "leaf", "index", "mix")


def expression(choose: Choose, depth: int, leaves: Sequence[str] = LEAVES) -> Expr:
    """A random expression; simpler choices come first, so that hypothesis shrinks towards them."""
    kind = "leaf" if depth <= 0 else choose(KINDS if depth > 1 else SHALLOW)
    inner = lambda leaves=leaves, less=1: expression(choose, depth - less, leaves)
    match kind:
        case "leaf":
            return choose(leaves)
        case "map" | "move" | "mix" | "index":
            table = {"map": MAPS, "move": MOVES, "mix": MIXES, "index": INDEXES}[kind]
            return (choose(tuple(table)), inner())
        case "operator":
            name = choose(tuple(OPERATORS))
            return (name, choose((0, 1, 2)), choose(ANY_WEIGHT), inner())
        case "binary":
            return (choose(tuple(BINARY)), inner(), inner())
    name = choose(tuple(BODIES))
    hole = ("it", "it", *leaves)
    bodies = [expression(choose, min(depth - 1, 2), hole) for _ in range(BODIES[name][0])]
    return (name, *bodies, inner(less=2))


def program(choose: Choose) -> Spec:
    """A random program in which a weight probably reaches a state."""
    states = choose(STATES)
    lets = tuple(expression(choose, 2) for _ in range(choose((0, 1, 1, 2))))
    updates = []
    for k in range(len(states)):
        e = expression(choose, choose((1, 2, 3)))
        drive = (choose(("matmul", *OPERATORS)), 0, choose(STEADY), choose(("x", "let0", "old1")))
        own = f"old{k}"
        plain = (
            ("add", ("half", own), ("tanh", e)),
            ("tanh", ("add", e, own)),
            e,
        )
        driven = (
            ("add", ("half", own), ("add", drive, e)),
            ("tanh", ("add", own, ("mul", drive, e))),
            ("tanh", ("add", e, drive)),
        )
        updates.append(choose(driven if k == 0 else (*plain, *driven)))
    output = choose((("add", "new0", expression(choose, 2)), expression(choose, 2), "new0"))
    return states, lets, tuple(updates), output


def random_program(seed: int) -> Spec:
    return program(random.Random(seed).choice)


def parse(text: str) -> Spec:
    """A program from its printed form."""
    return ast.literal_eval(text)


# ---------------------------------------------------------------------------------------- shrinking


PLAINEST = {"x", "matmul", "own", 0}


def size(e: Any) -> tuple[int, int]:
    """How large a program is, and how many of its words are not the plainest."""
    if not isinstance(e, tuple):
        return 1, int(e not in PLAINEST)
    inner = [size(a) for a in e]
    return 1 + sum(n for n, _ in inner), sum(m for _, m in inner)


def smaller(spec: Spec) -> Iterator[Spec]:
    """Simpler programs, the boldest first."""
    states, lets, updates, output = spec
    for k in range(len(states) - 1, 0, -1):
        yield states[:k], lets, updates[:k], output
    if lets:
        yield states, lets[:-1], updates, output
    for k, have in enumerate(states):
        if len(have) > 1:
            yield (*states[:k], (3,), *states[k + 1 :]), lets, updates, output
    for e in _simpler(output):
        yield states, lets, updates, e
    for k, old in enumerate(updates):
        for e in _simpler(old):
            yield states, lets, (*updates[:k], e, *updates[k + 1 :]), output
    for k, old in enumerate(lets):
        for e in _simpler(old):
            yield states, (*lets[:k], e, *lets[k + 1 :]), updates, output


def _simpler(e: Expr) -> Iterator[Expr]:
    if isinstance(e, str):
        yield from () if e == "x" else ("x",)
        return
    yield "x"
    yield from (a for a in e[1:] if _is_expression(a))
    if e[0] in OPERATORS:
        if e[0] != "matmul":
            yield ("matmul", *e[1:])
        if e[2] != "own":
            yield (e[0], e[1], "own", e[3])
        if e[1] != 0:
            yield (e[0], 0, e[2], e[3])
    for i, a in enumerate(e[1:], 1):
        if _is_expression(a):
            for s in _simpler(a):
                yield (*e[:i], s, *e[i + 1 :])


def _is_expression(a: Any) -> bool:
    return isinstance(a, tuple) or (isinstance(a, str) and a not in TRANSFORMS)


def shrink(spec: Spec, fails: Callable[[Spec], bool], most: int = 200) -> Spec:
    """The smallest program found that still fails, after at most so many trials."""
    found = True
    while found:
        found = False
        for candidate in (c for c in smaller(spec) if size(c) < size(spec)):
            most -= 1
            if most < 0:
                return spec
            if fails(candidate):
                spec, found = candidate, True
                break
    return spec
