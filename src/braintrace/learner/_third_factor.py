"""Rules whose signal comes with the call: a modulator, a projected target, a local loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NotSupportedError, message
from ..graph import MOST_ENTRIES, ControlFlowPolicy, HiddenGroup
from ._config import ETraceConfig
from ._options import key_of
from ._presets import ParamDimVjpAlgorithm, SnAp
from ._sequences import count_of

Array = jax.Array
_NO_DERIVATIVE = "its signal is not a derivative of the loss"


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
    windows = _NO_DERIVATIVE

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
        found = extra.get("modulator")
        if found is None:
            raise RuntimeError(
                message(
                    "ThreeFactor is called without a modulator.",
                    why="it takes the place of the derivative of the loss",
                    do="call learner(x, modulator=m), or set learner.modulator",
                )
            )
        if isinstance(found, (list, tuple)):
            raise TypeError(
                message(
                    f"the modulator is a {type(found).__name__}.",
                    why="one for each group is a dict by the index of the group",
                    do="pass a number, an array or such a dict",
                )
            )
        groups = {g.index: g.name for g in self.graph.hidden_groups}
        if isinstance(found, dict) and not set(found) <= set(groups):
            raise ValueError(
                message(
                    f"modulators of the groups {list(found)}.",
                    why="the groups are " + ", ".join(f"{k}: {v}" for k, v in groups.items()),
                    do="pass a dict by these numbers",
                )
            )

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The modulator at the states of a group."""
        m = extra["modulator"]
        if isinstance(m, dict):
            if group.index not in m:
                return jnp.zeros_like(cotangent)
            m = m[group.index]
        m = jnp.asarray(m)
        shape, full, units = m.shape[1:], cotangent.shape[1:], group.varshape
        per_sample = 0 < len(shape) < len(units) and shape == units[: len(shape)]
        per_unit = 0 < len(shape) < len(units) and shape == units[len(units) - len(shape) :]
        if not shape or shape == units or (per_sample and not per_unit):
            return m.reshape((*m.shape, *(1,) * (len(full) - len(shape))))
        if len(shape) == len(full) and shape[:-1] == units and shape[-1] in (1, full[-1]):
            return m
        if per_unit and not per_sample:
            return m[..., None].reshape((m.shape[0], *(1,) * (len(units) - len(shape)), *shape, 1))
        raise ValueError(
            message(
                f"a modulator of shape {shape} for the group {group.name}.",
                why=f"its units have the shape {units}, with {group.num_state} variables each"
                + ("; per sample and per unit look the same" if per_sample else ""),
                do="pass a number, an array of that shape, one per sample, or a dict of these by "
                "the index of the group",
            )
        )


def check_target(group: HiddenGroup, target: Array, width: int) -> None:
    """Refuse targets, with a leading axis of steps, that belong to no sample of a group."""
    shape, units = target.shape[1:], group.varshape
    lead = shape[:-1]
    if (
        jnp.issubdtype(target.dtype, jnp.integer)
        or shape[-1:] != (width,)
        or (lead != units[: len(lead)] or len(lead) > max(len(units) - 1, 0))
    ):
        raise ValueError(
            message(
                f"a target of shape {shape}, {target.dtype}, for the group {group.name}.",
                why=f"its units have the shape {units}; targets have {width} entries",
                do="pass floating targets, one for each sample or one for all; labels as one-hot",
            )
        )


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
    windows = _NO_DERIVATIVE

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
        if target_timing not in ("per-step", "sequence-end"):
            raise ValueError(
                message(
                    f"target_timing={target_timing!r}.",
                    why="targets come with every step, or with some of them",
                    do="choose 'per-step' or 'sequence-end'",
                )
            )
        if "n" in options:
            raise TypeError(
                message("OSTTP takes no n.", why="its traces are of order one", do="leave it out")
            )
        self.target_timing = target_timing
        self.B_list = [jnp.asarray(getattr(B, "B", B)) for B in B_list]
        super().__init__(model, 1, name, vjp_method, fast_solve, **options)

    def _check_graph(self) -> None:
        groups = self.graph.hidden_groups
        want = [g.varshape[-1] if g.varshape else 1 for g in groups]
        got = [B.shape[1] if B.ndim == 2 else None for B in self.B_list]
        if want != got:
            raise ValueError(
                message(
                    f"B_list has matrices to {got} units, the groups have {want}.",
                    why="groups: " + ", ".join(g.name for g in groups),
                    do="pass one matrix (targets, units) per group, in this order",
                )
            )

    def _unnamed(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = super()._unnamed(args, kwargs)
        if self.is_compiled and len(args) == len(self._example[0]) + 1 and "y_target" not in kwargs:
            args, kwargs = args[:-1], {**kwargs, "y_target": args[-1]}
        return args, kwargs

    def _check_extra(self, extra: dict[str, Any]) -> None:
        if "y_target" not in extra and self.target_timing == "per-step":
            raise ValueError(
                message(
                    "OSTTP is called without y_target.",
                    why="with target_timing='per-step' every call has one",
                    do="call learner(x, y_target=y), or use target_timing='sequence-end'",
                )
            )

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The projected target at every state variable of a group."""
        if "y_target" not in extra:
            return jnp.zeros_like(cotangent)
        y, B = extra["y_target"], extra["B_list"][group.index]
        check_target(group, y, B.shape[0])
        found, between = y @ B, len(group.varshape) - y.ndim + 1  # axes of units beside the last
        if not group.varshape:
            return found
        return found.reshape((*y.shape[:-1], *(1,) * between, found.shape[-1], 1))

    def signal_values(self) -> dict[str, Any]:
        """The matrices."""
        return {"B_list": list(self.B_list)}


def _squares(prediction: Array, target: Array) -> Array:
    return 0.5 * ((prediction - target) ** 2).sum()


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
    windows = "each group has a loss of its own"

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
        self.n_target = count_of("n_target", n_target, "the entries of a target", optional=False)
        self.key = key_of("key", key)
        self.readouts = None if readouts is None else [jnp.asarray(R) for R in readouts]
        self.local_loss = _squares if local_loss is None else local_loss
        self.observe = (lambda state: state[..., 0]) if observe is None else observe
        config = ETraceConfig(learning_signal="local_loss") if config is None else config
        super().__init__(model, name, vjp_method, trace_dtype=trace_dtype, config=config)

    def _check_extra(self, extra: dict[str, Any]) -> None:
        if "y_target" not in extra:
            raise ValueError(
                message(
                    "DECOLLE is called without y_target.",
                    why="every group learns to predict it",
                    do="call learner(x, y_target=y)",
                )
            )

    def _check_graph(self) -> None:
        if self.readouts is None:
            return
        groups = self.graph.hidden_groups
        want = [(g.varshape[-1] if g.varshape else 1, self.n_target) for g in groups]
        got = [R.shape for R in self.readouts]
        if want != got:
            raise ValueError(
                message(
                    f"readouts of shape {got}, the groups need {want}.",
                    why="groups: " + ", ".join(g.name for g in groups),
                    do="pass one matrix (units, n_target) per group, in this order",
                )
            )

    def signal_values(self) -> dict[str, Any]:
        """The read-outs, where they were given."""
        return {} if self.readouts is None else {"readouts": list(self.readouts)}

    def readout(self, group: HiddenGroup) -> Array:
        """The fixed read-out of a group, (units, n_target)."""
        if self.readouts is not None:
            return self.readouts[group.index]
        n = group.varshape[-1] if group.varshape else 1
        key = jax.random.fold_in(self.key, group.index)
        return jax.random.normal(key, (n, self.n_target)) / np.sqrt(n)

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, Any]
    ) -> Array:
        """The gradient of the group's own loss by its states."""
        fixed = extra.get("readouts")
        R = self.readout(group) if fixed is None else fixed[group.index]
        R = jax.lax.stop_gradient(R).astype(state.dtype)

        if jnp.iscomplexobj(state):
            raise NotSupportedError(
                message(
                    f"a loss of the complex states {group.name}.",
                    why="their read-out is complex",
                    do="keep real and imaginary parts as states of their own",
                )
            )

        def loss(state: Array, target: Array) -> Array:
            seen = self.observe(state)
            return self.local_loss((seen if group.varshape else seen[None]) @ R, target)

        target = extra["y_target"]
        if self.local_loss is _squares:
            check_target(group, target, R.shape[1])
        return jax.vmap(jax.grad(loss))(state, target)
