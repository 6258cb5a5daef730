"""Rules that keep everything, as a random product with the right mean."""

from __future__ import annotations

from typing import Any

import brainstate

from .. import rules
from ..graph import MOST_ENTRIES, ControlFlowPolicy
from ._algorithm import ETraceVjpAlgorithm


class RandomProjectionVjpAlgorithm(ETraceVjpAlgorithm):
    """The influence of all parameters on all states, as one random outer product.

    Its mean is that of RTRL, through all operators and layers; memory is that of the parameters
    and the states. Random signs are drawn from the key, further ones after a reset.

    Args:
        model: the network, one step in `update`, states initialised.
        name: name of the learner.
        vjp_method: 'multi-step' for exact gradients inside windows, or 'single-step'.
        fast_solve: accepted; there is one path.
        control_flow: what to refuse; without effect otherwise, as operators need no traces.
        projection_key: seed or key of the random signs.
        projection_eps: positive number that is added to norms.
        snap_max_jacobian_elements: how many entries the Jacobian of one relation may have.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        name: str | None = None,
        vjp_method: str = "multi-step",
        fast_solve: bool = True,
        control_flow: ControlFlowPolicy | None = None,
        projection_key: Any = 42,
        projection_eps: float = 1e-12,
        snap_max_jacobian_elements: int = MOST_ENTRIES,
    ):
        rule = rules.uoro(projection_key, projection_eps=projection_eps)
        self.fast_solve, self.projection_eps = fast_solve, float(projection_eps)
        super().__init__(
            model,
            rule.record,
            name=name,
            vjp_method=vjp_method,
            snap_max_jacobian_elements=snap_max_jacobian_elements,
            config=rule.config,
            control_flow=control_flow,
        )


class UORO(RandomProjectionVjpAlgorithm):
    """Unbiased online recurrent optimisation: `RandomProjectionVjpAlgorithm` with its defaults."""

    __module__ = "braintrace"


class KFRTRL(ETraceVjpAlgorithm):
    """Kronecker-factored RTRL: per operator one random product of inputs and outputs.

    Its mean is what RTRL has for the weights of the traced operators. Memory is outputs x states
    per operator, not weights x states; the noise is smaller than that of `UORO`. Operators must be
    linear in their input and not inside of control flow.

    Args:
        model: the network, one step in `update`, states initialised.
        key: seed or key of the random signs; further ones are drawn after a reset.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        eps: positive number that is added to norms.
    """

    __module__ = "braintrace"

    def __init__(
        self,
        model: brainstate.nn.Module,
        key: Any = 42,
        name: str | None = None,
        vjp_method: str = "single-step",
        eps: float = 1e-12,
    ):
        rule = rules.kf_rtrl(key, eps=eps)
        super().__init__(model, rule.record, name=name, vjp_method=vjp_method, config=rule.config)
