"""Loops over time: one kernel where body and device allow, else a `lax.scan`, and the run says why.

A step of `lax.scan` costs a GPU tens of microseconds, whatever it computes; a kernel (`kernel/`)
goes through all steps with values that stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax
from jax import lax

from .._errors import value_error
from ..kernel import Refused, loop_kernel
from ..ops import on_mesh
from ..program import PyTree
from ._placement import UNITS, Placement


class Engine(Enum):
    """What runs loops over time: a kernel where body and device allow, or always `lax.scan`.

    KERNEL takes the kernel on every device, interpreted where it cannot be compiled.
    """

    AUTO = "auto"
    SCAN = "scan"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class TimeLoop:
    """A loop over time: its steps, and why it is not one kernel; None if it is."""

    steps: int
    reason: str | None = None


@dataclass(slots=True)
class _Running:
    engine: Engine = Engine.AUTO
    placement: Placement | None = None
    loops: list[TimeLoop] = field(default_factory=list)


_running: ContextVar[_Running | None] = ContextVar("loops over time", default=None)


def check_engine(engine: str) -> Engine:
    """The engine of this name."""
    names = [e.value for e in Engine]
    if engine not in names:
        raise value_error(
            f"engine={engine!r}.",
            why="a loop over time is a kernel where that is possible ('auto'), or a lax.scan",
            do=f"choose one of {', '.join(map(repr, names))}",
        )
    return Engine(engine)


def recorded(function: Callable, engine: Engine, placement: Placement | None = None) -> Callable:
    """`function` with loops over time by `engine`; its attribute `loops` are those of its trace.

    With a `placement`, its blocks leave states and traces there.
    """

    def run(*args: Any) -> Any:
        now = _Running(engine, placement)
        with _set(now):
            out = function(*args)
        traced.loops = tuple(now.loops)
        return out

    traced: Any = run
    traced.loops = ()
    return run


@contextmanager
def _set(now: _Running | None) -> Iterator[None]:
    token = _running.set(now)
    try:
        place = None if now is None else now.placement
        with on_mesh(0 if place is None else place.shards(UNITS)):
            yield
    finally:
        _running.reset(token)


def running_placement() -> Placement | None:
    """Where the function that is being traced leaves its arrays."""
    now = _running.get()
    return None if now is None else now.placement


def as_running(function: Callable) -> Callable:
    """A function that is called later, with the engine of now."""
    now = _running.get()

    def call(*args: Any) -> Any:
        with _set(now):
            return function(*args)

    return call


def scan_time(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: PyTree,
    xs: PyTree,
    length: int,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`lax.scan`, as kernels where it can be; a single step is written out.

    Nothing is differentiated through it.
    """
    if length == 1:
        carry, out = body(carry, jax.tree.map(lambda a: a[0], xs))
        return carry, jax.tree.map(lambda a: a[None], out)
    how = _running.get() or _Running()
    plain = lambda carry, xs: lax.scan(body, carry, xs, length, reverse=reverse, unroll=unroll)
    device = jax.default_backend()
    kernel, reason = None, _refusal(how.engine, device)
    if reason is None:
        try:
            kernel = loop_kernel(body, carry, xs, length, reverse)
        except Refused as refused:
            reason = str(refused)
    how.loops.append(TimeLoop(length, reason))
    if kernel is None:
        return plain(carry, xs)
    interpreted = lambda *arrays: kernel(True, *arrays)
    if device != "gpu":
        return interpreted(carry, xs)
    other = plain if how.engine is Engine.AUTO else interpreted
    return lax.platform_dependent(carry, xs, cuda=lambda *a: kernel(False, *a), default=other)


def kernels_allowed() -> bool:
    """Whether loops over time may be kernels: what they compute is then better done inside."""
    return _refusal((_running.get() or _Running()).engine, jax.default_backend()) is None


def _refusal(engine: Engine, device: str) -> str | None:
    """Why no loop is to be a kernel."""
    if engine is Engine.SCAN:
        return "engine='scan'"
    if engine is Engine.KERNEL:
        return None
    if device != "gpu":
        return f"the device is a {device.upper()}"
    if "rocm" in jax.devices()[0].client.platform_version:
        return "the GPU does not run CUDA"
    # The compiler cannot split a kernel over devices, and would collect its operands on each.
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "there are several devices, and no shard_map"
    return None
