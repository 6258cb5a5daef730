"""The loss of a step, a function of tensors or of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._errors import CompilationError, NotSupportedError, type_error
from ..program import PyTree
from ._functions import tracing
from ._step import unwrapped, wrapped
from ._tracing import Refused


def of_arrays(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of tensors as one of arrays; one that torch cannot run is a function of JAX."""
    if not callable(loss):
        raise type_error(
            f"the loss has type {type(loss).__name__}.",
            why="it is a function loss(out, *targets), of one step",
            do="pass a function, torch.nn.functional.mse_loss",
        )

    @functools.wraps(loss, updated=())
    def loss_of_arrays(out: PyTree, *targets: PyTree) -> PyTree:
        refused = Refused()
        try:
            with tracing(refused):
                result = loss(wrapped(out), *wrapped(targets))
        except (NotSupportedError, CompilationError):
            raise
        except Exception as of_torch:
            try:
                return loss(out, *targets)
            except Exception as of_jax:
                of_torch.add_note(
                    f"the loss is a function of tensors or of arrays; of arrays it raised "
                    f"{type(of_jax).__name__}: {of_jax}"
                )
                raise of_torch from None
        refused.check()
        return unwrapped(result)

    return loss_of_arrays
