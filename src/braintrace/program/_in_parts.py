"""Functions of which a `vmap` evaluates a few samples at once, those that the caches hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax

from ._jax import Primitive, ad, batching, is_traced, mlir
from ._primitives import at_positions
from ._records import Array, PyTree


@dataclass(frozen=True, eq=False)
class InParts:
    """A jitted function, and how many samples of a `vmap` it is evaluated for at once.

    Samples go one lot after another; results are those of all at once. A function with effects is
    left as it is: to print, or to meet the other samples along a named axis, is one. So is one that
    closes over a value of a running transformation.

    Attributes:
        function: the function.
        most: the number, from the shapes of its arguments.
        calls: the function as one of arrays, by structure and shapes of its arguments.
    """

    function: Callable[..., PyTree]
    most: Callable[..., int]
    calls: dict[Any, _Call] = field(default_factory=dict)

    @property
    def __wrapped__(self) -> Any:
        return self.function.__wrapped__  # type: ignore[attr-defined]

    def __call__(self, *args: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(args)
        if not any(map(is_traced, leaves)):
            return self.function(*args)
        flat = lambda *arrays: self.function(*jax.tree.unflatten(tree, arrays))
        program, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        if program.effects or any(map(is_traced, program.consts)):
            return self.function(*args)
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(jax.typeof, leaves))
        if (tree, shapes) not in self.calls:
            most = partial(self.most, *jax.tree.unflatten(tree, shapes))
            self.calls[tree, shapes] = _Call(flat, most)
        results = _in_parts.bind(*leaves, call=self.calls[tree, shapes], jaxpr=program)
        return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclass(frozen=True, eq=False)
class _Call:
    """A function of arrays, and how many samples of a `vmap` it is evaluated for at once."""

    function: Callable[..., PyTree]
    number: Callable[[], int]
    mapped: dict[tuple[bool, ...], Callable] = field(default_factory=dict)

    def __call__(self, *arrays: Array) -> list[Array]:
        return jax.tree.leaves(self.function(*arrays))

    @cached_property
    def most(self) -> int:
        return max(1, self.number())

    def over(self, batched: tuple[bool, ...], jaxpr: Any) -> Callable[..., list[Array]]:
        """The function of samples along the leading axes of these arrays; compiled once."""
        if batched not in self.mapped:
            self.mapped[batched] = jax.jit(partial(self._by_lots, batched, jaxpr))
        return self.mapped[batched]

    def _by_lots(self, batched: tuple[bool, ...], jaxpr: Any, *arrays: Array) -> list[Array]:
        own = [a for a, each in zip(arrays, batched, strict=True) if each]
        count = own[0].shape[0]
        size = max(n for n in range(1, min(self.most, count) + 1) if count % n == 0)

        def one(function: Callable[..., list[Array]], own: list[Array]) -> list[Array]:
            items = iter(own)
            return function(
                *(next(items) if e else a for a, e in zip(arrays, batched, strict=True))
            )

        if size == 1:  # of a vmap around this one each sample is in parts again
            return jax.lax.map(partial(one, partial(_in_parts.bind, call=self, jaxpr=jaxpr)), own)
        lot = jax.vmap(partial(one, self))
        if size == count:
            return lot(own)
        lots = jax.tree.map(lambda a: a.reshape((count // size, size, *a.shape[1:])), own)
        return [a.reshape((count, *a.shape[2:])) for a in jax.lax.map(lot, lots)]


class _InParts(Primitive):
    """The call of such a function; `jaxpr` is what it computes, for who looks into programs."""

    multiple_results = True

    def __init__(self) -> None:
        super().__init__("in_parts")
        run = lambda *arrays, call, jaxpr: call(*arrays)
        self.def_impl(run)
        self.def_abstract_eval(lambda *avals, call, jaxpr: list(jaxpr.out_avals))
        mlir.register_lowering(self, mlir.lower_fun(run, multiple_results=True))
        ad.primitive_jvps[self] = self._jvp
        batching.primitive_batchers[self] = self._batch

    def _jvp(self, primals, tangents, *, call, jaxpr):
        varying = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
        function = at_positions(lambda full: call(*full), primals, varying)
        of = lambda arrays: tuple(arrays[i] for i in varying)
        outs, moved = jax.jvp(function, of(primals), of(tangents))
        zero = lambda t: ad.Zero(jax.typeof(t)) if t.dtype == jax.dtypes.float0 else t
        return outs, list(map(zero, moved))

    def _batch(self, operands, axes, *, call, jaxpr):
        batched = tuple(isinstance(axis, int) for axis in axes)
        first = lambda a, axis: jax.numpy.moveaxis(a, axis, 0) if axis else a
        moved = [first(a, i) if b else a for a, i, b in zip(operands, axes, batched, strict=True)]
        results = call.over(batched, jaxpr)(*moved)
        return results, [0] * len(results)


_in_parts = _InParts()
