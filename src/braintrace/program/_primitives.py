"""Primitives of our own, with every rule of JAX derived from one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from ._jax import Primitive, ShapedArray, ad, batching, mlir
from ._records import Array, Params, shape_of


class DerivedPrimitive(Primitive):
    """A single-output primitive whose every JAX rule follows from one plain function.

    The static parameter `mapped` lists the `vmap`s the primitive went through, innermost first,
    each as one axis (or None) per operand. `twin(mapped_axes, operands)` may rebind a mapped
    call as another primitive; it returns None to decline. `computed` is a faster function for its
    value, of which no derivative is taken.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Array],
        computed: Callable[..., Array] | None = None,
    ):
        super().__init__(name)
        self.function = function
        self.twin: Callable[..., Any] | None = None
        call = lambda *args, **params: self.apply(params)(*args)
        if computed is not None:
            call = lambda *args, **params: self.apply(params, computed)(*args)
        self.def_impl(call)
        self.def_abstract_eval(self._abstract)
        mlir.register_lowering(self, mlir.lower_fun(call, multiple_results=False))
        ad.primitive_jvps[self] = self._jvp
        ad.primitive_transposes[self] = self._transpose
        batching.primitive_batchers[self] = self._batch

    def call(self, *args, **params):
        """Bind where Python runs the program, so that values of enclosing traces may be read.

        JAX's own rules bind the equations of bodies, which must not close over such values.
        """
        return self.bind(*args, **params)

    def apply(
        self, params: Params, function: Callable[..., Array] | None = None
    ) -> Callable[..., Array]:
        """The plain function of the operands, under its static parameters and `vmap`s."""
        static = {k: v for k, v in params.items() if k != "mapped"}
        plain = function or self.function
        fun = lambda *args: plain(*args, **static)
        for axes in params.get("mapped", ()):
            fun = jax.vmap(fun, in_axes=axes)
        return fun

    def _abstract(self, *avals, **params):
        shapes = (shape_of(a) for a in avals)
        out = jax.eval_shape(self.apply(params), *shapes)
        return ShapedArray(out.shape, out.dtype)

    def _jvp(self, primals, tangents, **params):
        out = self.bind(*primals, **params)
        varying = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
        function = at_positions(lambda full: self.apply(params)(*full), primals, varying)
        point = tuple(primals[i] for i in varying)
        return out, jax.jvp(function, point, tuple(tangents[i] for i in varying))[1]

    def _transpose(self, ct, *operands, **params):
        linear = [i for i, o in enumerate(operands) if ad.is_undefined_primal(o)]
        if isinstance(ct, ad.Zero):
            return [ad.Zero(o.aval) if i in linear else None for i, o in enumerate(operands)]
        function = at_positions(lambda full: self.apply(params)(*full), operands, linear)
        avals = [operands[i].aval for i in linear]
        shapes = [shape_of(a) for a in avals]
        cts = iter(jax.linear_transpose(function, *shapes)(ct))
        return [next(cts) if i in linear else None for i in range(len(operands))]

    def _batch(self, operands, axes, **params):
        axes = tuple(a if isinstance(a, int) else None for a in axes)
        if self.twin is not None and not params.get("mapped"):
            out = self.twin(operands, axes, params)
            if out is not None:
                return out, 0
        mapped = (*params.get("mapped", ()), axes)
        return self.bind(*operands, **{**params, "mapped": mapped}), 0


def at_positions(
    function: Callable[[list[Any]], Any], operands: Sequence[Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """A function of a list of operands as one of the operands at these positions alone."""

    def call(*args):
        full = list(operands)
        for i, a in zip(positions, args, strict=True):
            full[i] = a
        return function(full)

    return call


class Inlined(Primitive):
    """A function in the place of a primitive: where it is applied, it is called."""

    def __init__(self, name: str, function: Callable[..., Array]):
        super().__init__(name)
        self.function = function

    def bind(self, *args: Any, **params: Any) -> Array:
        return self.function(*args)


class Misplaced(Exception):
    """A placeholder stands where nothing can be put in its place."""


class Placeholder(Primitive):
    """Stands in a trace for a computation that is put in later: no derivative, no evaluation.

    The parameter `outs` are the shapes of its results; `mapped` counts the `vmap`s that map each
    operand, None says that none may; `same` are the positions (result, operand) of results that
    are operands.
    """

    multiple_results = True

    def __init__(self, name: str):
        super().__init__(name)
        self.def_abstract_eval(
            lambda *avals, outs, **params: [ShapedArray(o.shape, o.dtype) for o in outs]
        )
        self.def_impl(self._refuse)
        ad.primitive_jvps[self] = self._refuse
        batching.primitive_batchers[self] = self._batch

    def _refuse(self, *args: object, **params: object) -> NoReturn:
        raise Misplaced(f"{self.name} is evaluated, differentiated or mapped.")

    def _batch(self, operands, axes, *, outs, mapped, same, **params):
        if mapped is None:
            self._refuse()
        pairs = list(zip(operands, axes, strict=True))
        (size,) = {a.shape[i] for a, i in pairs if i is not None}
        moved = [jax.numpy.moveaxis(a, i, 0) if i else a for a, i in pairs]
        outs = tuple(jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in outs)
        mapped = tuple(n + (i is not None) for n, (_, i) in zip(mapped, pairs, strict=True))
        results = self.bind(*moved, outs=outs, mapped=mapped, same=same, **params)
        unchanged = {k: (operands[i], axes[i]) for k, i in same}
        return zip(*(unchanged.get(k, (o, 0)) for k, o in enumerate(results)), strict=True)
