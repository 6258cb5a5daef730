"""Torch in a trace of JAX: tensors whose values are traced arrays, computed by the table.

While a `Tracing` is active it gets every operator of ATen, below torch's autograd and below what
torch composes of other operators. What is known (a factory, a buffer that the step only reads)
stays a tensor of torch, so that Python may ask for its value; where it meets a traced array it
becomes one, and the table computes. Two facts that a recorded graph does not have are seen here:
`detach` and `torch.no_grad` stop the gradient, and `autograd.Function` has its own derivative.

A view remembers the tensor that it is a view of and the operators that made it, so that what is
written through it is in that tensor, and in its other views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._ops import OpOverload as Operator
from torch._ops import OpOverloadPacket
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .._errors import NotSupportedError, not_supported, type_error, value_error
from ..program import calling_line
from ._arrays import Array, constant_of, dtype_of
from ._table import TABLE

Value: TypeAlias = torch.Tensor | Array
_CPU = torch.device("cpu")  # where tensors of a traced step say they are, on every device
_registered: dict[str, Callable[..., Any]] = {}


def register(op: Any, function: Callable[..., Any]) -> None:
    """Say what an operator of torch computes, in JAX.

    Args:
        op: the operator, `torch.ops.aten.lu` or one overload of it, or of another library.
        function: takes the operator's arguments, with arrays for tensors, and returns what it
            returns, an array or a tuple of arrays; types are converted to those of torch. Its
            derivative is that of JAX.

    Raises:
        TypeError: `op` is no operator.

    Example:
        >>> import jax.numpy as jnp, torch, braintrace.torch as bt
        >>> bt.register(torch.ops.aten.special_bessel_j0, lambda x: jnp.sin(x) / x)
    """
    if not isinstance(op, Operator | OpOverloadPacket):
        raise type_error(
            f"{op!r} is no operator of torch.",
            why="a traced step is a sequence of operators, torch.ops.<library>.<name>",
            do="register(torch.ops.aten.<name>, function); the error of the step has the name",
        )
    _registered[str(op)] = function


def function_of(op: Operator) -> Callable[..., Any] | None:
    """What computes an operator: for this overload, or for all of them."""
    return _named(op.namespace, op.overloadpacket.__name__, op._overloadname)


def _named(namespace: str, name: str, overload: str) -> Callable[..., Any] | None:
    for key in (f"{name}.{overload}", name):
        if f"{namespace}.{key}" in _registered:
            return _registered[f"{namespace}.{key}"]
        if namespace == "aten" and key in TABLE:
            return TABLE[key]
    return None


def decomposition_of(op: Operator) -> Callable[..., Any] | None:
    """The operator in terms of others, as torch has it."""
    if op._can_decompose():
        return op.decompose
    return torch._decomp.decomposition_table.get(op) if op.namespace == "aten" else None


class Traced(torch.Tensor):
    """A tensor of a traced step.

    Its value is an array, or a tensor of torch as long as it depends on nothing traced. A view has
    a `root` and what leads from there to it, and no value of its own.
    """

    value: Value
    meta: torch.Tensor  # shape, strides and type, without memory
    root: Traced | None
    path: tuple[Callable[[Array], Array], ...]
    detached: bool
    constant: Array | None  # of a tensor of torch, if there is an array for it already
    version: int  # of a root: how often it was written; of a view: when it was read

    @staticmethod
    def __new__(
        cls,
        value: Value,
        meta: torch.Tensor,
        root: Traced | None = None,
        path: tuple[Callable[[Array], Array], ...] = (),
        detached: bool = False,
    ) -> Traced:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=_CPU,
        )
        self.value, self.meta, self.constant = value, meta, None
        self.root, self.path, self.detached = root, path, detached
        self.version = 0 if root is None else root.version
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, op: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise type_error(
            f"a tensor of a traced step is used outside of it, by {op}.",
            where=calling_line(),
            why="its Python runs once for all steps, so what it keeps has no value of a step",
            do="return the value from forward, as a part of the output or of the state",
        )

    def __jax_array__(self) -> Array:
        return self.array

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"tensor of a traced step, {str(self.dtype).removeprefix('torch.')}{[*self.shape]}"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        raise _reads_a_value()

    def __array__(self, dtype: Any = None) -> Any:
        raise _reads_a_value()

    def register_hook(self, hook: Any) -> Any:
        raise not_supported(
            "the step registers a hook on a tensor.",
            where=calling_line(),
            why="hooks run in torch's autograd, which computes nothing here, so that what it does "
            "to a gradient would be left out",
            do="write what it does as an autograd.Function",
        )

    # Torch's own are done in its autograd, and would be nothing here.
    def detach_(self) -> Traced:
        if not self.known:
            self.write(lax.stop_gradient(self.array))
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Traced:
        return self if requires_grad else self.detach_()

    @property
    def whole(self) -> Traced:
        """The tensor that this one is a view of, or itself."""
        return self if self.root is None else self.root

    @property
    def known(self) -> bool:
        """Whether the value is a tensor of torch."""
        return isinstance(self.whole.value, torch.Tensor)

    @property
    def array(self) -> Array:
        """The value as an array."""
        if self.root is not None and self.version < self.root.version:
            self.version = self.root.version
            if not self.known:
                read = follow(self.path, self.root.array)
                self.value = lax.stop_gradient(read) if self.detached else read
        if not isinstance(self.value, torch.Tensor):
            return self.value
        return _constant(self.value) if self.constant is None else self.constant

    def write(self, new: Array) -> None:
        """Put another value into this tensor, and so into all that share its memory."""
        root = self.whole
        root.value = new if root is self else _put(root.array, self.path, new)
        root.version += 1


def _constant(tensor: torch.Tensor) -> Any:
    with _disable_current_modes():
        return constant_of(tensor)


def follow(path: Sequence[Callable[[Array], Array]], value: Array) -> Array:
    for function in path:
        value = function(value)
    return value


def _put(whole: Array, path: Sequence[Callable[[Array], Array]], part: Array) -> Array:
    """`whole` with `part` at the place that the path leads to.

    Views move elements, so the transposed path moves those of the part back, with zeros elsewhere.
    Of `h = [1, 2, 3]` and `h[:2]` the transposed path makes [a, b, 0], and of ones the mask.
    """
    with jax.ensure_compile_time_eval():
        place = follow(path, jnp.arange(whole.size).reshape(whole.shape))
        mask = jnp.zeros(whole.size, bool).at[place.ravel()].set(True).reshape(whole.shape)
        covered = bool(mask.all())
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return whole.ravel().at[place.ravel()].set(part.ravel()).reshape(whole.shape)
    (moved,) = jax.linear_transpose(partial(follow, path), whole)(part)
    return moved if covered else jnp.where(mask, moved, whole)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Traced):
        return tensor.meta
    with _disable_current_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def traced(array: Array, dtype: torch.dtype) -> Traced:
    """An array as a tensor of this type."""
    with _disable_current_modes():
        return Traced(array, torch.empty(array.shape, dtype=dtype, device="meta"))


def known(tensor: torch.Tensor) -> Traced:
    """A copy of a tensor of torch, as one of a traced step."""
    with _disable_current_modes():
        copy = tensor.detach().to(_CPU, copy=True)
        return Traced(copy, meta_of(copy))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [a for a in pytree.tree_leaves(tree) if isinstance(a, torch.Tensor)]


def _known_result(result: Any, written: Sequence[Traced]) -> Any:
    """What torch computed, as a tensor of the step; an operator in place returns what it wrote."""
    if not isinstance(result, torch.Tensor):
        return result
    same = next((t for t in written if t.value is result), None)
    return Traced(result, meta_of(result)) if same is None else same


def is_known(tensor: torch.Tensor) -> bool:
    return tensor.known if isinstance(tensor, Traced) else True


def _plain(a: Any) -> Any:
    if isinstance(a, Traced):
        return a.value
    return a.to(_CPU) if isinstance(a, torch.Tensor) else a


def array_in(a: Any) -> Any:
    if isinstance(a, Traced):
        return a.array
    return _constant(a) if isinstance(a, torch.Tensor) else a


def _meta(a: Any) -> Any:
    return meta_of(a) if isinstance(a, torch.Tensor) else a


# Types and places of results follow from the shapes that torch says, see `Tracing._results`.
_OF_RESULTS = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")
_VALUES = ("_local_scalar_dense", "item", "is_nonzero", "equal")


@dataclass(slots=True)
class Refused:
    """What a step does that cannot be traced, with the first line that does it."""

    unknown: dict[str, str | None] = field(default_factory=dict)
    random: dict[str, str | None] = field(default_factory=dict)
    outside: dict[str, str | None] = field(default_factory=dict)
    foreign: dict[str, str | None] = field(default_factory=dict)

    def check(self) -> None:
        """Raise one error for all of them."""
        if self.foreign:
            raise not_supported(
                "a tensor that requires a gradient comes from outside of the module's forward.",
                where=_lines(self.foreign),
                why="the learner has the gradient of the parameters of its module, through its "
                "forward; what this tensor adds would silently be left out",
                do="use a parameter of the module in its forward (a loss may get what it needs as "
                "a part of the output), or this tensor under torch.no_grad()",
            )
        if self.unknown:
            raise not_supported(
                f"the module uses {len(self.unknown)} operator(s) of torch that have no function "
                f"in JAX: {', '.join(self.unknown)}.",
                where=_lines(self.unknown),
                why="a step is translated operator by operator, and its derivative is that of JAX",
                do="braintrace.torch.register(torch.ops." + next(iter(self.unknown))
                + ", function) for each, or write it with other operators",
            )  # fmt: skip
        if self.random:
            raise not_supported(
                f"the step draws random numbers: {', '.join(self.random)}.",
                where=_lines(self.random),
                why="the generator of torch is no part of a traced step, so every step would draw "
                "the same numbers",
                do="pass the noise as an input of the step, net(state, x, noise); for dropout use "
                "net.eval() or a mask that is an input",
            )
        if self.outside:
            raise not_supported(
                "the step writes into a tensor that is neither its own nor one of the module: "
                f"{', '.join(self.outside)}.",
                where=_lines(self.outside),
                why="its Python runs once for all steps, so that tensor would not change",
                do="make it a buffer of the module, or a part of the state",
            )


def _lines(of: dict[str, str | None]) -> str | None:
    found = list(dict.fromkeys(line for line in of.values() if line))
    return "\n         ".join(found) or None


class Tracing(TorchDispatchMode):
    """Computes every operator of torch by the table, see the header."""

    def __init__(self, refused: Refused, backward: bool = False):
        super().__init__()
        self.refused = refused
        self.calling: Operator | None = None  # one that is done by others
        self.backward = backward  # in a derivative, which torch runs without gradients

    def __torch_dispatch__(
        self, op: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with _disable_current_modes():  # of traces around this one
            return self._dispatched(op, args, kwargs or {})

    def _dispatched(self, op: Operator, args: Any, kwargs: Any) -> Any:
        written = _written(op, args, kwargs)
        is_constant = all(map(is_known, tensors_in((args, kwargs))))
        if torch.Tag.nondeterministic_seeded in op.tags and _draws(op, args, kwargs):
            self._note(self.refused.random, op)
            if not is_constant:
                return self._zeros(op, args, kwargs, written)
        if self._is_foreign(args, kwargs):
            self._note(self.refused.foreign, op)
        if torch.Tag.inplace_view in op.tags:
            raise not_supported(
                f"{op} changes the shape of a tensor in place.",
                where=calling_line(),
                why="a tensor of a traced step has one shape; torch.vmap does so by itself",
                do="use the function without the underscore, x = x.squeeze(1), and a batch axis in "
                "place of vmap",
            )
        if any(not isinstance(t, Traced) for t in written):
            self._note(self.refused.outside, op)
            return self._zeros(op, args, kwargs, written)
        if is_constant:
            return self._known(op, args, kwargs, written)
        if op.overloadpacket.__name__ in _VALUES:
            raise _reads_a_value()
        if op.overloadpacket.__name__ in _BATCH_NORMS:
            with self:
                return self._batch_norm(args)
        if written:
            return self._in_place(op, args, kwargs)
        return self._computed(op, args, kwargs)

    def _is_foreign(self, args: Any, kwargs: Any) -> bool:
        """Whether a gradient is followed to a tensor that is not of this step."""
        if self.backward or not torch.is_grad_enabled():
            return False
        tensors = tensors_in((args, kwargs))
        return any(t.requires_grad for t in tensors if not isinstance(t, Traced))

    def _note(self, refused: dict[str, str | None], op: Operator) -> None:
        """Note what the step does wrong, as the operator that the user called."""
        refused.setdefault(str(self.calling or op), calling_line())

    def _known(self, op: Operator, args: Any, kwargs: Any, written: Sequence[Any]) -> Any:
        """Torch computes what depends on nothing traced."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}  # what the step makes is where its tensors are
        result = op(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
        own = [t for t in written if isinstance(t, Traced)]
        for t in own:
            t.whole.version += 1
            t.constant = t.whole.constant = None
        results = [_known_result(r, own) for r in _flat(result)]
        if op.is_view and isinstance(args[0], Traced):
            self._share(op, args, kwargs, results)
        return _rebuilt(result, results)

    def _in_place(self, op: Operator, args: Any, kwargs: Any) -> Any:
        """The operator without the underscore, or without `out`, then written."""
        packet, overload = op.overloadpacket.__name__, op._overloadname
        target = kwargs.get("out", args[0] if args else None)
        if not isinstance(target, Traced) or ("out" not in kwargs and packet[-1] != "_"):
            return self._unknown(op, args, kwargs)
        name = packet if "out" in kwargs else packet.removesuffix("_")
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        function = _named(op.namespace, name, overload)
        if function is None:
            return self._unknown(op, args, kwargs)
        new = self._applied(op, function, args, kwargs)
        new = jnp.broadcast_to(jnp.asarray(new), target.shape).astype(dtype_of(target.dtype))
        if not self._free and jnp.issubdtype(new.dtype, jnp.inexact):
            # Torch changes the value and keeps the derivative of what was there.
            old = target.array
            new = lax.stop_gradient(new) + (old - lax.stop_gradient(old))
        target.write(new)
        return target

    def _computed(self, op: Operator, args: Any, kwargs: Any) -> Any:
        function = function_of(op)
        if function is None:
            decomposed = decomposition_of(op)
            if decomposed is None:
                return self._unknown(op, args, kwargs)
            outer, self.calling = self.calling, self.calling or op
            try:
                with self:
                    return decomposed(*args, **kwargs)
            finally:
                self.calling = outer
        shapes = self._shapes(op, args, kwargs)
        if op.is_view:
            return self._view(op, function, args, kwargs, shapes)
        values = self._applied(op, function, args, kwargs)
        return self._results(op, values, shapes)

    def _applied(self, op: Operator, function: Callable, args: Any, kwargs: Any) -> Any:
        options = {k: v for k, v in kwargs.items() if k not in _OF_RESULTS}
        try:
            return function(*pytree.tree_map(array_in, args), **pytree.tree_map(array_in, options))
        except NotImplementedError as cause:
            raise not_supported(
                f"{op} is not translated with these arguments.",
                where=calling_line(),
                why=f"there is no function in JAX for {cause}",
                do=f"braintrace.torch.register(torch.ops.{op}, function), or use other arguments",
            ) from None

    def _shapes(self, op: Operator, args: Any, kwargs: Any) -> Any:
        """What torch says of the results: shapes, strides and types."""
        metas = pytree.tree_map(_meta, (args, kwargs))
        options = dict(metas[1])
        if "device" in options:
            options["device"] = torch.device("meta")
        try:
            return op(*metas[0], **options)
        except (NotImplementedError, RuntimeError) as cause:
            raise not_supported(
                f"the shape of what {op} computes is not known before it runs.",
                where=calling_line(),
                why=f"a step is traced once for all values; torch says: {_first_line(cause)}",
                do="use an operator whose result has a fixed shape, torch.where in place of a mask",
            ) from cause

    def _results(self, op: Operator, values: Any, shapes: Any) -> Any:
        """The results as tensors of the types that torch says."""
        arrays, metas = _flat(values), _flat(shapes)
        wanted = [tuple(m.shape) if isinstance(m, torch.Tensor) else None for m in metas]
        given = [None if a is None else jnp.shape(a) for a in arrays]
        if len(arrays) != len(metas) or any(
            w is not None and w != g for w, g in zip(wanted, given, strict=True)
        ):
            raise value_error(
                f"the function of {op} returned {given}.",
                why=f"torch says that the shape of its result is {wanted}",
                do="register a function that returns what the operator returns",
            )
        pairs = zip(arrays, metas, strict=True)
        return _rebuilt(shapes, [None if m is None else self._typed(a, m) for a, m in pairs])

    def result(self, array: Array, like: torch.Tensor) -> Traced:
        """An array that was computed otherwise, as a result of the step."""
        return traced(self._cut(array), like.dtype)

    def _typed(self, value: Any, meta: torch.Tensor) -> Traced:
        array = jnp.asarray(value)
        dtype = dtype_of(meta.dtype)
        return Traced(self._cut(array if array.dtype == dtype else array.astype(dtype)), meta)

    def _cut(self, array: Array) -> Array:
        """Without gradients torch computes a constant."""
        return array if self._free else lax.stop_gradient(array)

    @property
    def _free(self) -> bool:
        """Whether gradients are followed; in a derivative they are, since the step has one."""
        return self.backward or torch.is_grad_enabled()

    def _view(self, op: Operator, function: Any, args: Any, kwargs: Any, shapes: Any) -> Any:
        values = _flat(self._applied(op, function, args, kwargs))
        results = [self._typed(v, m) for v, m in zip(values, _flat(shapes), strict=True)]
        self._share(op, args, kwargs, results)
        return _rebuilt(shapes, results)

    def _share(self, op: Operator, args: Any, kwargs: Any, results: Sequence[Any]) -> None:
        """Make results views of the first argument."""
        base = args[0]
        detaches = op.overloadpacket.__name__ == "detach"
        cut = detaches or not self._free
        for i, result in enumerate(results):
            step = () if detaches else (partial(_viewed, op, args[1:], kwargs, i),)
            result.root, result.path = base.whole, (*base.path, *step)
            result.detached, result.version = base.detached or cut, result.root.version

    def _batch_norm(self, args: Any) -> Any:
        """A batch norm in other operators; in training it moves its running mean and variance."""
        x, weight, bias, running_mean, running_var, training, momentum, eps = args
        each = (1, -1, *(1,) * (x.ndim - 2))
        mean, var = running_mean, running_var
        if training or running_mean is None:
            var, mean = torch.var_mean(x, [a for a in range(x.ndim) if a != 1], correction=0)
        if training and running_mean is not None:
            count = x.numel() // x.shape[1]
            running_mean.lerp_(mean.detach(), momentum)
            running_var.lerp_(var.detach() * (count / (count - 1)), momentum)
        scale = torch.rsqrt(var + eps)
        out = (x - mean.view(each)) * scale.view(each)
        out = out if weight is None else out * weight.view(each)
        return out if bias is None else out + bias.view(each), mean, scale

    def _unknown(self, op: Operator, args: Any, kwargs: Any) -> Any:
        self._note(self.refused.unknown, op)
        return self._zeros(op, args, kwargs, _written(op, args, kwargs))

    def _zeros(self, op: Operator, args: Any, kwargs: Any, written: Sequence[Any]) -> Any:
        """Go on with zeros after what is refused, to find all of it."""
        if written:
            return written[0]
        try:
            shapes = self._shapes(op, args, kwargs)
        except NotSupportedError:
            self.refused.check()
            raise
        values = [jnp.zeros(m.shape, dtype_of(m.dtype)) for m in _flat(shapes)]
        return self._results(op, values, shapes)


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _rebuilt(like: Any, results: list[Any]) -> Any:
    """Results as one, as a list or as a tuple."""
    return type(like)(results) if isinstance(like, list | tuple) else results[0]


def _written(op: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes."""
    if op.overloadpacket.__name__ in _BATCH_NORMS and args[5]:
        return tensors_in(args[3:5])
    schema = op._schema.arguments
    named = [(args[i] if i < len(args) else kwargs.get(a.name), a) for i, a in enumerate(schema)]
    writes = lambda a: a.alias_info is not None and a.alias_info.is_write
    return tensors_in([value for value, a in named if writes(a)])


def _draws(op: Operator, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers: a dropout of nothing does not."""
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0) != 0


def _reads_a_value() -> Exception:
    return not_supported(
        "the step asks for the value of a tensor that differs from step to step.",
        where=calling_line(),
        why="its Python runs once for all steps (if, while, int(), .item(), .numpy())",
        do="use torch.where for a choice between values, and shapes that do not depend on them",
    )


def _first_line(cause: Exception) -> str:
    return str(cause).strip().partition("\n")[0]


def _viewed(op: Operator, rest: Any, kwargs: Any, i: int, value: Array) -> Array:
    function = function_of(op)
    assert function is not None
    options = {k: v for k, v in kwargs.items() if k not in _OF_RESULTS}
    return _flat(function(value, *pytree.tree_map(array_in, rest), **options))[i]
