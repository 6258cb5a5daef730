"""Rules that differ in the Jacobian they keep, the layout of the trace, or its filter."""

from __future__ import annotations

from typing import Any

import brainstate

from .. import rules
from .._errors import message
from ..graph import ControlFlowPolicy
from ._algorithm import ETraceVjpAlgorithm
from ._presets import IODimVjpAlgorithm, ParamDimVjpAlgorithm, SnAp, pp_prop


class EProp(ParamDimVjpAlgorithm):
    """Traces per weight, filtered once more, with symmetric or random feedback.

    Args:
        model: the network, one step in `update`, states initialised.
        feedback: 'symmetric', the loss's own derivative; or 'random', with fixed random operands on
            the way back through read-outs and from layer to layer.
        kappa_filter_decay: decay in [0, 1) of the filter of the traces; 0 is none, and D_RTRL.
        random_feedback_key: seed or key of the random operands.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        fast_solve: accepted; there is one path.
        feedback_scale: of the random operands' entries, relative to 1 / sqrt(outputs).
        trace_dtype: storage type of the traces, e.g. `jnp.bfloat16`.
        **options: further arguments of `ParamDimVjpAlgorithm`.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(cell, 'eprop', jnp.zeros(3), kappa_filter_decay=0.9)
        >>> learner(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        feedback: str = "symmetric",
        kappa_filter_decay: float = 0.0,
        random_feedback_key: Any = None,
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        feedback_scale: float = 1.0,
        trace_dtype: Any = None,
        **options: Any,
    ):
        config = rules.eprop(feedback, kappa_filter_decay, random_feedback_key).config
        self.kappa_filter_decay = float(kappa_filter_decay)
        self.feedback, self.feedback_scale = feedback, feedback_scale
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            trace_dtype,
            config=config,
            random_feedback_key=random_feedback_key,
            feedback_scale=feedback_scale,
            **options,
        )


class RFLO(ParamDimVjpAlgorithm):
    """Random feedback, local and online: a trace per weight, and random feedback from the read-out.

    Args:
        model: the network, one step in `update`, states initialised.
        leak: decay of the traces in [0, 1); None takes what the step itself keeps of its states,
            which is 1 - 1/tau for a leaky unit.
        random_feedback_key: seed or key of the random operands; None for symmetric feedback.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        feedback_scale: of the random operands' entries, relative to 1 / sqrt(outputs).
        trace_dtype: storage type of the traces.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        leak: float | None = None,
        random_feedback_key: Any = 0,
        name: str | None = None,
        vjp_method: str = "single-step",
        feedback_scale: float = 1.0,
        trace_dtype: Any = None,
    ):
        config = rules.rflo(leak, random_feedback_key).config
        self.leak = None if leak is None else float(leak)
        super().__init__(
            model,
            name,
            vjp_method,
            trace_dtype=trace_dtype,
            config=config,
            random_feedback_key=random_feedback_key,
            feedback_scale=feedback_scale,
        )


class OSTLRecurrent(SnAp):
    """Online spatio-temporal learning with recurrent connections: `SnAp` of order one.

    Takes the arguments of `SnAp`, without `n`.
    """

    __module__ = "braintrace"
    regime = "with-H"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        **options: Any,
    ):
        if "n" in options:
            raise TypeError(
                message(
                    "OSTLRecurrent takes no n.",
                    why="it is the rule of order one",
                    do="use braintrace.SnAp(model, n=...)",
                )
            )
        super().__init__(model, 1, name, vjp_method, fast_solve, **options)


class OSTLFeedforward(pp_prop):
    """Online spatio-temporal learning without recurrent connections: `pp_prop` with little memory.

    Takes the arguments of `pp_prop`; `decay_or_rank` is 1e-6 unless given.
    """

    __module__ = "braintrace"
    regime = "without-H"

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: Any = 1e-6,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(model, decay_or_rank, name=name, **options)


class OTTT(IODimVjpAlgorithm):
    """Online training through time: filtered inputs meet the derivative within the step.

    Args:
        model: the network, one step in `update`, states initialised.
        mode: 'A' filters the inputs, 'O' takes those of the step.
        leak: decay of the filter in (0, 1), that of the membranes.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        trace_dtype: storage type of the traces.
        control_flow: which control flow around operators stays closed, none by default.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        mode: str = "A",
        *,
        leak: float,
        name: str | None = None,
        vjp_method: str = "single-step",
        trace_dtype: Any = None,
        control_flow: ControlFlowPolicy | None = None,
    ):
        config = rules.ottt(mode, leak=leak).config
        self.mode, self.leak = mode, float(leak)
        super().__init__(
            model,
            name=name,
            vjp_method=vjp_method,
            trace_dtype=trace_dtype,
            config=config,
            control_flow=control_flow,
        )


class OTPE(ETraceVjpAlgorithm):
    """Online training with postsynaptic estimates: traces that all decay alike.

    Args:
        model: the network, one step in `update`, states initialised.
        mode: 'full', a trace per weight; or 'approx', two filtered factors.
        leak: decay of the traces in (0, 1), that of the membranes.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        trace_clip_abs: largest absolute value of a trace, mode 'full' only; steps are then taken
            one after another.
        trace_dtype: storage type of the traces.
        control_flow: which control flow around operators stays closed, none by default.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        mode: str = "full",
        *,
        leak: float,
        name: str | None = None,
        vjp_method: str = "single-step",
        trace_clip_abs: float | None = None,
        trace_dtype: Any = None,
        control_flow: ControlFlowPolicy | None = None,
    ):
        clip = {"trace_clip_abs": trace_clip_abs, "trace_dtype": trace_dtype}
        rule = rules.otpe(mode, leak=leak, **clip)
        self.mode, self.leak, self.trace_clip_abs = mode, float(leak), trace_clip_abs
        super().__init__(
            model,
            rule.record,
            name=name,
            vjp_method=vjp_method,
            config=rule.config,
            control_flow=control_flow,
        )


class STLLR(ETraceVjpAlgorithm):
    """Traces of spike timing: inputs before the unit was sensitive, and inputs after it.

    Args:
        model: the network, one step in `update`, states initialised.
        leak_pre: decay of the inputs' trace in [0, 1).
        leak_post: decay of the trace of the units' sensitivities in [0, 1).
        alpha_pre: weight of inputs that came before.
        alpha_post: weight of inputs that come after; usually negative or small.
        name: name of the learner.
        vjp_method: 'single-step'; the second pairing is no derivative, so windows are refused.
        trace_dtype: storage type of the traces.
    """

    __module__ = "braintrace"
    windows = rules.NO_PAIRING

    def __init__(
        self,
        model: brainstate.nn.Module,
        leak_pre: float = 0.5,
        leak_post: float = 0.2,
        alpha_pre: float = 1.0,
        alpha_post: float = -0.2,
        name: str | None = None,
        vjp_method: str = "single-step",
        trace_dtype: Any = None,
    ):
        rule = rules.stllr(leak_pre, leak_post, alpha_pre, alpha_post, trace_dtype=trace_dtype)
        self.leak_pre, self.leak_post = map(float, (leak_pre, leak_post))
        self.alpha_pre, self.alpha_post = map(float, (alpha_pre, alpha_post))
        super().__init__(model, rule.record, name=name, vjp_method=vjp_method, config=rule.config)


class NoTrace(ETraceVjpAlgorithm):
    """The baseline: the gradient within each step, and no memory.

    With windows (`vjp_method='multi-step'`) it is truncated backpropagation through time.

    Args:
        model: the network, one step in `update`, states initialised.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "single-step",
    ):
        rule = rules.no_trace()
        super().__init__(model, rule.record, name=name, vjp_method=vjp_method, config=rule.config)
