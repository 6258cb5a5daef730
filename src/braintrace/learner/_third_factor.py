"""Rules whose signal comes with the call: a modulator, a projected target, a local loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import message
from ..graph import MOST_ENTRIES, ControlFlowPolicy, HiddenGroup
from ..rules import (
    NO_DERIVATIVE,
    OWN_LOSS,
    ETraceConfig,
    check_given,
    check_matrices,
    check_modulator,
    check_readouts,
    check_timing,
    local_loss_of,
    modulator_of,
    projected_target,
)
from ._presets import ParamDimVjpAlgorithm, SnAp

Array = jax.Array


class ThreeFactor(ParamDimVjpAlgorithm):
    """Traces per weight times a modulator that the caller gives: `learner(x, modulator=m)`.

    The modulator takes the place of the derivative of the loss by the states. It is a number, an
    array of a group's `varshape` or (*varshape, num_state), one number per sample (leading axes of
    `varshape`) or per unit (trailing ones), or a dict of these by the index of the group.
    Parameters without a trace keep the gradient of the loss.

    Args:
        model: the network, one step in `update`, states initialised.
        name: name of the learner.
        vjp_method: 'single-step'; windows are refused.
        modulator: what is used when a call gives none.
        fast_solve: accepted; there is one path.
        trace_dtype: storage type of the traces.
        chunked_trace: accepted; there is one path.
        control_flow: which control flow around operators stays closed, none by default.
        config: other coordinates of the traces, with the signal 'modulatory'.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(cell, 'three_factor', jnp.zeros(3))
        >>> step = lambda x, reward: learner(x, modulator=reward).sum()
        >>> grads = learner.etrace_grad(jnp.ones((5, 3)), jnp.arange(5.), step_fn=step)
        >>> grads['Wz', 'weight']['weight'].shape
        (7, 4)
    """

    __module__ = "braintrace"
    takes = ("modulator",)
    signals = ("modulatory",)
    windows = NO_DERIVATIVE

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "single-step",
        modulator: Any = None,
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
    ):
        self.modulator = modulator
        config = ETraceConfig(learning_signal="modulatory") if config is None else config
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            trace_dtype,
            chunked_trace,
            control_flow,
            config,
            snap_max_jacobian_elements=snap_max_jacobian_elements,
        )

    def _extra(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if kwargs.get("modulator") is None and self.modulator is not None:
            kwargs = {**kwargs, "modulator": self.modulator}
        return super()._extra(kwargs)

    def _check_extra(self, extra: dict[str, Any]) -> None:
        check_modulator(self.graph.hidden_groups, extra)

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The modulator at the states of a group."""
        return modulator_of(group, cotangent, state, extra)


class OSTTP(SnAp):
    """Online spatio-temporal learning with targets projected to every layer.

    `learner(x, y_target=y)`: the signal of a group is `y @ B` of its matrix, at each of its state
    variables; the traces are those of `OSTLRecurrent`.

    Args:
        model: the network, one step in `update`, states initialised.
        B_list: one matrix (targets, units) per hidden group, in their order.
        target_timing: 'per-step', every call has a target; 'sequence-end', calls without one have
            no signal, and the traces go on.
        name: name of the learner.
        vjp_method: 'single-step'; windows are refused.
        fast_solve: accepted; there is one path.
        **options: further arguments of `SnAp`.
    """

    __module__ = "braintrace"
    takes = ("y_target",)
    signals = ("target_projection",)
    windows = NO_DERIVATIVE

    def __init__(
        self,
        model: brainstate.nn.Module,
        B_list: Sequence[Any],
        target_timing: str = "per-step",
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        **options: Any,
    ):
        check_timing(target_timing)
        if "n" in options:
            raise TypeError(
                message("OSTTP takes no n.", why="its traces are of order one", do="leave it out")
            )
        self.target_timing = target_timing
        self.B_list = [jnp.asarray(getattr(B, "B", B)) for B in B_list]
        super().__init__(model, 1, name, vjp_method, fast_solve, **options)

    def _check_graph(self) -> None:
        check_matrices(self.graph.hidden_groups, self.B_list)

    def _unnamed(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = super()._unnamed(args, kwargs)
        if self.is_compiled and len(args) == len(self._example[0]) + 1 and "y_target" not in kwargs:
            args, kwargs = args[:-1], {**kwargs, "y_target": args[-1]}
        return args, kwargs

    def _check_extra(self, extra: dict[str, Any]) -> None:
        if self.target_timing == "per-step":
            check_given(extra, "OSTTP", "with target_timing='per-step' every call has one")

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The projected target at every state variable of a group."""
        return projected_target(group, cotangent, state, extra)

    def signal_values(self) -> dict[str, Any]:
        """The matrices."""
        return {"B_list": list(self.B_list)}


class DECOLLE(ParamDimVjpAlgorithm):
    """Deep continuous local learning: every group has a loss of its own, of a fixed read-out.

    `learner(x, y_target=y)`: the signal of a group is the gradient of
    `local_loss(observe(h) @ R, y)` by its states, with `R` random and fixed. Parameters without a
    trace (the read-out that is used in the end) keep the gradient of the loss.

    Args:
        model: the network, one step in `update`, states initialised.
        n_target: width of the targets.
        key: seed or key of the read-outs; their entries are normal with variance 1 / units.
        readouts: the matrices (units, n_target), one per group, in place of random ones.
        local_loss: `(prediction, target) -> scalar`; default half the squared error, summed over
            targets and samples.
        observe: `state -> values`, from (*varshape, num_state) to (*varshape,); default the first
            state variable.
        name: name of the learner.
        vjp_method: 'single-step'; windows are refused.
        trace_dtype: storage type of the traces.
        config: other coordinates of the traces, with the signal 'local_loss'.
    """

    __module__ = "braintrace"
    takes = ("y_target",)
    signals = ("local_loss",)
    windows = OWN_LOSS

    def __init__(
        self,
        model: brainstate.nn.Module,
        n_target: int,
        key: Any = 0,
        readouts: Sequence[Any] | None = None,
        local_loss: Callable[[Array, Array], Array] | None = None,
        observe: Callable[[Array], Array] | None = None,
        name: str | None = None,
        vjp_method: str = "single-step",
        trace_dtype: Any = None,
        config: ETraceConfig | None = None,
    ):
        self.readouts = None if readouts is None else [jnp.asarray(R) for R in readouts]
        self._local = local_loss_of(n_target, key, local_loss, observe)
        self.n_target, self.key = self._local.n_target, self._local.key
        self.local_loss, self.observe = self._local.loss, self._local.observe
        config = ETraceConfig(learning_signal="local_loss") if config is None else config
        super().__init__(model, name, vjp_method, trace_dtype=trace_dtype, config=config)

    def _check_extra(self, extra: dict[str, Any]) -> None:
        check_given(extra, "DECOLLE", "every group learns to predict it")

    def _check_graph(self) -> None:
        check_readouts(self.graph.hidden_groups, self.readouts, self.n_target)

    def signal_values(self) -> dict[str, Any]:
        """The read-outs, where they were given."""
        return {} if self.readouts is None else {"readouts": list(self.readouts)}

    def readout(self, group: HiddenGroup) -> Array:
        """The fixed read-out of a group, (units, n_target)."""
        return self._local.readout(group) if self.readouts is None else self.readouts[group.index]

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The gradient of the group's own loss by its states."""
        return self._local.signal(group, cotangent, state, extra)
