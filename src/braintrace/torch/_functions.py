"""`autograd.Function` in a trace: forward and backward as one function with its own derivative.

The surrogate gradient of a spike is such a function. Its backward is Python that runs on tensors,
so it is traced like the step itself; what forward saves for it are the residuals.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.dtypes import float0
from torch.autograd.function import _is_setup_context_defined, _SingleLevelFunction
from torch.utils import _pytree as pytree

from .._errors import CompilationError, NotSupportedError, not_supported
from ..program import calling_line, failing_line
from ._arrays import Array, dtype_of
from ._tracing import Refused, Traced, Tracing, array_in, is_known, known, meta_of, traced

_active: ContextVar[Tracing | None] = ContextVar("the trace of a step", default=None)
_lock, _traces = threading.Lock(), [0]
# Operators of torch that are a whole layer, and have no derivative; while a step is traced, torch
# composes layers of smaller ones.
_WHOLE_LAYERS = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
_whole: list[bool] = []  # which of them were on


@contextmanager
def tracing(refused: Refused, backward: bool = False) -> Iterator[None]:
    """Compute torch by the table, with the derivatives of its functions."""
    mode = Tracing(refused, backward)
    with ExitStack() as stack:
        stack.enter_context(_functions_captured())
        stack.callback(_active.reset, _active.set(mode))
        stack.enter_context(mode)
        if not backward:
            stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _functions_captured() -> Iterator[None]:
    """Put `_apply` below `Function.apply`, which users may hold since they defined their class."""
    with _lock:
        _traces[0] += 1
        _SingleLevelFunction.apply = classmethod(_apply)
        if _traces[0] == 1:
            _whole.extend(_is_on() for _is_on, _ in _WHOLE_LAYERS)
            _switch([False] * len(_WHOLE_LAYERS))
    try:
        yield
    finally:
        with _lock:
            _traces[0] -= 1
            if not _traces[0]:
                del _SingleLevelFunction.apply
                _switch(_whole)
                _whole.clear()


def _switch(on: Sequence[bool]) -> None:
    for (_, put), value in zip(_WHOLE_LAYERS, on, strict=True):
        put(value)


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    mode = _active.get()
    if mode is None:
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)
    return captured(mode, function, args, kwargs)


class Context:
    """What forward and backward of a function share, torch's `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: tuple[Any, ...] = ()  # results without a derivative

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing: forward mode follows from the backward, which is linear."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: all cotangents are there."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        raise not_supported(
            "an autograd.Function writes into its argument (ctx.mark_dirty).",
            where=calling_line(),
            why="what its derivative would be taken of is gone after the call",
            do="return a new tensor from its forward",
        )


@dataclass(frozen=True, slots=True)
class _Residual:
    """The place of an array among what forward saves."""

    like: torch.Tensor  # without memory


@dataclass(eq=False)
class Captured:
    """One call of an `autograd.Function`, as a function of the arrays among its arguments.

    It outlives the trace, so it holds no traced value: a tensor without memory in its place.
    """

    function: Any
    args: list[Any]
    at: tuple[int, ...]  # which arguments are arrays
    kwargs: dict[str, Any]
    refused: Refused
    results: Any = field(default=None, init=False)  # what forward returns
    saved: list[Any] = field(default_factory=list, init=False)
    structure: Any = field(default=None, init=False)  # of what it saves

    def forward(self, *arrays: Array) -> list[Array]:
        return self._run(arrays)[0]

    def forward_and_save(self, *arrays: Array) -> tuple[list[Array], list[Array]]:
        outs, context = self._run(arrays)
        leaves, self.structure = pytree.tree_flatten(vars(context))
        is_residual = [isinstance(a, torch.Tensor) and not is_known(a) for a in leaves]
        kinds = list(zip(leaves, is_residual, strict=True))
        self.saved = [_Residual(meta_of(a)) if residual else a for a, residual in kinds]
        return outs, [a.array for a, residual in kinds if residual]

    def _run(self, arrays: Sequence[Array]) -> tuple[list[Array], Context]:
        args = list(self.args)
        for i, array in zip(self.at, arrays, strict=True):
            args[i] = _argument(array, self.args[i])
        needs = tuple(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)
        context = Context(needs)
        with tracing(self.refused, backward=True):
            if _is_setup_context_defined(self.function.setup_context):
                results = self.function.forward(*args, **self.kwargs)
                self.function.setup_context(context, tuple(args), results)
            else:
                results = self.function.forward(context, *args, **self.kwargs)
            # What is known already becomes an array too: a result of the step.
            outs = [
                r if isinstance(r, Traced) else Traced(r, meta_of(r)) for r in _tensors(results)
            ]
        self.results = pytree.tree_map(
            lambda r: meta_of(r) if isinstance(r, torch.Tensor) else r, results
        )
        constant = [any(r is c for c in context.constant) for r in _tensors(results)]
        values = zip(outs, constant, strict=True)
        return [jax.lax.stop_gradient(r.array) if c else r.array for r, c in values], context

    def backward(self, residuals: Sequence[Array], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """The cotangents of the arguments."""
        given = iter(residuals)
        leaves = [
            traced(next(given), a.like.dtype) if isinstance(a, _Residual) else a for a in self.saved
        ]
        context = Context(())
        vars(context).update(pytree.tree_unflatten(leaves, self.structure))
        likes = _tensors(self.results)
        pairs = zip(likes, cotangents, strict=True)
        arrays = [jnp.zeros(m.shape, dtype_of(m.dtype)) if _is_none(g) else g for m, g in pairs]
        # Gradients by complex numbers are those of torch, which JAX has conjugated.
        grads = [traced(jnp.conj(a), m.dtype) for a, m in zip(arrays, likes, strict=True)]
        with tracing(self.refused, backward=True), torch.no_grad():
            found = self.function.backward(context, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(_cotangent(found[i], self.args[i]) for i in self.at)


def _argument(array: Array, like: torch.Tensor) -> Traced:
    """An argument that is an array; what torch knows of it is still known."""
    if like.is_meta:
        return traced(array, like.dtype)
    tensor = known(like)
    tensor.constant = array
    return tensor


def captured(mode: Tracing, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call of an `autograd.Function` in a trace."""
    # A number that is known is a part of the program; other constants are arguments, since a
    # function with its own derivative has none by what it closes over.
    is_array = [isinstance(a, torch.Tensor) and not (is_known(a) and a.dim() == 0) for a in args]
    at = tuple(i for i, found in enumerate(is_array) if found)
    call = Captured(function, [_held(a) for a in args], at, kwargs, mode.refused)
    arrays = [jnp.asarray(array_in(args[i])) for i in at]
    if all(map(_no_gradient, arrays)):
        outs = call.forward(*arrays)
    else:
        differentiable = jax.custom_vjp(call.forward)
        differentiable.defvjp(call.forward_and_save, call.backward)
        outs = differentiable(*arrays)
        _check_backward(function, differentiable, arrays)
    given = iter(outs)
    return pytree.tree_map(
        lambda r: mode.result(next(given), r) if isinstance(r, torch.Tensor) else r, call.results
    )


def _held(argument: Any) -> Any:
    """An argument without its traced value."""
    if not isinstance(argument, torch.Tensor):
        return argument
    if not is_known(argument):
        return meta_of(argument)
    return argument.value if isinstance(argument, Traced) else argument


def _check_backward(function: Any, call: Any, arrays: Sequence[Array]) -> None:
    """Trace the backward once: a derivative that cannot be traced would be none."""

    def pulled(*values: Array) -> Any:
        outs, pull = jax.vjp(call, *values)
        ones = [np.zeros(o.shape, float0) if _no_gradient(o) else jnp.ones_like(o) for o in outs]
        return pull(ones)

    try:
        jax.eval_shape(pulled, *arrays)
    except (CompilationError, NotSupportedError):
        raise
    except Exception as cause:
        raise not_supported(
            f"the derivative of {function.__name__} cannot be traced.",
            where=failing_line(cause) or calling_line(),
            why=f"its backward raised {type(cause).__name__}: {str(cause).strip()[:200]}",
            do="write its backward with operators of torch on what ctx.save_for_backward kept, one "
            "gradient or None for each argument",
        ) from cause


def _no_gradient(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact)


def _is_none(cotangent: Any) -> bool:
    return cotangent is None or cotangent.dtype == float0


def _tensors(results: Any) -> list[Any]:
    return [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]


def _cotangent(found: Any, like: torch.Tensor) -> Any:
    if not (like.dtype.is_floating_point or like.dtype.is_complex):
        return np.zeros(like.shape, float0)
    dtype = dtype_of(like.dtype)
    if found is None:
        return jnp.zeros(like.shape, dtype)
    return jnp.broadcast_to(jnp.conj(found.array.astype(dtype)), like.shape)
