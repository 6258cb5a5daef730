"""The names of version 0.1: operators as objects, and parameters that know their operator.

They call today's operators and nothing else; `braintrace.NAME` finds them, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeAlias

import brainstate
import jax

from .._errors import error, type_error, value_error
from ..ops import ETPPrimitive, conv, element_wise, lora_matmul, matmul, sparse_matmul
from ..ops._structure import structure_of
from ..program import Equation, bind, evaluate, flatten

PyTree: TypeAlias = Any  # arrays, with or without units
WeightFn = Callable[[jax.Array], jax.Array]

INSTEAD = {
    "ETraceOp": "an operator function such as braintrace.matmul, or braintrace.register_primitive",
    "MatMulOp": "braintrace.matmul(x, weight, bias, weight_fn=...)",
    "ElemWiseOp": "braintrace.element_wise(weight, fn)",
    "ConvOp": "braintrace.conv(x, kernel, bias, strides=..., padding=...)",
    "SpMatMulOp": "braintrace.sparse_matmul(x, weight, sparse_mat=...)",
    "LoraOp": "braintrace.lora_matmul(x, B, A, alpha=...)",
    "ETraceParam": "brainstate.ParamState and an operator function",
    "ElemWiseParam": "brainstate.ParamState and braintrace.element_wise",
    "NonTempParam": "brainstate.ParamState and plain JAX, such as x @ weight",
    "FakeETraceParam": "an array and plain JAX",
    "FakeElemWiseParam": "an array and plain JAX",
}


def deprecated(name: str) -> Any:
    """A class of version 0.1, with a warning at the line that asks for it."""
    text = f"braintrace.{name} is a name of version 0.1: use {INSTEAD[name]} instead."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return globals()[name]


def plain(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Apply a function with its operators as plain JAX, so that no compiler sees them."""

    def apply(eqn: Equation, values: list[jax.Array]) -> list[jax.Array]:
        if isinstance(eqn.primitive, ETPPrimitive):
            return [eqn.primitive.apply(eqn.params)(*values)]
        return bind(eqn, values)

    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = evaluate(*flatten(closed), jax.tree.leaves(args), apply)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def general_y2w(
    xw2y: Callable[[PyTree, PyTree], PyTree], x: PyTree, y: PyTree, w: PyTree
) -> PyTree:
    """The pull-back of `y`, a cotangent of `xw2y(x, w)`, to the weights."""
    return jax.vjp(lambda weights: xw2y(x, weights), w)[1](y)[0]


@contextmanager
def stop_param_gradients(stop_or_not: bool = True) -> Iterator[None]:
    """Warn that this context no longer does anything."""
    text = "stop_param_gradients does nothing: use jax.lax.stop_gradient on the weights instead."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    yield


def _same(weight: jax.Array) -> jax.Array:
    return weight


# ------------------------------------------------------------------------------------- operators


class ETraceOp:
    """An operator as an object; subclasses say in `xw_to_y` which one. Arguments have no effect."""

    needs: tuple[str, ...] = ()

    def __init__(self, is_diagonal: bool = False, name: str | None = None):
        self.is_diagonal, self.name = is_diagonal, name

    def __call__(self, inputs: PyTree, weights: PyTree) -> PyTree:
        return self.xw_to_y(inputs, weights)

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The operator's output; its weights take part in online learning."""
        raise error(NotImplementedError)(
            f"{type(self).__name__} does not define xw_to_y.",
            why="ETraceOp is the base of operators",
            do="use a subclass, or an operator function such as braintrace.matmul",
        )

    def raw_xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The same output in plain JAX; its weights are not traced."""
        return plain(self.xw_to_y, inputs, weights)

    def xy_to_dw(self, input_dim_arr: PyTree, hidden_dim_arr: PyTree, weights: PyTree) -> PyTree:
        """The weights' gradient for a cotangent of the output, within one step."""
        return general_y2w(self.raw_xw_to_y, input_dim_arr, hidden_dim_arr, weights)

    def dt_to_t(self, hidden_dim_arr: PyTree, weight_dim_tree: PyTree) -> PyTree:
        """Refused: learning rules advance the traces themselves."""
        raise error(NotImplementedError)(
            f"{type(self).__name__}.dt_to_t is not defined.",
            why="how a trace follows its neuron is derived from the operator itself",
            do="read traces with learner.get_etrace_of(weight)",
        )

    def _checked(self, weights: PyTree) -> dict[str, jax.Array]:
        name = type(self).__name__
        if not isinstance(weights, dict):
            raise type_error(
                f"{name}: the weights are a {type(weights).__name__}.",
                why=f"they are read by name: {', '.join(self.needs)}, and bias if there is one",
                do="pass a dict of arrays",
            )
        missing = [k for k in self.needs if k not in weights]
        if missing:
            raise value_error(
                f"{name}: the weights have no {', '.join(missing)}.",
                why=f"there are {', '.join(map(str, weights)) or 'none'}",
                do=f"pass a dict with {', '.join(self.needs)}, and bias if there is one",
            )
        return weights


class _Masked(ETraceOp):
    """What operators with a mask share: the function that acts on the weight."""

    needs = ("weight",)

    def __init__(self, weight_mask: jax.Array | None, weight_fn: WeightFn, fn_first: bool = False):
        super().__init__()
        self.weight_mask, self.weight_fn = weight_mask, weight_fn
        self.apply_weight_fn_before_mask = fn_first

    def _effective(self, weight: jax.Array) -> jax.Array:
        if self.weight_mask is None:
            return self.weight_fn(weight)
        if self.apply_weight_fn_before_mask:
            return self.weight_fn(weight) * self.weight_mask
        return self.weight_fn(weight * self.weight_mask)


class MatMulOp(_Masked):
    """`x @ weight_fn(weight * mask) + bias`, or `weight_fn(weight) * mask`: `braintrace.matmul`."""

    def __init__(
        self,
        weight_mask: jax.Array | None = None,
        weight_fn: WeightFn = _same,
        apply_weight_fn_before_mask: bool = False,
    ):
        super().__init__(weight_mask, weight_fn, apply_weight_fn_before_mask)

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The product; `weights` has `weight` and perhaps `bias`."""
        w = self._checked(weights)
        return matmul(inputs, w["weight"], w.get("bias"), weight_fn=self._effective)


class ConvOp(_Masked):
    """A convolution of a batch: `braintrace.conv`.

    `xinfo` has no effect, `weight_fn` is a function of the kernel times `weight_mask`, and the
    other arguments are those of `jax.lax.conv_general_dilated`.
    """

    def __init__(
        self,
        xinfo: Any,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        dimension_numbers: Any = None,
        weight_mask: jax.Array | None = None,
        weight_fn: WeightFn = _same,
    ):
        super().__init__(weight_mask, weight_fn)
        self.xinfo = xinfo
        self._window: dict[str, Any] = dict(
            strides=window_strides,
            padding=padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            feature_group_count=feature_group_count,
            batch_group_count=batch_group_count,
            dimension_numbers=dimension_numbers,
        )

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The convolution; `weights` has `weight` and perhaps `bias`."""
        w = self._checked(weights)
        return conv(inputs, w["weight"], w.get("bias"), kernel_fn=self._effective, **self._window)


class SpMatMulOp(ETraceOp):
    """`x @ S(weight_fn(weight)) + bias` with a fixed sparse structure: `braintrace.sparse_matmul`.

    Raises:
        TypeError: `sparse_mat` has a format that `sparse_matmul` does not take.
    """

    needs = ("weight",)

    def __init__(self, sparse_mat: Any, weight_fn: WeightFn = _same):
        super().__init__()
        structure_of(sparse_mat)
        self.sparse_mat, self.weight_fn = sparse_mat, weight_fn

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The product; `weights` has `weight` and perhaps `bias`."""
        w, matrix, fn = self._checked(weights), self.sparse_mat, self.weight_fn
        bias = w.get("bias")
        return sparse_matmul(inputs, w["weight"], sparse_mat=matrix, bias=bias, weight_fn=fn)


class LoraOp(ETraceOp):
    """`alpha * x @ B @ A + bias`, with alpha 1 if it is None: `braintrace.lora_matmul`."""

    needs = ("B", "A")

    def __init__(self, alpha: jax.typing.ArrayLike | None = None):
        super().__init__()
        self.alpha = alpha

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The product; `weights` has `B`, `A` and perhaps `bias`."""
        w = self._checked(weights)
        alpha = 1.0 if self.alpha is None else self.alpha
        return lora_matmul(inputs, w["B"], w["A"], alpha=alpha, bias=w.get("bias"))


class ElemWiseOp(ETraceOp):
    """`fn(weight)`: `braintrace.element_wise`."""

    def __init__(self, fn: WeightFn = _same):
        super().__init__(is_diagonal=True)
        self.fn = fn

    def __call__(self, weights: PyTree) -> PyTree:  # type: ignore[override]
        return self.xw_to_y(None, weights)

    def xw_to_y(self, inputs: PyTree, weights: PyTree) -> PyTree:
        """The function's value; there are no inputs."""
        return element_wise(weights, self.fn)


# ------------------------------------------------------------------------------------ parameters


class ETraceGrad(StrEnum):
    """The kinds of gradient of version 0.1; the rule decides today."""

    full = "full"
    approx = "approx"
    adaptive = "adaptive"


class ETraceParam(brainstate.ParamState):
    """A parameter with its operator; `execute(x)` applies it, and the weight is traced.

    Args:
        weight: the operator's weights, a dict of arrays.
        op: the operator.
        grad: 'full', 'approx' or 'adaptive'; stored as `gradient`, without effect.
        name: name of the state.

    Raises:
        TypeError: `op` is not an `ETraceOp`.
        ValueError: unknown `grad`.
    """

    is_etrace = True

    def __init__(
        self, weight: PyTree, op: ETraceOp, grad: str | None = None, name: str | None = None
    ):
        if not isinstance(op, ETraceOp):
            raise type_error(
                f"{type(self).__name__}: op has type {type(op).__name__}.",
                why="the weights go through an operator, which has their traces",
                do="pass e.g. braintrace.MatMulOp(), or braintrace.NonTempParam(weight, op)",
            )
        if grad is not None and grad not in list(ETraceGrad):
            raise value_error(
                f"{type(self).__name__}: grad={grad!r}.",
                why=f"the kinds are {', '.join(ETraceGrad)}",
                do="leave it out: the learning rule decides about gradients",
            )
        super().__init__(weight, name=name)
        self.op = op
        self.gradient = ETraceGrad("adaptive" if grad is None else grad)

    def execute(self, x: PyTree) -> PyTree:
        """The operator's output for this input."""
        return self.op(x, self.value)


class ElemWiseParam(ETraceParam):
    """A parameter that acts element by element; `execute()` is its value through the function.

    `op` is an `ElemWiseOp`, or the function itself.
    """

    def __init__(self, weight: PyTree, op: Any = _same, name: str | None = None):
        op = op if isinstance(op, ETraceOp) or not callable(op) else ElemWiseOp(op)
        super().__init__(weight, op, "full", name)

    def execute(self) -> PyTree:  # type: ignore[override]
        """The function of the parameter."""
        return self.op.xw_to_y(None, self.value)


class NonTempParam(brainstate.ParamState):
    """A parameter that no rule traces: it has the gradient of the step, computed in plain JAX.

    `op` is an operator, or a function of input and weights; `options` have no effect.
    """

    def __init__(self, value: PyTree, op: Any, name: str | None = None, **options: object):
        super().__init__(value, name=name)
        self.op = op.raw_xw_to_y if isinstance(op, ETraceOp) else op

    execute = ETraceParam.execute


class FakeETraceParam:
    """Weights that are not trained, with the call of a parameter.

    `op` is an operator, or a function of input and weights.
    """

    def __init__(self, value: PyTree, op: Any):
        self.value = value
        self.op = op.raw_xw_to_y if isinstance(op, ETraceOp) else op

    execute = ETraceParam.execute


class FakeElemWiseParam:
    """An array that is not trained, with the call of an element-wise parameter.

    `op` is an `ElemWiseOp`, or the function itself; `name` has no effect.
    """

    def __init__(self, weight: PyTree, op: Any = _same, name: str | None = None):
        self.value, self.name = weight, name
        self.op = op if isinstance(op, ETraceOp) else ElemWiseOp(op)

    def execute(self) -> PyTree:
        """The function of the array."""
        return self.op.raw_xw_to_y(None, self.value)


for _name in INSTEAD:
    globals()[_name].__module__ = "braintrace"
