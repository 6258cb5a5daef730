"""Programs applied to values, with their derivatives and the user's lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ._jax import source_info_util
from ._lines import user_line
from ._primitives import DerivedPrimitive, at_positions
from ._records import Array, Atom, Const, Equation, Program, Var, is_inexact

Pull = Callable[[list[Array]], tuple[Array, ...]]


def bind(eqn: Equation, values: Sequence[Any], cached: bool = False) -> list[Any]:
    """Apply an equation to values (concrete or traced); returns the list of its outputs.

    `cached`: what is traced is used by later calls, so it must not close over values of the traces
    around it.
    """
    primitive = eqn.primitive
    bound = primitive.get_bind_params(eqn.params)
    subfuns, params = ((), bound) if isinstance(bound, dict) else bound  # JAX >= 0.9: one dict
    here = isinstance(primitive, DerivedPrimitive) and not cached
    call = primitive.call if here else primitive.bind
    with at_line_of(eqn):
        out = call(*subfuns, *values, **params)
    return list(out) if primitive.multiple_results else [out]


def at_line_of(eqn: Equation) -> AbstractContextManager[None]:
    """A context in which what is traced has the user's line of this equation."""
    source = eqn.source
    if eqn.callers and user_line(source) is None:
        source = next((c for c in eqn.callers if user_line(c)), source)
    return source_info_util.user_context(source.traceback, name_stack=eqn.source.name_stack)


def evaluate(
    program: Program,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    apply: Callable[[Equation, list[Any]], list[Any]] = bind,
) -> list[Any]:
    """Run a program; `apply` may replace what an equation does."""
    env: dict[Var, Any] = dict(zip(program.consts, consts, strict=True))
    env.update(zip(program.inputs, inputs, strict=True))

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Const) else env[atom]

    for eqn in program.equations:
        env.update(zip(eqn.outputs, apply(eqn, [read(a) for a in eqn.inputs]), strict=True))
    return [read(o) for o in program.outputs]


def bind_forward(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Like `bind`, but a custom reverse rule can also be differentiated forward.

    A `custom_vjp` gives only ct_in = B(ct_out). B is linear, so the tangent it stands for is its
    transpose, out_t = B^T(in_t).
    """
    if eqn.name != "custom_vjp_call":
        return bind(eqn, values)

    @jax.custom_jvp
    def call(*args):
        return bind(eqn, args)

    @call.defjvp
    def _(primals, tangents):
        varying = [i for i, t in enumerate(tangents) if t.dtype != jax.dtypes.float0]
        function = at_positions(lambda full: bind(eqn, full), primals, varying)
        out, pullback = jax.vjp(function, *(primals[i] for i in varying))
        push = jax.linear_transpose(lambda ct: pullback(ct), out)
        return out, push(tuple(tangents[i] for i in varying))[0]

    return call(*values)


def pullback(eqn: Equation, values: Sequence[Any]) -> tuple[list[Any], Pull]:
    """The results of an equation, and its reverse rule between inexact outputs and inputs."""

    def call(full):
        outs = bind(eqn, full)
        return [o for o, v in zip(outs, eqn.outputs, strict=True) if v.is_inexact], outs

    inexact = [i for i, a in enumerate(eqn.inputs) if is_inexact(a.dtype)]
    function = at_positions(call, values, inexact)
    _, pull, outs = jax.vjp(function, *(values[i] for i in inexact), has_aux=True)
    return outs, pull


def pulled_zeros(eqn: Equation, pull: Pull) -> tuple[Array, ...]:
    """The result of a reverse rule for a cotangent of zero: what it adds to any other."""
    return pull([jnp.zeros(o.shape, o.dtype) for o in eqn.outputs if o.is_inexact])


_MARK = "braintrace:"


def marked(eqn: Equation, number: int) -> Equation:
    """An equation that leaves a number on whatever is traced while it is applied."""
    # JAX carries the stack of names from an equation to those of its derivative: `mul` of equation
    # 7 leaves "braintrace:7" on the two products of its tangent, and "braintrace:7/..." in bodies.
    stack = source_info_util.new_name_stack(f"{_MARK}{number}")
    return replace(eqn, source=eqn.source.replace(name_stack=stack))


def unmarked(eqn: Equation, equations: Sequence[Equation]) -> tuple[Equation, Equation | None]:
    """An equation without its mark, and which of the numbered equations left it."""
    stacks = [str(s.name_stack) for s in (eqn.source, *eqn.callers)]
    mark = next((s.removeprefix(_MARK) for s in stacks if s.startswith(_MARK)), None)
    if mark is None:
        return eqn, None
    origin = equations[int(mark.split("/")[0])]
    return replace(eqn, source=eqn.source.replace(name_stack=origin.source.name_stack)), origin
