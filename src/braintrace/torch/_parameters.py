"""Parameters of a module as arrays, and their gradients."""

from __future__ import annotations

from collections.abc import Container, Hashable

import torch
from torch import nn

from .._online import Untrained
from ._arrays import Array, array_of, dtype_of, places_of
from ._module import Contents
from ._step import Weights


class Parameters:
    """The parameters of a module as arrays in the same memory."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self.arrays: dict[str, Array] = {}

    def array(self, name: str, p: nn.Parameter) -> Array:
        """The one of the last call, if that is the memory of the parameter still."""
        last = self.arrays.get(name)
        if last is None or not _is_at(last, p):
            last = self.arrays[name] = array_of(p)
        return last

    def weights(self, mode: Hashable) -> Weights:
        """All of them, in this mode."""
        arrays = lambda named: {name: self.array(name, p) for name, p in named.items()}
        frozen = Untrained(arrays(self.contents.frozen))
        return Weights(arrays(self.contents.trained), frozen, mode)

    def add(self, grads: dict[str, torch.Tensor], unused: Container[str]) -> None:
        """Add to their gradients, with the hooks that they have, as `backward` does.

        Those of parameters that a step does not use stay None, so that an optimizer leaves these.
        """
        used = {name: p for name, p in self.contents.trained.items() if name not in unused}
        for name, p in used.items():
            grad = grads[name].to(p.device)
            grad = grad.conj().resolve_conj() if grad.is_complex() else grad  # as torch defines it
            for hook in (p._backward_hooks or {}).values():
                changed = hook(grad)
                grad = grad if changed is None else changed
            p.grad = grad if p.grad is None else p.grad.add_(grad)
            for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(p)


def _is_at(array: Array, p: nn.Parameter) -> bool:
    """Whether an array is the memory of a parameter."""
    same = (array.shape, array.dtype) == (tuple(p.shape), dtype_of(p.dtype))
    return same and p.is_contiguous() and places_of(array) == {p.data_ptr()}
