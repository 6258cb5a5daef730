"""What `compile` takes besides rules: names of classes, coordinates, and `vmap=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import numpy as np

from .._errors import not_supported, value_error
from ..learner import Learner, MultiStepData, SingleStepData
from ..program import PyTree
from ..rules import BY_NAME, ETraceConfig
from . import _presets
from ._dni import DNI

RULES: dict[str, type[Learner]] = {
    name: DNI if row.learner == "DNI" else getattr(_presets, row.learner)
    for name, row in BY_NAME.items()
    if row.learner is not None
}


def class_of(config: ETraceConfig) -> type[Learner]:
    """The learner class for a rule with these coordinates."""
    by_signal = {
        "modulatory": _presets.ThreeFactor,
        "target_projection": _presets.OSTTP,
        "local_loss": _presets.DECOLLE,
        "bootstrapped": DNI,
    }
    by_trace = {
        "per_param": _presets.ParamDimVjpAlgorithm,
        "io_factorized": _presets.IODimVjpAlgorithm,
        "random_projection": _presets.UORO,
        "kronecker": _presets.KFRTRL,
        "everything": _presets.RTRL,
        "paired": _presets.STLLR,
        "none": _presets.NoTrace,
    }
    return by_signal.get(config.learning_signal, by_trace[config.trace_factorization])


def options_of(config: ETraceConfig) -> dict[str, PyTree]:
    """The arguments of that class."""
    kind = config.trace_factorization
    if kind == "paired":
        assert config.alphas is not None
        pre, post = config.alphas
        leaks = {"leak_pre": config.decay_x, "leak_post": config.decay_f}
        return {**leaks, "alpha_pre": pre, "alpha_post": post}
    fixed = config.learning_signal in ("target_projection", "bootstrapped")
    return {} if kind not in ("per_param", "io_factorized") or fixed else {"config": config}


class ETraceVmap(brainstate.nn.Module):
    """A learner of a model that is mapped over samples; `module` is that learner.

    It has all of the learner's methods; axis 0 of all inputs counts the samples.
    """

    def __init__(self, learner: Learner):
        super().__init__()
        self.module = learner

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self.module.samples} samples of\n{self.module!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ETraceVmap:
        return ETraceVmap(copy.deepcopy(self.module, memo))

    def __copy__(self) -> ETraceVmap:
        return ETraceVmap(self.module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def update(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """One step of every sample."""
        return self.module(*args, **kwargs)

    def reset(self) -> None:
        """Reset the model's states and the traces of every sample: do this between sequences.

        Initial states drawn at random are drawn once and shared by all samples.
        """
        self.module.reset()


def mapped(
    new_learner: Callable[[], Learner],
    model: brainstate.nn.Module,
    inputs: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree] | None,
    batch_size: int | None,
) -> ETraceVmap:
    """The learner of a model that is mapped over samples."""
    if kwargs:
        raise not_supported(
            f"vmap=True with the keyword arguments {', '.join(kwargs)}.",
            why="a mapped learner maps its inputs by position",
            do="pass them by position, or use batch_size without vmap",
        )
    if batch_size is None:
        raise value_error(
            "vmap=True without batch_size.",
            why="the states of every sample are allocated at compile time",
            do="pass batch_size=<number of samples>",
        )
    bare = [i.data if isinstance(i, SingleStepData | MultiStepData) else i for i in inputs]
    _check_samples(bare, batch_size)
    learner = new_learner()

    @brainstate.transform.vmap_new_states(state_tag="new", axis_size=batch_size)
    def new_states():
        brainstate.nn.init_all_states(model)

    new_states()
    learner.map_over(batch_size)
    learner.compile_graph(*bare)
    return ETraceVmap(learner)


def _check_samples(inputs: PyTree, n_samples: int) -> None:
    for leaf in jax.tree.leaves(inputs):
        if np.shape(leaf)[:1] != (n_samples,):
            raise value_error(
                f"an input has shape {np.shape(leaf)}, the learner maps {n_samples} samples.",
                why="axis 0 of every input counts the samples (vmap=True)",
                do="put the batch on axis 0, or compile again for another batch size",
            )
