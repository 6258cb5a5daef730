"""Tensors of torch as arrays of JAX and back, in the same memory where both can see it.

All of it runs with 64-bit types of JAX on, since tensors of torch have them: a module of float32
stays one. What JAX makes by itself is on the device of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .._errors import not_supported, type_error, value_error
from ..program import PyTree

Array = jax.Array
_TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_DTYPES = {getattr(torch, name): jnp.dtype(name) for name in _TYPES}


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Types of 64 bits, and new arrays on a device; what torch has begun to write there is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    with jax.enable_x64(True), jax.default_device(_of_jax(device)):
        yield


def _of_jax(device: torch.device) -> jax.Device:
    try:
        return jax.devices(device.type)[device.index or 0]
    except (RuntimeError, IndexError) as cause:
        raise not_supported(
            f"the module is on {device}, and JAX has no such device.",
            why=f"tensors and arrays are the same memory; JAX says: {cause}",
            do="install the JAX of that device, pip install 'jax[cuda13]' for CUDA 13, or move the "
            "module, net.cpu()",
        ) from None


def dtype_of(dtype: torch.dtype) -> Any:
    """The type of JAX."""
    if dtype not in _DTYPES:
        raise type_error(
            f"a tensor has the type {dtype}.",
            why="JAX has no such arrays",
            do=f"use one of {', '.join(_TYPES)}",
        )
    return _DTYPES[dtype]


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor as an array: the same memory, unless it has gaps or begins at an odd place."""
    dtype_of(tensor.dtype)
    if tensor.layout != torch.strided:
        raise type_error(
            f"a tensor has the layout {tensor.layout}.",
            why="an array of JAX is dense",
            do="pass tensor.to_dense()",
        )
    return jax.dlpack.from_dlpack(tensor.detach().resolve_conj().resolve_neg().contiguous())


def copied(tensor: torch.Tensor) -> Array:
    """A tensor as an array of its own."""
    return array_of(tensor.detach().clone(memory_format=torch.contiguous_format))


def constant_of(tensor: torch.Tensor) -> Any:
    """A tensor as a constant of a program, wherever that runs; a number is a part of it."""
    tensor = tensor.detach().cpu()
    if tensor.dim() == 0 and tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor.numpy()[()]
    with jax.ensure_compile_time_eval():
        return jnp.asarray(np.asarray(copied(tensor)))


def arrays_of(tree: PyTree, convert: Callable[[torch.Tensor], Array] = array_of) -> PyTree:
    """A pytree with every tensor as an array."""
    return jax.tree.map(lambda a: convert(a) if isinstance(a, torch.Tensor) else a, tree)


def check_device(tree: PyTree, device: torch.device) -> None:
    """Refuse tensors that are not where the module is."""
    for a in jax.tree.leaves(tree):
        if isinstance(a, torch.Tensor) and a.device != device:
            raise value_error(
                f"a tensor is on {a.device}, the module on {device}.",
                why="a step runs on one device",
                do=f"pass x.to({str(device)!r}), or move the module: net.to({str(a.device)!r})",
            )


def places_of(tree: PyTree) -> set[int]:
    """Where in memory the arrays of a tree begin; spread over devices they have no one place."""
    arrays = (a for a in jax.tree.leaves(tree) if isinstance(a, Array) and a.size)
    return {a.unsafe_buffer_pointer() for a in arrays if len(a.devices()) == 1}


def tensors_of(tree: PyTree, taken: Iterable[int] = ()) -> PyTree:
    """A pytree with every array as a tensor; memory that is `taken`, or given twice, is copied."""
    taken = set(taken)

    def tensor(a: Any) -> Any:
        if not isinstance(a, Array):
            return a
        place = places_of(a)
        result = torch.from_dlpack(a)
        result = result.clone() if place & taken else result
        taken.update(place)
        return result

    return jax.tree.map(tensor, tree)


def shapes_of(tree: PyTree) -> Hashable:
    """The structure of a pytree with shapes and types."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jnp.shape(a), str(jnp.result_type(a))) for a in leaves)


def own(tree: PyTree, taken: set[int]) -> PyTree:
    """A pytree whose arrays are in no memory that is `taken`."""
    return jax.tree.map(lambda a: jnp.array(a, copy=True) if places_of(a) & taken else a, tree)


def moved(tree: PyTree, device: torch.device) -> PyTree:
    """A pytree whose arrays are on a device."""
    place = _of_jax(device)
    return jax.tree.map(lambda a: jax.device_put(a, place) if isinstance(a, Array) else a, tree)
