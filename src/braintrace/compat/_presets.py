"""The learner classes of the rules: see `RuleLearner` for its class arguments."""

from __future__ import annotations

from typing import Any

import brainstate
import jax

from .._errors import type_error
from ..graph import HiddenGroup
from ..program import PyTree
from ..rules import MEMORY_LIMIT, LearningRule, local_loss_of
from ._rule_learner import RuleLearner, TracesLearner

_SNAP = "snap_max_jacobian_elements trace_dtype memory_limit chunked_trace control_flow"


class ParamDimVjpAlgorithm(
    TracesLearner,
    rule="d_rtrl",
    arguments="name vjp_method fast_solve trace_dtype chunked_trace control_flow config "
    "random_feedback_key snap_max_jacobian_elements memory_limit feedback_scale couple_axis",
    attributes="fast_solve trace_dtype chunked_trace",
):
    """A trace per weight, carried along by the element-wise Jacobian of the states.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> _ = brainstate.nn.init_all_states(cell)
        >>> learner = braintrace.D_RTRL(cell)
        >>> learner.compile_graph(jnp.zeros(3))
        >>> learner(jnp.ones(3)).shape
        (4,)
    """


class D_RTRL(ParamDimVjpAlgorithm):
    """Diagonal real-time recurrent learning: `ParamDimVjpAlgorithm` with its defaults."""


class IODimVjpAlgorithm(
    TracesLearner,
    rule="pp_prop",
    arguments="decay_or_rank name vjp_method fast_solve control_flow config random_feedback_key "
    "trace_dtype",
    attributes="fast_solve trace_dtype",
    decay_or_rank=None,
):
    """Two low-pass factors per operator: memory O(inputs + outputs), not O(weights)."""

    def _rule_of(self, arguments: dict[str, Any]) -> LearningRule:
        config = arguments.get("config")
        if config is not None:  # its decays win
            arguments = {**arguments, "decay_or_rank": getattr(config, "decay", None)}
        elif arguments.get("decay_or_rank", ...) is None:
            raise type_error(
                f"{type(self).__name__} without decay_or_rank.",
                why="the two factors are filtered with it",
                do="pass a float in [0, 1), an integer >= 1, or a pair of these",
            )
        return super()._rule_of(arguments)

    @property
    def decay_x(self) -> float:
        """The decay of the inputs."""
        return self.learning_rule.config.decay_x

    @property
    def decay_f(self) -> float:
        """The decay of the tails."""
        return self.learning_rule.config.decay_f

    @property
    def decay(self) -> float:
        """The common decay of both factors."""
        if self.decay_x != self.decay_f:
            raise AttributeError("The factors have different decays: use decay_x and decay_f.")
        return self.decay_x


class pp_prop(IODimVjpAlgorithm):
    """Pre- and postsynaptic factors: `IODimVjpAlgorithm` with its defaults."""


ES_D_RTRL = pp_prop


class EProp(
    ParamDimVjpAlgorithm,
    rule="eprop",
    arguments="feedback kappa_filter_decay random_feedback_key name vjp_method fast_solve "
    "feedback_scale trace_dtype chunked_trace control_flow snap_max_jacobian_elements memory_limit "
    "filtered c_reg f_target kappa_reg",
    attributes="feedback kappa_filter_decay filtered c_reg f_target kappa_reg feedback_scale "
    "fast_solve trace_dtype chunked_trace",
):
    """Traces per weight, filtered once more, with symmetric or random feedback.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.GRUCell(3, 4)
        >>> learner = braintrace.compile(cell, 'eprop', jnp.zeros(3), kappa_filter_decay=0.9)
        >>> learner(jnp.ones(3)).shape
        (4,)
    """


class RFLO(
    ParamDimVjpAlgorithm,
    rule="rflo",
    arguments="leak random_feedback_key name vjp_method feedback_scale trace_dtype",
    attributes="leak fast_solve trace_dtype chunked_trace",
):
    """Random feedback, local and online: a trace per weight, and random feedback from read-outs."""


class SnAp(
    ParamDimVjpAlgorithm,
    rule="snap",
    arguments=f"n name vjp_method fast_solve {_SNAP}",
    attributes="n fast_solve trace_dtype chunked_trace",
    snap_max_jacobian_elements=1 << 24,
):
    """Sparse n-step approximation: traces are followed through up to n - 1 crossings.

    A crossing is a path through an operator or a mixing equation, within a step or from one step to
    the next. `SnAp(n=1)` keeps the diagonal of the whole Jacobian; from the diameter of the network
    on it is RTRL, and its gradient that of BPTT.
    """


class OSTLRecurrent(
    SnAp,
    rule="ostl_recurrent",
    arguments=f"name vjp_method fast_solve {_SNAP}",
    attributes="fast_solve trace_dtype chunked_trace",
    snap_max_jacobian_elements=1 << 24,
):
    """Online spatio-temporal learning with recurrent connections: `SnAp` of order one."""

    regime, n = "with-H", 1


class OSTLFeedforward(
    pp_prop,
    rule="ostl_feedforward",
    arguments="decay_or_rank name vjp_method fast_solve control_flow config random_feedback_key "
    "trace_dtype",
    attributes="fast_solve trace_dtype",
):
    """Online spatio-temporal learning without recurrent connections: `pp_prop`, little memory."""

    regime = "without-H"


class OTTT(
    IODimVjpAlgorithm,
    rule="ottt",
    arguments="mode * leak name vjp_method trace_dtype control_flow",
    attributes="mode leak fast_solve trace_dtype",
):
    """Online training through time: filtered inputs meet the derivative within the step."""


class OTPE(
    RuleLearner,
    rule="otpe",
    arguments="mode * leak name vjp_method trace_clip_abs trace_dtype control_flow",
    attributes="mode leak trace_clip_abs",
):
    """Online training with postsynaptic estimates: traces that all decay alike."""


class STLLR(
    RuleLearner,
    rule="stllr",
    arguments="leak_pre leak_post alpha_pre alpha_post name vjp_method trace_dtype",
    attributes="leak_pre leak_post alpha_pre alpha_post",
):
    """Traces of spike timing: inputs before the unit was sensitive, and inputs after it.

    The second pairing is no derivative, so windows are refused.
    """


class RTRL(
    RuleLearner, rule="rtrl", arguments="name vjp_method memory_limit at_once paths path_key"
):
    """Real-time recurrent learning: the whole influence of every parameter on every state.

    Exact for whatever `update` computes, with operators or without, at the price of one tangent per
    parameter element: memory parameters x states. Windows have the same gradient.

    Example:
        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> cell = braintrace.nn.ValinaRNNCell(2, 3)
        >>> learner = braintrace.compile(cell, 'rtrl', jnp.zeros(2))
        >>> step = lambda net, x: (net(x) ** 2).sum()
        >>> braintrace.verify.compare(learner, step, jnp.ones((4, 2))).max_error < 1e-5
        True
    """


class RandomProjectionVjpAlgorithm(
    RuleLearner,
    rule="uoro",
    arguments="name vjp_method fast_solve control_flow projection_key projection_eps "
    "snap_max_jacobian_elements",
    attributes="fast_solve projection_eps",
    vjp_method="multi-step",
):
    """The influence of all parameters on all states, as one random outer product.

    Its mean is that of RTRL, through all operators and layers; memory is that of the parameters
    and the states. Random signs are drawn from the key, further ones after a reset.
    """


class UORO(RandomProjectionVjpAlgorithm):
    """Unbiased online recurrent optimisation: `RandomProjectionVjpAlgorithm` with its defaults."""


class KFRTRL(RuleLearner, rule="kf_rtrl", arguments="key name vjp_method eps"):
    """Kronecker-factored RTRL: per operator one random product of inputs and outputs.

    Its mean is what RTRL has for the weights of the traced operators. Memory is outputs x states
    per operator, not weights x states; the noise is smaller than that of `UORO`. Operators must be
    linear in their input and not inside of control flow. Samples of a batch have factors of their
    own if they are independent; further signs are drawn after a reset.
    """


class NoTrace(RuleLearner, rule="no_trace", arguments="name vjp_method"):
    """The baseline: the gradient within each step, and no memory.

    With windows (`vjp_method='multi-step'`) it is truncated backpropagation through time.
    """


# ----------------------------------------- rules whose signal comes with the call


class ThreeFactor(
    ParamDimVjpAlgorithm,
    rule="three_factor",
    arguments="name vjp_method modulator fast_solve trace_dtype chunked_trace control_flow config "
    "snap_max_jacobian_elements",
    attributes="modulator fast_solve trace_dtype chunked_trace",
):
    """Traces per weight times a modulator of the call: `learner(x, modulator=m)`.

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

    def _extra(self, kwargs: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
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

    def _arguments(self, args: tuple, kwargs: dict[str, PyTree]) -> tuple[tuple, dict[str, PyTree]]:
        if self.is_compiled and len(args) == len(self._example[0]) + 1 and "y_target" not in kwargs:
            args, kwargs = args[:-1], {**kwargs, "y_target": args[-1]}
        return args, kwargs

    def signal_values(self) -> dict[str, PyTree]:
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

    def signal_values(self) -> dict[str, PyTree]:
        """The read-outs, if they are the user's."""
        return {} if self.readouts is None else {"readouts": list(self.readouts)}

    def readout(self, group: HiddenGroup) -> jax.Array:
        """The fixed read-out of a group, (units, n_target)."""
        return self._local.readout(group) if self.readouts is None else self.readouts[group.index]
