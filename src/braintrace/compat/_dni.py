"""D-RTRL with a learned guess of what later losses say about the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._online import Attach, Plan
from ..engine import TimeAxes, Values
from ..graph import Graph
from ..program import PyTree
from ..rules import ETraceConfig, LearningRule
from ._presets import ParamDimVjpAlgorithm
from ._synthetic import SyntheticGradient, guessed, no_synthesizer, run_window

Array = jax.Array


class DNI(
    ParamDimVjpAlgorithm,
    rule="d_rtrl",
    arguments="synthesizer name vjp_method fast_solve trace_dtype chunked_trace control_flow "
    "snap_max_jacobian_elements",
    attributes="synthesizer fast_solve trace_dtype chunked_trace",
    vjp_method="multi-step",
):
    """D-RTRL in windows, with synthetic gradients for the parameters that have no trace.

    What has a trace is credited by later losses when they come. For any other parameter that
    reaches a state the past is lost; it gets in advance what a `SyntheticGradient` expects later
    losses to say about the states at the end of the window.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'dni', jnp.zeros(3))
        >>> learner.attach_synthesizer(braintrace.SyntheticGradient(learner.group_signal_shapes()))
        >>> learner(jnp.ones(3)).shape
        (4,)
    """

    synthesizer: SyntheticGradient | None
    signals = ("bootstrapped",)

    def _rule_of(self, arguments: dict[str, Any]) -> LearningRule:
        return super()._rule_of(
            {**arguments, "config": ETraceConfig(learning_signal="bootstrapped")}
        )

    def attach_synthesizer(self, synthesizer: SyntheticGradient) -> None:
        """Use this one from now on."""
        self.synthesizer = synthesizer

    def group_signal_shapes(self) -> dict[int, tuple[int, ...]]:
        """The `group_shapes` of a `SyntheticGradient` for this learner."""
        return {g.index: (*g.varshape, g.num_state) for g in self.graph.hidden_groups}

    @property
    def _synthetic(self) -> Any:
        return self.synthesizer

    def _of_rule(self) -> dict[str, PyTree]:
        if self.synthesizer is None:
            return super()._of_rule()
        return {**super()._of_rule(), "synthesizer": self.synthesizer.param_values()}

    def _check_extra(self, extra: dict[str, PyTree]) -> None:
        if self.synthesizer is None:
            raise no_synthesizer()

    def _attach(self, plan: Plan) -> Attach | None:
        """What later losses are expected to say about the states at the end of a call."""
        synthesizer = self.synthesizer
        if synthesizer is None:
            return None
        used = {i for r in plan.graph.relations for v in r.site.leaves.values() for i in v}

        def attach(
            graph: Graph, values: Values, axes: TimeAxes, of_rule: PyTree, outs: list[Array]
        ) -> list[Array]:
            params = enumerate(values.params)
            constant = replace(
                values,
                params=tuple(lax.stop_gradient(p) if i in used else p for i, p in params),
                hidden=lax.stop_gradient(values.hidden),
            )
            exits = run_window(graph, constant, axes.args, axes.length)[1].hidden
            theta = of_rule["synthesizer"]
            guess = guessed(graph.groups, synthesizer, theta, lax.stop_gradient(exits))
            return expecting(outs, exits, guess)

        return attach


def expecting(outs: list[Array], exits: PyTree, guess: PyTree) -> list[Array]:
    """`outs`; whoever differentiates them adds `guess` to the cotangents of `exits`."""

    @jax.custom_vjp
    def attach(outs, exits, guess):
        return outs

    attach.defvjp(
        lambda outs, exits, guess: (outs, guess),
        lambda guess, ct: (ct, guess, jax.tree.map(jnp.zeros_like, guess)),
    )
    return attach(outs, tuple(exits), lax.stop_gradient(guess))
