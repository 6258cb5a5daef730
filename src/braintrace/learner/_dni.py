"""D-RTRL with a learned guess of what later losses say about the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import PyTreeDef

from ..engine import Values
from ..graph import Graph
from ..program import PyTree
from ..rules import ETraceConfig, LearningRule
from ._data import Call
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
    calls_in_blocks = False  # each adds the guess at its own end

    def _rule_of(self, arguments: dict[str, Any]) -> LearningRule:
        return super()._rule_of(
            {**arguments, "config": ETraceConfig(learning_signal="bootstrapped")}
        )

    @property
    def _has_own_signal(self) -> bool:
        return True

    def attach_synthesizer(self, synthesizer: SyntheticGradient) -> None:
        """Use this one from now on."""
        self.synthesizer = synthesizer

    def group_signal_shapes(self) -> dict[int, tuple[int, ...]]:
        """The `group_shapes` of a `SyntheticGradient` for this learner."""
        return {g.index: (*g.varshape, g.num_state) for g in self.graph.hidden_groups}

    def _extra(self, kwargs: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        if self.synthesizer is None:
            return kwargs, {}
        return kwargs, {"synthesizer": self.synthesizer.param_values()}

    def _check_extra(self, extra: dict[str, PyTree]) -> None:
        if not extra:
            raise no_synthesizer()

    def _run(self, graph: Graph, call: Call, extra: tuple[bool, ...], names: PyTreeDef):
        assert self.synthesizer is not None
        plain, synthesizer = super()._run(graph, call, extra, names), self.synthesizer
        traced = {i for r in graph.relations for v in r.site.leaves.values() for i in v}

        def run(values: Values, traces: list[PyTree]):
            outs, last, traces = plain(values, traces)
            constant = replace(
                values,
                params=tuple(
                    lax.stop_gradient(p) if i in traced else p for i, p in enumerate(values.params)
                ),
                hidden=lax.stop_gradient(values.hidden),
            )
            exits = run_window(graph, constant, call)[1].hidden
            theta = jax.tree.unflatten(names, values.extra)["synthesizer"]
            guess = guessed(graph.groups, synthesizer, theta, lax.stop_gradient(exits))
            return expecting(outs, exits, guess), last, traces

        key = ("dni", id(synthesizer), graph, call.timed, call.length, extra, names)
        return self.executor.compiled(key, run)


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
