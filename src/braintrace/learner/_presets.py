"""The learners of this version: a rule and its constructor arguments."""

from __future__ import annotations

from typing import Any

import brainstate

from .. import rules
from .._errors import message
from ..frontend import check_crossings
from ..graph import MOST_ENTRIES, ControlFlowPolicy
from ..rules import MEMORY_LIMIT, ETraceConfig, check_config, crossings_of, rule_of, trace_type
from ._algorithm import ETraceVjpAlgorithm


class ParamDimVjpAlgorithm(ETraceVjpAlgorithm):
    """A trace per weight, carried along by the element-wise Jacobian of the states.

    Args:
        model: the network, one step in `update`, states initialised.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        fast_solve: accepted; there is one path.
        trace_dtype: storage type of the traces, e.g. `jnp.bfloat16`.
        chunked_trace: accepted; there is one path.
        control_flow: which control flow around operators stays closed, none by default.
        config: other coordinates of the rule, with traces per weight.
        random_feedback_key: seed or key of random feedback, where the config has it.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
        memory_limit: bytes that the traces may need, None for no limit; more is refused before it
            is allocated.
        feedback_scale: of the random operands' entries, relative to 1 / sqrt(outputs).

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(cell)
        >>> learner = braintrace.D_RTRL(cell)
        >>> learner.compile_graph(jnp.zeros(3))
        >>> learner(jnp.ones(3)).shape
        (4,)
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        trace_dtype: Any = None,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
        memory_limit: int | None = None,
        feedback_scale: float = 1.0,
    ):
        dtype = trace_type(trace_dtype)
        config = check_config(type(self).__name__, config, ETraceConfig(), self.signals)
        super().__init__(
            model,
            rule_of(config, key=random_feedback_key, scale=feedback_scale, trace_dtype=dtype),
            name=name,
            vjp_method=vjp_method,
            crossings=crossings_of(config),
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            memory_limit=memory_limit,
            config=config,
            control_flow=control_flow,
        )
        self.fast_solve, self.trace_dtype, self.chunked_trace = fast_solve, dtype, chunked_trace


class D_RTRL(ParamDimVjpAlgorithm):
    """Diagonal real-time recurrent learning: `ParamDimVjpAlgorithm` with its defaults."""

    __module__ = "braintrace"


class IODimVjpAlgorithm(ETraceVjpAlgorithm):
    """Two low-pass factors per operator: memory O(inputs + outputs), not O(weights).

    Args:
        model: the network, one step in `update`, states initialised.
        decay_or_rank: a float in [0, 1) is the decay, an integer r >= 1 stands for the decay
            (r - 1) / (r + 1); a pair gives the input's and the tail's separately.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        fast_solve: accepted; there is one path.
        control_flow: which control flow around operators stays closed, none by default.
        config: other coordinates of the rule, with two factors; its decays win.
        random_feedback_key: seed or key of random feedback, where the config has it.
        trace_dtype: storage type of the traces.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        decay_or_rank: Any = None,
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        config: ETraceConfig | None = None,
        random_feedback_key: Any = None,
        trace_dtype: Any = None,
    ):
        if config is not None:
            decay_or_rank = getattr(config, "decay", None)
        elif decay_or_rank is None:
            raise TypeError(
                message(
                    f"{type(self).__name__} without decay_or_rank.",
                    why="the two factors are filtered with it",
                    do="pass a float in [0, 1), an integer >= 1, or a pair of these",
                )
            )
        default = rules.pp_prop(decay_or_rank).config
        config = check_config(type(self).__name__, config, default, self.signals)
        self.decay_x, self.decay_f = config.decay
        dtype = trace_type(trace_dtype)
        super().__init__(
            model,
            rule_of(config, key=random_feedback_key, trace_dtype=dtype),
            name=name,
            vjp_method=vjp_method,
            crossings=crossings_of(config),
            config=config,
            control_flow=control_flow,
        )
        self.fast_solve, self.trace_dtype = fast_solve, dtype

    @property
    def decay(self) -> float:
        """The common decay of both factors."""
        if self.decay_x != self.decay_f:
            raise AttributeError("The factors have different decays: use decay_x and decay_f.")
        return self.decay_x


class pp_prop(IODimVjpAlgorithm):
    """Pre- and postsynaptic factors: `IODimVjpAlgorithm` with its defaults."""

    __module__ = "braintrace"


ES_D_RTRL = pp_prop


class SnAp(ParamDimVjpAlgorithm):
    """Sparse n-step approximation: traces are followed through up to n - 1 crossings.

    A crossing is a path through an operator or a mixing equation, within a step or from one step to
    the next. `SnAp(n=1)` keeps the diagonal of the whole Jacobian; from the diameter of the network
    on it is RTRL, and its gradient that of BPTT.

    Args:
        model: the network, one step in `update`, states initialised.
        n: the order; memory and time grow with the number of units reached in n - 1 crossings.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        fast_solve: accepted; there is one path.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
        trace_dtype: storage type of the traces, e.g. `jnp.bfloat16`.
        memory_limit: bytes that the traces may need, None for no limit; more is refused before it
            is allocated.
        chunked_trace: accepted; there is one path.
        control_flow: which control flow around operators stays closed, none by default.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        n: int = 2,
        name: str | None = None,
        vjp_method: str = "single-step",
        fast_solve: bool = True,
        snap_max_jacobian_elements: int = 1 << 24,
        trace_dtype: Any = None,
        memory_limit: int | None = MEMORY_LIMIT,
        chunked_trace: bool = True,
        control_flow: ControlFlowPolicy | None = None,
    ):
        self.n = check_crossings(n)
        super().__init__(
            model,
            name,
            vjp_method,
            fast_solve,
            trace_dtype,
            chunked_trace,
            control_flow,
            config=ETraceConfig(
                recurrence_scope="sparse_n", sparse_n=self.n, learning_signal=self.signals[0]
            ),
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            memory_limit=memory_limit,
        )


class RTRL(ETraceVjpAlgorithm):
    """Real-time recurrent learning: the whole influence of every parameter on every state.

    Exact for whatever `update` computes, with operators or without, at the price of one tangent per
    parameter element: memory parameters x states.

    Args:
        model: the network, one step in `update`, states initialised.
        name: name of the learner.
        vjp_method: 'single-step' or 'multi-step'; the gradient is the same.
        memory_limit: bytes that the traces may need, None for no limit; more is refused before it
            is allocated.
        at_once: how many parameter elements are pushed through the step side by side.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.ValinaRNNCell(2, 3)
        >>> learner = braintrace.compile(cell, 'rtrl', jnp.zeros(2))
        >>> step = lambda net, x: (net(x) ** 2).sum()
        >>> braintrace.verify.compare(learner, step, jnp.ones((4, 2))).max_error < 1e-5
        True
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "single-step",
        memory_limit: int | None = MEMORY_LIMIT,
        at_once: int = 4096,
    ):
        rule = rules.rtrl(memory_limit=memory_limit, at_once=at_once)
        super().__init__(
            model,
            rule.record,
            name=name,
            vjp_method=vjp_method,
            memory_limit=rule.memory_limit,
            config=rule.config,
        )
