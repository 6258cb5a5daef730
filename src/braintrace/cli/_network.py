"""The network that all commands train: a cell and a linear read-out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import brainstate
import jax

from .. import nn
from ._cells import CELLS, MakeCell
from .tasks import Task

Path = tuple[str, ...]
Weights = dict[Path, Any]  # pytrees of arrays


class Network(brainstate.nn.Module):
    """A cell for the length of a task, and a linear read-out; the seed is that of the weights."""

    def __init__(self, cell: str | MakeCell, task: Task, units: int, seed: int):
        super().__init__()
        make = CELLS[cell] if isinstance(cell, str) else cell
        with brainstate.random.seed_context(seed):
            self.cell = make(task.inputs, units, task.length)
            self.readout = nn.Linear(units, task.outputs)

    def update(self, x: jax.Array) -> jax.Array:
        return self.readout(self.cell(x))

    @property
    def parameters(self) -> Mapping[Path, brainstate.State]:
        """The states of the weights by path."""
        return self.states(brainstate.ParamState)

    @property
    def weights(self) -> Weights:
        """The weights by path."""
        return {path: state.value for path, state in self.parameters.items()}

    @weights.setter
    def weights(self, weights: Weights) -> None:
        for path, state in self.parameters.items():
            state.value = weights[path]
