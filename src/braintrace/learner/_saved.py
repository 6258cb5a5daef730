"""What a learner of a brainstate module saves: its states by name, and what they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax.numpy as jnp

from .._errors import value_error
from ..checkpoint import (
    OPTIMIZER,
    SEPARATOR,
    STATES,
    WEIGHTS,
    Named,
    named,
    renewed,
    swap_states,
)
from ..rules import rule_identity
from ._alone import alone
from ._traces import EligibilityTrace

# The name of a trace ends in a digest of what it belongs to; keys of the trace follow.
_TRACE = re.compile(rf"(?P<trace>.*?(?:@| of )[0-9a-f]{{8}})(?:{SEPARATOR}(?P<keys>.+))?")


def _parts(name: str) -> list[str]:
    """A trace and the keys inside of it: `states of 14bc57a8/s/0`; the trace of some has no key."""
    if found := _TRACE.fullmatch(name):
        keys = found["keys"]
        return [found["trace"], *(keys.split(SEPARATOR) if keys else ())]
    trace, _, key = name.rpartition(SEPARATOR)
    return [trace, key] if trace else [key]


class SavedStates:
    """`named_arrays`, `assign` and `identity` of `checkpoint.Saved`."""

    _learner: Any  # whose states are saved
    _n_samples: int | None = None  # over which it is mapped
    optimizer_state: Any

    @alone
    def named_arrays(self) -> Named:
        """Weights, states, traces, counts, random keys and the optimizer's state, by name."""
        return {
            leaf: value
            for name, state in self._named_states().items()
            for leaf, value in named(name, state.value).items()
        }

    @alone
    def assign(self, values: Named) -> None:
        """Give some of these other values: all of them or none."""
        states = {}
        for name, state in self._named_states().items():
            if wanted := {k: values[k] for k in named(name, state.value) if k in values}:
                states[name] = (state, renewed(name, state.value, wanted))
        swap_states({k: s for k, (s, _) in states.items()}, {k: v for k, (_, v) in states.items()})

    def expect(self, names: Mapping[str, Any]) -> Callable[[], None]:
        """Have the traces of step functions that are among the names of arrays; returns the undo.

        Those that a file has and the learner has not are made, those of which it has none are
        zero when they are next needed.
        """
        held, plan = self._learner.etraces, self._learner._compiled().plan
        before, own = dict(held), plan.parts(plan.trace_shapes)
        start = f"{STATES}/learner/etraces/"
        found: dict[str, Any] = {}
        for name in (name for name in names if name.startswith(start)):
            inside = found
            *parts, last = _parts(name.removeprefix(start))
            for part in parts:
                inside = inside.setdefault(part, {})
            inside[last] = jnp.zeros(names[name].shape, names[name].dtype)
        for name in [name for name in held if name not in own and name not in found]:
            del held[name]
        held |= {k: EligibilityTrace(v) for k, v in found.items() if k not in held}

        def undo() -> None:
            held.clear()
            held.update(before)

        return undo

    def identity(self) -> dict[str, Any]:
        """The rule, how it is run, and the samples it is mapped over."""
        learner = self._learner
        rule = rule_identity(learner.learning_rule, learner.rule)
        return {**rule, "vjp_method": learner.vjp_method, "vmap": self._n_samples}

    def check_optimizer(self, optimizer: Any) -> None:
        """Any optimizer will do: of optax, with states, or a tree of its arrays."""

    def _named_states(self) -> dict[str, brainstate.State]:
        learner = self._learner
        if not learner.is_compiled:
            raise value_error(
                f"{learner.title} is saved or loaded before it is compiled.",
                why="its traces are allocated by compile_graph; there are none yet",
                do="call learner.compile_graph(*example_inputs) first, or build the learner with "
                "braintrace.compile(model, rule, *example_inputs)",
            )
        trained = {id(s) for s in learner.param_states.values()}
        states: dict[str, brainstate.State] = {}
        for path, state in learner.states().items():
            if path == ("optimizer_state",):
                continue
            inside = path[0] == "model4compile"
            group = WEIGHTS if id(state) in trained else STATES
            owner = "model" if inside else "learner"
            states["/".join([group, owner, *map(str, path[inside:])])] = state
        synthesizer = getattr(learner, "synthesizer", None)
        if synthesizer is not None:
            found = synthesizer.states_dict()
            states |= {f"{STATES}/synthesizer/{k}": s for k, s in found.items()}
        if not any(s is brainstate.random.DEFAULT for s in states.values()):
            states[f"{STATES}/random/default"] = brainstate.random.DEFAULT
        if self.optimizer_state is not None:
            states[OPTIMIZER] = self.optimizer_state
        return states
