"""The JAX internals that programs rest on: every name that a release of JAX may move.

The rest of the library reaches them through this room only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable
from typing import Any
from weakref import ref

import jax
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import source_info_util as source_info_util
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.extend import core as core
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

SourceInfo = source_info_util.SourceInfo
JaxVar = core.Var
new_equation = jax_core.new_jaxpr_eqn
trace_is_running = lambda: not jax_core.trace_state_clean()


def is_traced(value: Any) -> bool:
    """Whether a value belongs to a running trace, so that it may differ from call to call."""
    return isinstance(value, Tracer)


def any_traced(*trees: Any) -> bool:
    """Whether a leaf of these belongs to a running trace."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


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

    # What is held by reference cycles only is not held. Most cycles are young: to look among all
    # objects for who holds the trace, and for all cycles, takes a second in a large program.
    if running() is not None:
        gc.collect(1)
    if running() is None or not tracers():
        return None
    gc.collect()
    left = tracers() if running() is not None else []
    held = {id(t) for t in left}
    for t in left:
        near = [t]
        for _ in range(3):  # its equation, the operands of that, the tracers among these
            near = gc.get_referents(*near)
            held -= {id(o) for o in near if o is not t}
    return next((t for t in left if id(t) in held), None)


def vary_by_device(values: Iterable[Any]) -> bool:
    """Whether a value is known to differ between devices, inside of a checked `shard_map`."""
    for aval in map(jax.typeof, values):
        axes = getattr(aval, "manual_axis_type", None)  # named `vma` before JAX 0.10
        if getattr(aval, "vma", None) if axes is None else axes.varying:
            return True
    return False


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr of a closed jaxpr (newer JAX has one class for both)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def scan_layout(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a `scan`'s operands are constants and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX >= 0.11
    return len(consts), len(carry)


def side_effects(eqn: JaxprEqn) -> frozenset[object]:
    """What applying an equation does besides computing its results; to read a mapped axis is not.

    JAX counts `psum` over an axis with a name as an effect, so that it stays inside of its `vmap`.
    """
    return frozenset(e for e in eqn.effects if not isinstance(e, jax_core.NamedAxisEffect))


def is_jax_primitive(eqn: Any) -> bool:
    """Whether JAX itself has the primitive of an equation."""
    name = f"{eqn.name}_p"
    return hasattr(jax.lax, name) or hasattr(core.primitives, name)
