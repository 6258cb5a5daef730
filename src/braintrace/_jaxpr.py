"""Everything that touches JAX internals: programs, their evaluation, primitives, source lines.

A `Program` is a jaxpr with the calls inlined, in three kinds of record (`Var`, `Const`,
`Equation`) that do not differ between JAX versions. The rest of the library sees only these.
"""

from __future__ import annotations

import gc
import os
import sysconfig
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from traceback import walk_tb
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import source_info_util
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import Var as JaxVar
from jax.interpreters import ad, batching, mlir

Array = jax.Array
SourceInfo = source_info_util.SourceInfo
Pull = Callable[[list[Array]], tuple[Array, ...]]
Params = dict[str, Any]  # the static parameters of an equation
PyTree: TypeAlias = Any  # nested containers of arrays

# Calls that mean nothing beyond the equations inside them.
_INLINED = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CUSTOM_DERIVATIVE = {"custom_jvp_call", "custom_vjp_call"}
# Where a zero is a place that stays empty, not a number that may be another one at the next call.
_KEEPS_ZEROS = {"broadcast_in_dim", "pad", "select_n"}
_MOST_PATTERN = 1 << 20  # elements of a constant whose zeros are looked at


# Primitives whose output element depends on the operands' elements at the same place only.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt
    max min mul name ne neg nextafter not one_minus_square or pcast polygamma polynomial
    population_count pow pvary real reduce_precision rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """.split()
)


# ------------------------------------------------------------------------------------- records


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Var:
    """A value computed by a program; compared by identity."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_inexact(self) -> bool:
        return is_inexact(self.dtype)

    @property
    def is_complex(self) -> bool:
        return jax.dtypes.issubdtype(self.dtype, np.complexfloating)


@dataclass(frozen=True, eq=False, slots=True)
class Const:
    """A literal written into the program."""

    value: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.value)

    @property
    def dtype(self) -> Any:
        return self.value.dtype if hasattr(self.value, "dtype") else jnp.result_type(self.value)


Atom = Var | Const


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One primitive applied to atoms; `bodies` are what a cond, scan or while runs inside."""

    primitive: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    params: Params
    source: SourceInfo
    effects: frozenset[object] = frozenset()
    callers: tuple[SourceInfo, ...] = ()
    bodies: tuple[Body, ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    def where(self) -> str | None:
        """The user's own file and line of this equation, or of the call that it is part of."""
        sources = (self.source, *self.callers)
        lines = (user_line(s, own) for own in (True, False) for s in sources)
        return next((line for line in lines if line), None)


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A straight-line program: `consts` (closed-over arrays) and `inputs` to `outputs`."""

    consts: tuple[Var, ...]
    inputs: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A program inside an equation, with the values of its constants."""

    program: Program
    values: tuple[Any, ...]


def zeros_of(shapes: PyTree, shardings: PyTree = None) -> PyTree:
    """Zeros of many shapes: one program, not one for each of them, and on a CPU none.

    With `shardings` they are made where they will lie.
    """
    leaves, tree = jax.tree.flatten(shapes)
    like = tuple((a.shape, a.dtype) for a in leaves)
    places = None if shardings is None else tuple(jax.tree.leaves(shardings))
    if places is None and jax.default_backend() == "cpu" and jax_core.trace_state_clean():
        return jax.tree.unflatten(tree, jax.device_put([np.zeros(*a) for a in like]))
    return jax.tree.unflatten(tree, _zeros(like, places)())


@lru_cache
def _zeros(shapes: tuple[tuple[tuple[int, ...], Any], ...], shardings: Any) -> Callable[[], Any]:
    make = lambda: [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    return jax.jit(make) if shardings is None else jax.jit(make, out_shardings=list(shardings))


def deep_equations(program: Program) -> Iterator[Equation]:
    """All equations of a program and of the bodies in it, outer ones first."""
    for eqn in program.equations:
        yield eqn
        yield from equations_inside(eqn)


def equations_inside(eqn: Equation) -> Iterator[Equation]:
    """All equations in the bodies of an equation."""
    for body in eqn.bodies:
        yield from deep_equations(body.program)


def producers(program: Program) -> dict[Atom, Equation]:
    """The equation that computes each value; inputs and constants have none."""
    return {o: e for e in program.equations for o in e.outputs}


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an atom, an array or an aval."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def varies_by_device(value: Any) -> bool:
    """Whether a value is known to differ between devices, inside of a checked `shard_map`."""
    aval = jax.typeof(value)
    axes = getattr(aval, "manual_axis_type", None)  # named `vma` before JAX 0.10
    return bool(getattr(aval, "vma", None) if axes is None else axes.varying)


def is_traced(value: Any) -> bool:
    """Whether a value belongs to a running trace, so that it may differ from call to call."""
    return isinstance(value, jax.core.Tracer)


def trace_settings() -> Hashable:
    """The settings of JAX that programs depend on, as they are here: precision, promotion, ..."""
    return jax_config.enable_x64.value, jax_config.trace_context()


def is_of_outer_trace(value: Any) -> bool:
    """Whether a value belongs to a trace around the running one."""
    return is_traced(value) and value._trace is not jax_core.trace_ctx.trace


def trace_of(value: Any) -> Callable[[], Any]:
    """The trace that a tracer belongs to, for as long as something else holds it."""
    return ref(value._trace)


def leaked(running: Callable[[], Any]) -> Any:
    """A tracer that outlived its trace, the last one computed; None if there is none."""

    def tracers() -> list[Any]:
        return [t for t in gc.get_referrers(running()) if is_traced(t)]

    if running() is None or not tracers():
        return None
    gc.collect()  # what is held by reference cycles only is not held
    left = tracers() if running() is not None else []
    held = {id(t) for t in left}
    for t in left:
        near = [t]
        for _ in range(3):  # its equation, the operands of that, the tracers among these
            near = gc.get_referents(*near)
            held -= {id(o) for o in near if o is not t}
    return next((t for t in left if id(t) in held), None)


def is_inexact(dtype: Any) -> bool:
    """Whether values of this type carry a derivative (floating or complex, no PRNG keys)."""
    return jax.dtypes.issubdtype(dtype, np.inexact)


def pattern(value: Any) -> np.ndarray | None:
    """Where a floating constant is not zero; None if everywhere, or if that is by chance.

    The zeros of a matrix are its structure; a single number is zero by chance.
    """
    if is_traced(value) or np.ndim(value) < 2 or np.size(value) > _MOST_PATTERN:
        return None
    nonzero = np.asarray(value) != 0
    return None if nonzero.all() else nonzero


# ------------------------------------------------------------------------------------ tracing


def trace(fun: Callable, *args: Any) -> tuple[Program, tuple[Any, ...]]:
    """Trace `fun` on trees of arrays; returns the program and its closed-over values."""
    return flatten(jax.make_jaxpr(fun)(*args))


def flatten(
    closed: core.ClosedJaxpr, callers: tuple[SourceInfo, ...] = ()
) -> tuple[Program, tuple[Any, ...]]:
    """Inline every call of a closed jaxpr; returns the program and its closed-over values.

    Floating literals count as closed-over values: two traces that differ in them alone are the
    same program, but for the zeros that arrays are filled up with. `callers` are the source lines
    around it.
    """
    flat = _Flattener()
    inputs = tuple(_fresh(v) for v in open_jaxpr(closed).invars)
    outputs = flat.inline(closed, inputs, callers)
    program = Program(tuple(flat.consts), inputs, tuple(flat.equations), outputs)
    return program, tuple(flat.values)


class _Flattener:
    def __init__(self):
        self.consts: list[Var] = []
        self.values: list[Any] = []
        self.equations: list[Equation] = []
        self.zeros: dict[Atom, Const] = {}

    def constant(self, var: Var, value: Any) -> Var:
        self.consts.append(var)
        self.values.append(value)
        return var

    def literal(self, aval: Any, value: Any) -> Atom:
        if not is_inexact(aval.dtype):
            return Const(value)
        array = np.asarray(value, aval.dtype)
        var = self.constant(Var(tuple(aval.shape), aval.dtype), array)
        if not array.any():
            self.zeros[var] = Const(array)
        return var

    def inline(
        self, closed: Any, inputs: Sequence[Atom], callers: tuple[SourceInfo, ...]
    ) -> tuple[Atom, ...]:
        jaxpr = open_jaxpr(closed)
        consts = zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)
        env: dict[Any, Atom] = {v: self.constant(_fresh(v), value) for v, value in consts}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Atom:
            return self.literal(atom.aval, atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(read(a) for a in eqn.invars)
            outer = (eqn.source_info, *callers)
            if eqn.primitive.name in _INLINED:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                env.update(zip(eqn.outvars, self.inline(inner, inputs, outer), strict=True))
            else:
                outputs = tuple(_fresh(v) for v in eqn.outvars)
                env.update(zip(eqn.outvars, outputs, strict=True))
                if eqn.primitive.name in _KEEPS_ZEROS:
                    inputs = tuple(self.zeros.get(a, a) for a in inputs)
                self.equations.append(
                    Equation(
                        eqn.primitive,
                        inputs,
                        outputs,
                        eqn.params,
                        eqn.source_info,
                        frozenset(eqn.effects),
                        callers,
                        tuple(_body(j, outer) for j in _bodies(eqn)),
                    )
                )
        return tuple(read(a) for a in jaxpr.outvars)


def close(program: Program, values: Sequence[Any]) -> Program:
    """The program with the arrays that tracing brought along as its literals."""
    literal: dict[Var, Const] = {v: Const(c) for v, c in zip(program.consts, values, strict=True)}

    def sub(atom: Atom) -> Atom:
        return literal.get(atom, atom) if isinstance(atom, Var) else atom

    equations = tuple(replace(e, inputs=tuple(sub(a) for a in e.inputs)) for e in program.equations)
    return Program((), program.inputs, equations, tuple(sub(o) for o in program.outputs))


def prune(program: Program, outputs: Sequence[Atom] | None = None) -> Program:
    """Drop the equations that the outputs (or other `outputs`) do not need.

    Equations with side effects stay unless other outputs are asked for.
    """
    results = program.outputs if outputs is None else tuple(outputs)
    needed = {o for o in results if isinstance(o, Var)}
    equations: list[Equation] = []
    for eqn in reversed(program.equations):
        if any(o in needed for o in eqn.outputs) or (eqn.effects and outputs is None):
            equations.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    return Program(program.consts, program.inputs, tuple(reversed(equations)), results)


def section(
    program: Program, inputs: Sequence[Var], outputs: Sequence[Atom], fixed: Collection[Var] = ()
) -> Program:
    """The part of a program between some of its variables; what else it reads are its constants.

    What depends on the inputs through `fixed` variables only is constant as well.
    """
    varying = set(inputs)
    equations = []
    for eqn in program.equations:
        varies = any(isinstance(a, Var) and a in varying for a in eqn.inputs)
        if varies and not all(o in fixed for o in eqn.outputs):
            equations.append(eqn)
            varying.update(eqn.outputs)
    part = prune(Program((), tuple(inputs), tuple(equations), ()), outputs)
    read = [a for eqn in part.equations for a in eqn.inputs] + list(outputs)
    consts = dict.fromkeys(a for a in read if isinstance(a, Var) and a not in varying)
    return replace(part, consts=tuple(consts))


def _bodies(eqn: JaxprEqn) -> Sequence[core.ClosedJaxpr]:
    p = eqn.params
    if eqn.primitive.name == "cond":
        return p["branches"]
    if eqn.primitive.name == "scan":
        return (p["jaxpr"],)
    return (p["cond_jaxpr"], p["body_jaxpr"]) if eqn.primitive.name == "while" else ()


def _body(closed: core.ClosedJaxpr, callers: tuple[SourceInfo, ...]) -> Body:
    program, values = flatten(closed, callers)
    return Body(prune(program), values)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr of a closed jaxpr (newer JAX has one class for both)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _fresh(var: Any) -> Var:
    return Var(tuple(var.aval.shape), var.aval.dtype)


def inner_jaxprs(params: Params) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield open_jaxpr(item)


def scan_layout(params: Params) -> tuple[int, int]:
    """How many of a `scan`'s operands are constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX >= 0.11
    return len(consts), len(carry)


def inlined(eqn: Equation) -> tuple[Program, tuple[Any, ...]] | None:
    """The program that an equation stands for where nothing is differentiated, if it is a call."""
    if isinstance(eqn.primitive, DerivedPrimitive):
        return trace(eqn.primitive.apply(eqn.params), *(shape_of(a) for a in eqn.inputs))
    if eqn.name not in _CUSTOM_DERIVATIVE:
        return None
    inner: Any = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return flatten(inner)


def inner_equations(eqn: Equation | JaxprEqn) -> Iterator[JaxprEqn]:
    """All JAX equations nested anywhere inside an equation's parameters."""
    for jaxpr in inner_jaxprs(eqn.params):
        for inner in jaxpr.eqns:
            yield inner
            yield from inner_equations(inner)


def is_jax_primitive(eqn: Equation) -> bool:
    """Whether JAX itself has the primitive of an equation."""
    name = f"{eqn.name}_p"
    return hasattr(jax.lax, name) or hasattr(core.primitives, name)


def cannot_be_mapped(eqn: Equation) -> bool:
    """Whether an equation calls Python in a way that has no `vmap`."""
    calls: list[Any] = [eqn, *inner_equations(eqn)]
    return any(
        e.primitive.name == "pure_callback" and e.params.get("vmap_method") is None for e in calls
    )


def fingerprint(program: Program, consts: Sequence[Any], *, values: bool = False) -> tuple:
    """What an analysis of the program may depend on, hashable.

    Floating values are left out unless `values` is set, but for the `pattern` of their zeros (an
    analysis reads nothing else); integers count, since indices decide which element is read. A
    primitive counts as an object: a name may be registered again for another function.
    """
    number: dict[Var, int] = {}

    def name(atom: Atom) -> Hashable:
        return _value_key(atom.value, True) if isinstance(atom, Const) else number[atom]

    def declare(var: Var) -> tuple:
        return (number.setdefault(var, len(number)), var.shape, str(var.dtype))

    heads = tuple(declare(v) for v in (*program.consts, *program.inputs))
    body = tuple(
        (
            e.primitive,
            tuple(name(a) for a in e.inputs),
            tuple(declare(v) for v in e.outputs),
            _params_key(e, derivatives=not values),
        )
        for e in program.equations
    )
    constants = tuple(_value_key(c, values) for c in consts)
    return heads, body, tuple(name(o) for o in program.outputs), constants


def _value_key(value: Any, exact: bool) -> Hashable:
    dtype = Const(value).dtype
    traced = is_traced(value)
    if traced and exact:
        return object()  # belongs to a running trace: equal to nothing met later
    if traced or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return ("traced" if traced else "key", np.shape(value), str(dtype))
    if is_inexact(dtype) and not exact:
        nonzero = pattern(value)
        zeros = None if nonzero is None else np.packbits(nonzero).tobytes()
        return ("value", np.shape(value), str(dtype), zeros)
    array = np.asarray(value)
    return (array.shape, str(array.dtype), array.tobytes())


# Parameters that are new objects in every trace; `_derivative_key` stands for what they compute.
_THUNKS = {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"}


def _params_key(eqn: Equation, derivatives: bool) -> Hashable:
    plain = tuple((k, _param_key(v)) for k, v in sorted(eqn.params.items()) if k not in _THUNKS)
    names = [eqn.name, *(e.primitive.name for e in inner_equations(eqn))]
    custom = derivatives and any(n in _CUSTOM_DERIVATIVE for n in names)
    return (plain, _derivative_key(eqn)) if custom else plain


def _param_key(value: Any) -> Hashable:
    if hasattr(open_jaxpr(value), "eqns"):
        return fingerprint(*flatten(value), values=True)
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v) for v in value)
    if isinstance(value, np.ndarray):
        return _value_key(value, True)
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _derivative_key(eqn: Equation) -> tuple:
    """A custom derivative is a Python function: recognise it by what it computes."""
    point = [shape_of(a) for a in eqn.inputs]
    inexact = [i for i, p in enumerate(point) if is_inexact(p.dtype)]

    def pushed(values, tangents):
        function = at_positions(lambda full: bind_forward(eqn, full), values, inexact)
        along = jax.jvp(function, tuple(values[i] for i in inexact), tangents)
        if eqn.name != "custom_vjp_call":
            return along
        return along, pulled_zeros(eqn, pullback(eqn, values)[1])

    program, consts = trace(pushed, point, tuple(point[i] for i in inexact))
    return fingerprint(program, consts, values=True)


# --------------------------------------------------------------------------------- JAX's jaxprs

_variables: WeakKeyDictionary[Var, JaxVar] = WeakKeyDictionary()


def variable(var: Var) -> JaxVar:
    """The JAX variable that stands for a variable of a program: always the same one."""
    if var not in _variables:
        _variables[var] = JaxVar(jax.core.ShapedArray(var.shape, var.dtype))
    return _variables[var]


def jaxpr_of(program: Program) -> Jaxpr:
    """A program as a jaxpr of JAX, over `variable`s."""
    blank = open_jaxpr(jax.make_jaxpr(lambda: ())())
    consts = [variable(v) for v in program.consts]
    equations = [equation_of(eqn) for eqn in program.equations]
    # JAX >= 0.11 takes as constants only what has a value: shapes stand for them.
    held = {"consts": [v.aval for v in consts]} if hasattr(blank, "consts") else {}
    return blank.replace(
        constvars=consts,
        invars=[variable(v) for v in program.inputs],
        outvars=[operand_of(o) for o in program.outputs],
        eqns=equations,
        effects={e for eqn in equations for e in eqn.effects},
        **held,
    )


def closed_jaxpr_of(program: Program, consts: Sequence[Any]) -> core.ClosedJaxpr:
    """A program and the values of its constants as a closed jaxpr of JAX."""
    return core.ClosedJaxpr(jaxpr_of(program), consts)


def equation_of(eqn: Equation) -> JaxprEqn:
    """An equation as one of JAX, over `variable`s."""
    inputs, outputs = [operand_of(a) for a in eqn.inputs], [variable(v) for v in eqn.outputs]
    return jax_core.new_jaxpr_eqn(
        inputs, outputs, eqn.primitive, eqn.params, set(eqn.effects), eqn.source
    )


def operand_of(atom: Atom) -> JaxVar | Literal:
    """The JAX variable or literal that stands for an atom."""
    if isinstance(atom, Var):
        return variable(atom)
    return Literal(atom.value, jax.core.ShapedArray(atom.shape, atom.dtype))


# --------------------------------------------------------------------------------- evaluation


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


# ------------------------------------------------------------------------------------- origins

_MARK = "braintrace:"


def marked(eqn: Equation, number: int) -> Equation:
    """An equation that leaves a number on whatever is traced while it is applied."""
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


# -------------------------------------------------------------------------------- source lines

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_PYTHON = (*(sysconfig.get_path(k) + os.sep for k in ("stdlib", "scripts")), "<frozen")
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = [os.path.dirname(os.path.abspath(__file__)) + os.sep, _JAX]


def hide_frames_of(module: Any) -> None:
    """Never name a line inside this package as the user's own line."""
    folder = os.path.dirname(os.path.abspath(module.__file__)) + os.sep
    if folder not in _OWN_FOLDERS:
        _OWN_FOLDERS.append(folder)


def user_line(source: SourceInfo | None, own: bool = False) -> str | None:
    """`file:line (function)` of the innermost frame that belongs to the user.

    If there is none, that of the innermost package outside of JAX; with `own` there is no line.
    """
    if source is None or source.traceback is None:
        return None
    frames = source_info_util.user_frames(source.traceback)
    return _first_of_user(((f.file_name, f.start_line, f.function_name) for f in frames), own)


def line_of(value: Any) -> str | None:
    """`file:line (function)` of the user where a function begins, or a tracer was computed."""
    if is_traced(value):
        return user_line(value._line_info)
    code = getattr(value, "__code__", None)
    lines = () if code is None else [(code.co_filename, code.co_firstlineno, code.co_name)]
    return _first_of_user(lines)


def failing_line(error: BaseException) -> str | None:
    """`file:line (function)` of the innermost frame of an error that belongs to the user."""
    frames = [(f.f_code, line) for f, line in walk_tb(error.__traceback__)]
    return _first_of_user((c.co_filename, line, c.co_name) for c, line in reversed(frames))


def made_by_cond(eqn: Equation) -> bool:
    """Whether an equation is JAX's own translation of a `cond`, not of a function inside of it."""
    traceback: Any = eqn.source.traceback
    for frame in traceback.frames if traceback is not None else ():  # innermost first
        if not frame.file_name.startswith(_JAX):
            return False
        if os.path.basename(frame.file_name) == "conditionals.py":
            return True
    return False


def _first_of_user(frames: Iterable[tuple[str, int, str]], own: bool = False) -> str | None:
    """The innermost frame outside installed packages; if all are inside, that outside of JAX."""
    outside = [f for f in frames if not f[0].startswith(tuple(_OWN_FOLDERS))]
    installed = lambda file: file.startswith(_PYTHON) or _INSTALLED & {*file.split(os.sep)}
    users = [f for f in outside if not installed(f[0])]
    for name, line, function in users or ([] if own else outside):
        # Relative to the working folder if it is below it, as editors and terminals open it.
        return f"{name.removeprefix(os.path.join(os.getcwd(), ''))}:{line} ({function})"
    return None


# ---------------------------------------------------------------------------------- primitives


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
        return jax.core.ShapedArray(out.shape, out.dtype)

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
            lambda *avals, outs, **params: [jax.core.ShapedArray(o.shape, o.dtype) for o in outs]
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
