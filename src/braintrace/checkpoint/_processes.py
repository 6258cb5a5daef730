"""Arrays whose parts are with several processes of `jax.distributed`, and one file for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._errors import error


@contextlib.contextmanager
def together(path: str | os.PathLike) -> Iterator[None]:
    """Say what is left if another process ends while all of them work on a file."""
    try:
        yield
    except jax.errors.JaxRuntimeError as cause:
        if jax.process_count() == 1:
            raise
        raise error(OSError)(
            f"process {jax.process_index()} of {jax.process_count()} has lost another one.",
            where=f"while {os.fspath(path)} was saved",
            why=f"it has ended, or cannot be reached: {str(cause).splitlines()[0][:300]}",
            do="the file of before is whole, if there was one: start all processes again, and "
            "learner.load(path)",
        ) from cause


def fetched(array: Any) -> Any:
    """All of an array; if parts are with other processes, each of them must ask for it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array) if isinstance(array, np.generic) else array
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def placed(array: Any, like: jax.Array) -> jax.Array:
    """An array on the devices that `like` is on; a process makes its own parts only."""
    sharding = like.sharding
    if isinstance(array, jax.Array):
        return array if array.sharding == sharding else jax.device_put(array, sharding)
    if len(sharding.device_set) == 1:
        new = jnp.array(array)
        return new if new.sharding == sharding else jax.device_put(new, sharding)
    part = lambda index: np.array(array[index])  # a copy: the memory of an array may be reused
    return jax.make_array_from_callback(array.shape, sharding, part)


def write_once(path: str | os.PathLike, write: Callable[[], None]) -> None:
    """Let process 0 write; the others wait until the file is there, and fail if it is not."""
    if jax.process_count() == 1:
        return write()
    failure: BaseException | None = None
    if jax.process_index() == 0:
        try:
            write()
        except BaseException as raised:  # raised below, when the others know
            failure = raised
    failed = multihost_utils.broadcast_one_to_all(np.asarray(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise error(OSError)(
            f"{os.fspath(path)} was not saved.",
            why="process 0, which writes for all processes, has failed",
            do="see the error of process 0",
        )
