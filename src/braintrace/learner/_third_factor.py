"""Learners of rules whose signal comes with the call: a modulator, a target, a local loss."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from ..graph import HiddenGroup
from ..rules import MEMORY_LIMIT, LearningRule, local_loss_of
from ._presets import ParamDimVjpAlgorithm, SnAp

Array = jax.Array


class ThreeFactor(
    ParamDimVjpAlgorithm,
    rule="three_factor",
    arguments="name vjp_method modulator fast_solve trace_dtype chunked_trace control_flow config "
    "snap_max_jacobian_elements",
    attributes="modulator fast_solve trace_dtype chunked_trace",
):
    """Traces per weight times a modulator that the caller gives: `learner(x, modulator=m)`.

    The modulator takes the place of the derivative of the loss by the states. It is a number, an
    array of a group's `varshape` or (*varshape, num_state), one number per sample (leading axes of
    `varshape`) or per unit (trailing ones), or a dict of these by the index of the group.
    Parameters without a trace keep the gradient of the loss. Windows are refused.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(cell, 'three_factor', jnp.zeros(3))
        >>> step = lambda x, reward: learner(x, modulator=reward).sum()
        >>> grads = learner.etrace_grad(jnp.ones((5, 3)), jnp.arange(5.), step_fn=step)
        >>> grads['Wz', 'weight']['weight'].shape
        (7, 4)
    """

    signals = ("modulatory",)

    def _extra(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if kwargs.get("modulator") is None and self.modulator is not None:
            kwargs = {**kwargs, "modulator": self.modulator}
        return super()._extra(kwargs)


class OSTTP(
    SnAp,
    rule="osttp",
    arguments="B_list target_timing name vjp_method fast_solve snap_max_jacobian_elements "
    "trace_dtype memory_limit chunked_trace control_flow",
    attributes="target_timing fast_solve trace_dtype chunked_trace",
    snap_max_jacobian_elements=1 << 24,
    memory_limit=MEMORY_LIMIT,
):
    """Online spatio-temporal learning with targets projected to every layer.

    `learner(x, y_target=y)`: the signal of a group is `y @ B` of its matrix, at each of its state
    variables; the traces are those of `OSTLRecurrent`. Windows are refused.
    """

    n = 1

    def _set_up(
        self, model: brainstate.nn.Module, rule: LearningRule, arguments: dict[str, Any]
    ) -> None:
        self.B_list = list(rule.values["B_list"])
        super()._set_up(model, rule, arguments)

    def _unnamed(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = super()._unnamed(args, kwargs)
        if self.is_compiled and len(args) == len(self._example[0]) + 1 and "y_target" not in kwargs:
            args, kwargs = args[:-1], {**kwargs, "y_target": args[-1]}
        return args, kwargs

    def signal_values(self) -> dict[str, Any]:
        """The matrices."""
        return {"B_list": list(self.B_list)}


class DECOLLE(
    ParamDimVjpAlgorithm,
    rule="decolle",
    arguments="n_target key readouts local_loss observe name vjp_method trace_dtype config",
    attributes="fast_solve trace_dtype chunked_trace",
):
    """Deep continuous local learning: every group has a loss of its own, of a fixed read-out.

    `learner(x, y_target=y)`: the signal of a group is the gradient of
    `local_loss(observe(h) @ R, y)` by its states, with `R` random and fixed. Parameters without a
    trace (the read-out that is used in the end) keep the gradient of the loss. Windows are refused.
    """

    signals = ("local_loss",)

    def _set_up(
        self, model: brainstate.nn.Module, rule: LearningRule, arguments: dict[str, Any]
    ) -> None:
        readouts = rule.values.get("readouts")
        self.readouts = None if readouts is None else list(readouts)
        names = ("n_target", "key", "local_loss", "observe")
        local = self._local = local_loss_of(*(rule.options[k] for k in names))
        self.n_target, self.key = local.n_target, local.key
        self.local_loss, self.observe = local.loss, local.observe
        super()._set_up(model, rule, arguments)

    def signal_values(self) -> dict[str, Any]:
        """The read-outs, where they were given."""
        return {} if self.readouts is None else {"readouts": list(self.readouts)}

    def readout(self, group: HiddenGroup) -> Array:
        """The fixed read-out of a group, (units, n_target)."""
        return self._local.readout(group) if self.readouts is None else self.readouts[group.index]
