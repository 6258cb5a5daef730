"""What users pass to a learner, checked."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from .._errors import not_supported, type_error, value_error
from ..program import PyTree
from ._arrays import Array
from ._module import Contents

_NUMBERS = (torch.Tensor, Array, np.ndarray, np.generic, bool, int, float, complex)


def check_ends(tree: PyTree) -> None:
    """Refuse what is no tensor, or has a gradient of its own, which would stop here and be none."""
    for a in jax.tree.leaves(tree):
        if not isinstance(a, _NUMBERS):
            raise type_error(
                f"a state or an input has a part of type {type(a).__name__}.",
                why="they are tensors in tuples, lists, dicts and named tuples",
                do="pass such; a dataclass is one after jax.tree_util.register_dataclass(it)",
            )
        learns = isinstance(a, nn.Parameter) and a.requires_grad
        if isinstance(a, torch.Tensor) and (a.grad_fn is not None or learns):
            raise value_error(
                "a tensor that is passed to the learner was computed with a gradient."
                if a.grad_fn is not None
                else "a parameter is passed to the learner as an input or a state.",
                why="the learner has the gradient of the parameters of its module; at inputs, "
                "targets and the initial state it ends, and nothing before them would learn",
                do="make what computes it a part of the module; or pass x.detach()",
            )


def check_optimizer(optimizer: Any, contents: Contents) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise type_error(
            f"optimizer has type {type(optimizer).__name__}.",
            why="it changes the parameters of the module, by their p.grad",
            do="pass one of torch.optim, torch.optim.Adam(net.parameters())",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise not_supported(
            "LBFGS cannot train step by step.",
            why="it evaluates the losses of the same steps many times for one update",
            do="pass torch.optim.Adam or another that takes one gradient",
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held.intersection(map(id, contents.trained.values())):
        raise value_error(
            "the optimizer has no parameter of the module.",
            why="it would change nothing that is learned",
            do="make it of the same module, torch.optim.Adam(net.parameters())",
        )
