"""The network of the comparison."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ... import nn
from ._cells import CELLS

Array = jax.Array


class Network(brainstate.nn.Module):
    """A cell and a linear read-out."""

    def __init__(self, cell: str, inputs: int, units: int, outputs: int, memory: int):
        super().__init__()
        self.cell = CELLS[cell].make(inputs, units, memory)
        self.readout = nn.Linear(units, outputs)

    def update(self, x: Array) -> Array:
        """Advance one step; returns the outputs."""
        return self.readout(self.cell(x))

    @property
    def weights(self) -> Any:
        """The parameters by path."""
        return self.states(brainstate.ParamState)
