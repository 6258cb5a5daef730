"""`braintrace.torch.choose`: the rule of each parameter of a module, by measuring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from torch import nn

from .. import _online
from .._online import Choice
from ..program import PyTree
from ._learner import online
from ._loss import of_arrays


def choose(
    net: nn.Module,
    state: PyTree,
    xs: PyTree,
    ys: PyTree,
    loss: Callable[..., Any],
    **limits: Any,
) -> Choice:
    """The rule for each parameter of a module whose gradient is closest to BPTT's, within limits.

    Args:
        net: as for `online`.
        state: the state before the first step, None for a module that keeps its state inside.
        xs: the inputs of all steps, with a leading axis of time; a tuple if there are several.
        ys: the targets, likewise.
        loss: `loss(out, *targets)`, of one step, a function of torch or of JAX.
        **limits: `memory`, `time`, `stream`, `progress`, as for `braintrace.choose`.

    Returns:
        The choice: `rule`, to be passed to `online`, and the table of what was tried.
    """
    first = jax.tree.map(lambda a: a[0], xs if type(xs) is tuple else (xs,))
    learner = online(net, "no_trace", state, *first)
    with learner._on():
        weights, begin = learner._weights(), learner._carry.state
        xs, ys = learner._arrays((xs, ys))
        step = learner._step
        return _online.choose(step, weights, begin, xs, ys, of_arrays(loss), **limits)
