"""The operator record: `y = f(x, *weights, **static)` and the mathematics derived from it.

Everything a learning rule asks of an operator is a method of `Operator`, an ETP primitive bound
to one equation's shapes and static parameters. Each has a default derived from the plain function;
an `ETPPrimitive` may carry faster hand-written `rules` for the same mathematics.

The trace of a weight has one entry per (free output position, weight element): axes of the output
that are tied to a weight axis (see `_ties`) are shared, the remaining ones are free. `spread` takes
values at output elements to these coordinates, `features` is dy/dw in them. For `y = x @ w` with
x of shape (batch, in) the axis `out` is tied and `batch` is free: the trace is (batch, in, out),
`spread` of (batch, out) is (batch, 1, out), and `features` are x as (batch, in, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._published import part
from ..program import DerivedPrimitive, Params, Var, is_inexact, prune, shape_of, trace
from ._ties import tied_axes
from ._twin import on_mesh
from ._zeros import zeros_in

Weights = dict[str, Array]
Shape = jax.ShapeDtypeStruct
Shapes = dict[str, Shape]

Past = tuple[Array, Array, Callable[[Array, Array], Array]]


@dataclass(frozen=True, slots=True)
class Rules:
    """Optional hand-written forms of what `Operator` derives; each must equal the derived one.

    Attributes:
        effective: `(weights, **static) -> effective weights`, the operand the operator is linear
            in, when that is a function of the weights alone.
        linear: `(x, effective, **static) -> y`; required with `effective`.
        features: `(x, shapes, **static) -> {key: array}` broadcastable to (*free, *weight.shape),
            or None to decline.
        spread: `(key, values, lead, **static) -> values` in trace coordinates, or None where
            axes ties describe it; with it, `free` gives the free shape.
        free: `(key, y_shape, **static) -> shape` of the free positions.
        represent: `(x, shapes, **static) -> x` as a floating array in which y is linear, or None
            if there is none.
        pull: `(x, c, shapes, **static) -> {key: array}`, the weight pull-back of many inputs and
            cotangents, summed over the leading axis of both; or None to decline.
        sum_steps: `(key, x, values, past, **static) -> array`, the sum over the leading axis of
            `features` times `spread` of values (steps, *lanes, *y, slots), and the product of
            `past` if that is not None (see `Operator.sum_steps`); or None to decline.
        part: `(weights, axis, start, stop, **static) -> rows`, the weights that a part of the
            input meets (from `start` to `stop` along `axis`), or None to decline; with it, the
            operator of that part and these rows is y of that part alone, without a bias.
        joint: `(**static) -> axes`, the axis of every weight and of "y" along which weights that
            meet the same input may be joined, and their results are; or None to decline.
    """

    effective: Callable[..., Weights] | None = None
    linear: Callable[..., Array] | None = None
    features: Callable[..., Weights | None] | None = None
    spread: Callable[..., Array | None] | None = None
    free: Callable[..., tuple[int, ...] | None] | None = None
    represent: Callable[..., Array | None] | None = None
    pull: Callable[..., Weights | None] | None = None
    sum_steps: Callable[..., Array | None] | None = None
    part: Callable[..., Array | None] | None = None
    joint: Callable[..., dict[str, int] | None] | None = None


class ETPPrimitive(DerivedPrimitive):
    """A JAX primitive whose weights take part in online learning; see `register_primitive`."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Array],
        *,
        weights: tuple[str, ...] = ("weight",),
        trainable_invars_fn: Callable[[Params], dict[str, int]] | None = None,
        x_invar_index: int | None = 0,
        factor_invars: tuple[int, ...] = (),
        rules: Rules | None = None,
    ):
        super().__init__(name, function)
        self.weights = weights  # names of the operands after the input
        self.trainable_invars = trainable_invars_fn  # or by static parameters, with places
        self.x_invar_index = x_invar_index
        self.factor_invars = factor_invars  # further inputs, that no state enters
        self.rules = rules or Rules()

    def positions(self, params: Mapping[str, Any], n_operands: int) -> dict[str, int]:
        """Where the weights are among so many operands."""
        inputs = {self.x_invar_index, *self.factor_invars}
        own = [i for i in range(n_operands) if i not in inputs]
        named = dict(zip(self.weights, own, strict=False))
        if self.trainable_invars is not None:
            named = dict(self.trainable_invars(dict(params)))
        # Operands that are neither input nor declared weight are weights without a name.
        return named | {f"operand{i}": i for i in own if i not in named.values()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            return part("_hand_written", "taker")(self, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")


def register_primitive(
    name: str,
    impl_fn: Callable[..., Array],
    *,
    batched: bool = False,
    gradient_enabled: bool = False,
    trainable_invars_fn: Callable[[Params], dict[str, int]] | None = None,
    x_invar_index: int | None = 0,
    y_outvar_index: int = 0,
    rules: Rules | None = None,
) -> ETPPrimitive:
    """Make an operator out of a plain JAX function; every rule it needs is derived.

    Args:
        name: name of the primitive, as reports show it.
        impl_fn: `impl_fn(*arrays, **static) -> array`.
        batched: accepted for compatibility; which axes a weight shares follows from the function.
        gradient_enabled: the same; an operator without a trained weight is always seen through.
        trainable_invars_fn: static parameters -> {key: position of the weight}; default
            `{'weight': 1}`.
        x_invar_index: position of the input, None for an operator of weights only.
        y_outvar_index: must be 0, operators have one output.
        rules: hand-written forms of derived rules, for speed.

    Returns:
        The primitive; call `primitive.bind(x, weight, **static)` in a model.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> scale = braintrace.register_primitive('scale_rows', lambda x, w: x * w[:, None])
        >>> scale.bind(jnp.ones((2, 3)), jnp.arange(2.)).shape
        (2, 3)
    """
    if not callable(impl_fn):
        raise TypeError(f"impl_fn must be a function of arrays, got {type(impl_fn).__name__}.")
    if y_outvar_index != 0:
        raise ValueError("An operator has one output: y_outvar_index must be 0.")
    return ETPPrimitive(
        name,
        impl_fn,
        trainable_invars_fn=trainable_invars_fn,
        x_invar_index=x_invar_index,
        rules=rules,
    )


@dataclass(frozen=True, eq=False)
class Operator:
    """An ETP primitive bound to the shapes and static parameters of one use of it.

    `operands` are the shapes of all operands, `y` that of the result.
    """

    primitive: ETPPrimitive
    params: Mapping[str, Any]
    operands: tuple[Shape, ...]
    y: Shape
    positions: dict[str, int] = field(init=False)

    def __post_init__(self):
        positions = self.primitive.positions(self.params, len(self.operands))
        object.__setattr__(self, "positions", positions)

    @staticmethod
    def of(
        primitive: ETPPrimitive, params: Mapping[str, Any], inputs: tuple, output: Var
    ) -> Operator:
        """Bind from the atoms of an equation."""
        return Operator(primitive, params, tuple(map(shape_of, inputs)), shape_of(output))

    @property
    def key(self) -> Hashable:
        """What all derived rules follow from: equal for the operators of equal layers."""
        return self.primitive, tuple(self.params.items()), self.operands, self.y

    # ------------------------------------------------------------------ the function itself

    @property
    def x(self) -> Any:
        """Shape of the input, None for an operator of weights only."""
        i = self.primitive.x_invar_index
        return None if i is None else self.operands[i]

    def recorded(self, operands: Sequence[Any]) -> Any:
        """What dy/dw may read besides the weights: the input, or (input, *factors)."""
        i, factors = self.primitive.x_invar_index, self.primitive.factor_invars
        x = None if i is None else operands[i]
        return (x, *(operands[k] for k in factors)) if factors else x

    @property
    def record(self) -> Any:
        """Shapes of what is recorded."""
        return self.recorded(self.operands)

    @property
    def plain(self) -> bool:
        """Whether the operator is used as written, not under vmap: hand-written rules apply."""
        return not self.params.get("mapped")

    def _rule(self, name: str) -> Callable[..., Any]:
        """A hand-written rule, bound to the static parameters; None of everything without one."""
        rule = getattr(self.primitive.rules, name) if self.plain else None
        static = {k: v for k, v in self.params.items() if k != "mapped"}
        return partial(rule, **static) if rule else lambda *args: None

    def call(self, x: Array | None, weights: Weights) -> Array:
        """y as a function of the input and the weights."""
        return self.primitive.apply(dict(self.params))(*self._arrange(x, weights))

    def _arrange(self, x: Any, weights: Mapping[str, Any]) -> list[Any]:
        out: list[Any] = [None] * len(self.operands)
        x, *factors = x if self.primitive.factor_invars else (x,)
        if self.primitive.x_invar_index is not None:
            out[self.primitive.x_invar_index] = x
        for i, factor in zip(self.primitive.factor_invars, factors, strict=True):
            out[i] = factor
        for key, i in self.positions.items():
            out[i] = weights[key]
        return out

    def effective(self, weights: Weights) -> Weights:
        """The operand the trace belongs to, as a function of the weights alone."""
        effective = self._rule("effective")(weights)
        return dict(weights) if effective is None else effective

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the effective weights."""
        raw = {k: self.operands[i] for k, i in self.positions.items()}
        return dict(jax.eval_shape(self.effective, raw))

    def apply(self, x: Array | None, effective: Weights) -> Array:
        """y as a function of the input and the effective weights."""
        y = self._rule("linear")(x, effective)
        return self.call(x, effective) if y is None else y

    def _bound(self, x: Array | None, effective: Weights) -> Array:
        """The same, as one equation of the primitive if it is linear in its own weights."""
        y = self._rule("linear")(x, effective)
        return self.primitive.bind(*self._arrange(x, effective), **self.params) if y is None else y

    def represent(self, x: Array | None) -> Array | None:
        """The input as an array that can be filtered in time."""
        array = self._rule("represent")(x, self.shapes)
        return x if array is None else array

    @property
    def is_representable(self) -> bool:
        """Whether `represent` gives numbers, which can be filtered, and no index."""
        if self.primitive.rules.represent is not None:
            array = partial(self._rule("represent"), shapes=self.shapes)
            return self.plain and jax.eval_shape(array, self.record) is not None
        x = self._represented
        if not hasattr(x, "dtype") or is_inexact(x.dtype):
            return True
        try:
            jax.eval_shape(self.apply, self._floating(x), self.shapes)
        except TypeError:  # of JAX, from what takes integers or booleans only
            return False
        return True

    def _floating(self, x: Shape) -> Shape:
        """The shape of these numbers where they are filtered: spikes may be integers."""
        return x if is_inexact(x.dtype) else Shape(x.shape, self.y.dtype)

    @property
    def _represented(self) -> Any:
        return None if self.record is None else jax.eval_shape(self.represent, self.record)

    def part(self, weights: Weights, axis: int, start: int, stop: int) -> Array | None:
        """The weights that a part of the input meets; None where they are not one slice."""
        return self._rule("part")(weights, axis, start, stop)

    def of_part(self, x: Array, rows: Array) -> Array:
        """y of a part of the input alone, without a bias."""
        return self.primitive.apply(dict(self.params))(x, rows)

    @property
    def joint(self) -> dict[str, int] | None:
        """The axes along which weights that meet the same input may be joined, and their y are."""
        return self._rule("joint")()

    def without_input(self, weights: Weights) -> Array:
        """y of no part of the input: the bias of an operator that has parts."""
        if "bias" not in weights:
            return jnp.zeros((), self.y.dtype)
        return weights["bias"].astype(self.y.dtype)

    def pull(self, x: Array | None, c: Array, effective: Weights) -> Weights:
        """Pull a cotangent of y back to the effective weights (those that carry a derivative)."""
        inexact = {k: w for k, w in effective.items() if is_inexact(w.dtype)}
        out, vjp = jax.vjp(lambda w: self.apply(x, {**effective, **w}), inexact)
        return vjp(c.astype(out.dtype))[0]

    def pull_all(
        self, x: Array | None, c: Array, effective: Weights, keys: Sequence[str]
    ) -> Weights:
        """`pull` of many inputs and cotangents, summed over the leading axis of both."""
        grads = None if x is None else self._rule("pull")(x, c, self.shapes)
        if grads is None and (x is None or c.shape[0] == 1):
            grads = self.pull(jax.tree.map(lambda a: a[0], x), c.sum(0), effective)
        elif grads is None:
            # The mapped axis becomes one of the operator's own, where it has a twin for that.
            y = self.apply if self.primitive.twin is None else self._bound
            each = lambda w: jax.vmap(lambda v: y(v, {**effective, **w}))(x)
            out, vjp = jax.vjp(each, {k: effective[k] for k in keys})
            grads = vjp(c.astype(out.dtype))[0]
        return {k: grads[k] for k in keys}

    def sum_steps(self, key: str, x: Any, values: Array, past: Past | None = None) -> Array | None:
        """The sum over steps of features times spread values, if there is a rule for it.

        With `past`, (D, eps, product), product(spread(D), eps) is added.
        """
        return self._rule("sum_steps")(key, x, values, past)

    @cached_property
    def _reads(self) -> dict[str, frozenset[str | None]]:
        return self._pull_reads(self.apply, self._represented, self.shapes)

    @cached_property
    def constant_keys(self) -> frozenset[str]:
        """Effective weights whose pull-back does not read the input: rows with the input 1."""
        return frozenset(k for k, names in self._reads.items() if None not in names)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the gradient of the weights is linear in the represented input.

        That is the input as it is filtered, a floating array, also where the step gets spikes as
        integers or booleans. A bias, whose gradient does not read the input, does not count.
        `pull((1 + x) @ w)` is no such gradient though its derivative by x is constant: it is not
        zero at x = 0.
        """
        if not hasattr(self._represented, "dtype") or not self.is_representable:
            return False
        x = self._floating(self._represented)
        keys = [k for k in self._inexact(self.shapes) if k not in self.constant_keys]

        def pulled(c, weights, x, dx):
            pull = lambda x: [self.pull(x, c, weights)[k] for k in keys]
            return jax.jvp(pull, (x,), (dx,))

        program, _ = trace(pulled, self.y, dict(self.shapes), x, x)
        *_, at, _ = program.inputs
        grads, moved = program.outputs[: len(keys)], program.outputs[len(keys) :]
        return at not in prune(program, moved).read and all(map(zeros_in(program, {at}), grads))

    @property
    def is_affine(self) -> bool:
        """Whether y is affine in the effective weights: its pull-back reads none of them."""
        return all(names <= {None} for names in self._reads.values())

    @cached_property
    def pull_reads(self) -> dict[str, frozenset[str]]:
        """Per weight, the weights whose value its pull-back reads (none where y is affine)."""
        raw = {k: self.operands[i] for k, i in self.positions.items()}
        reads = self._pull_reads(self.call, self.record, raw)
        return {k: frozenset(n for n in names if n is not None) for k, names in reads.items()}

    @staticmethod
    def _inexact(shapes: Mapping[str, Shape]) -> list[str]:
        return [k for k in shapes if is_inexact(shapes[k].dtype)]

    def _pull_reads(
        self, function: Callable[..., Array], x: Any, shapes: Mapping[str, Shape]
    ) -> dict[str, frozenset[str | None]]:
        """Per weight, what its pull-back reads: names of weights, None for the input."""
        inexact = self._inexact(shapes)

        def pulled(c, x, weights):
            varying = {k: weights[k] for k in inexact}
            pull = jax.vjp(lambda w: function(x, {**weights, **w}), varying)[1]
            return [pull(c)[0][k] for k in inexact]

        program, _ = trace(pulled, self.y, x, dict(shapes))
        names = [*(None for _ in jax.tree.leaves(x)), *sorted(shapes)]  # as JAX sorts a dict
        label = dict(zip(program.inputs[1:], names, strict=True))
        out = {}
        for key, pull in zip(inexact, program.outputs, strict=True):
            read = {*prune(program, [pull]).read}
            out[key] = frozenset(name for var, name in label.items() if var in read)
        return out

    # ---------------------------------------------------------------------- trace coordinates

    @cached_property
    def ties(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per weight, the tied pairs (axis of y, axis of the weight)."""
        x, shapes = self._represented, self.shapes
        n, order = len(jax.tree.leaves(x)), sorted(shapes)  # as JAX sorts a dict
        return {k: tied_axes(self.apply, (x, shapes), n + order.index(k)) for k in shapes}

    @property
    def maps_rows(self) -> bool:
        """Whether a row of y, along its first axis, reads that row of the input only."""
        x = self._represented
        inputs = range(len(jax.tree.leaves(x)))
        with on_mesh(1):  # where axes of samples are not joined into one
            return all((0, 0) in tied_axes(self.apply, (x, self.shapes), i) for i in inputs)

    @property
    def is_batched(self) -> bool:
        """Whether rows are samples: each reads its row of the input, and weights of all rows."""
        shared = all(0 in self.free_axes(k) for k in self.shapes)
        return self.x is not None and shared and self.maps_rows

    def free_axes(self, key: str) -> list[int]:
        """The output axes that no axis of this weight is tied to."""
        tied = [a for a, _ in self.ties[key]]
        return [a for a in range(len(self.y.shape)) if a not in tied]

    def free_shape(self, key: str) -> tuple[int, ...]:
        """Sizes of the output axes that no axis of this weight is tied to."""
        shape = self._rule("free")(key, self.y.shape)
        return tuple(self.y.shape[a] for a in self.free_axes(key)) if shape is None else shape

    def trace_shape(self, key: str) -> tuple[int, ...]:
        """Shape of a weight's trace: free positions, then the weight."""
        return self.free_shape(key) + tuple(self.shapes[key].shape)

    @property
    def has_axes(self) -> bool:
        """Whether trace coordinates are axes of y and of the weight: they may have size one."""
        rules = self.primitive.rules
        return not self.plain or (rules.spread is None and rules.sum_steps is None)

    def spread(self, key: str, values: Array, lead: int = 0) -> Array:
        """Take values at output elements, (*lead, *y, *rest), to trace coordinates.

        The result broadcasts against (*lead, *free, *weight.shape, *rest).
        """
        out = self._rule("spread")(key, values, lead)
        if out is not None:
            return out
        free = self.free_axes(key)
        tied = sorted(self.ties[key], key=lambda pair: pair[1])
        n = len(self.y.shape)
        order = [*range(lead), *(lead + a for a in free), *(lead + a for a, _ in tied)]
        order += range(lead + n, values.ndim)
        values = jnp.transpose(values, order)
        start = lead + len(free)
        end = start + len(tied)
        size = dict(zip((w for _, w in tied), values.shape[start:end], strict=True))
        weight = (size.get(axis, 1) for axis in range(len(self.shapes[key].shape)))
        return values.reshape((*values.shape[:start], *weight, *values.shape[end:]))

    def features(
        self, x: Array | None, effective: Weights, keys: Sequence[str] | None = None
    ) -> Weights:
        """dy/dw in trace coordinates, broadcastable to `trace_shape`, for these or all weights."""
        out = self._rule("features")(x, self.shapes)
        if out is not None:
            return out
        x = self.represent(x)
        keys = tuple(self.shapes) if keys is None else keys
        return {k: self._derived_features(k, x, effective) for k in keys}

    def _derived_features(self, key: str, x: Array | None, effective: Weights) -> Array:
        # One pull-back per free position, of the cotangent that is 1 on all of its tied elements:
        # each weight element meets exactly one of them.
        # y = x @ w, x (2, 3), w (3, 4): columns of y are tied, its rows free. Two pull-backs, of
        # [[1, 1, 1, 1], [0, 0, 0, 0]] and of the other row, give x[0] and x[1] as (3, 4) each, and
        # together dy/dw in coordinates of the trace, (2, 3, 4).
        free, n = self.free_axes(key), len(self.y.shape)
        sizes = tuple(self.y.shape[a] for a in free)
        count = int(np.prod(sizes, dtype=np.int64))
        basis = jnp.eye(count, dtype=self.y.dtype).reshape((count, *sizes))
        shape = [self.y.shape[a] if a in free else 1 for a in range(n)]
        basis = jnp.broadcast_to(basis.reshape((count, *shape)), (count, *self.y.shape))
        pull = jax.vmap(lambda c: self.pull(x, c, effective)[key])
        out = pull(basis)
        if jnp.iscomplexobj(basis) and not jnp.iscomplexobj(out):
            out = out - 1j * pull(1j * basis)
        return out.reshape(self.trace_shape(key))
