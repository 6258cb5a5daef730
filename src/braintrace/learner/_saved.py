"""What a learner of a brainstate module saves: its states by name, and what they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax.numpy as jnp

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
from ..frontend import EligibilityTrace
from ..rules import rule_identity
from ._alone import alone
from ._checks import not_compiled

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

    @alone
    def named_arrays(self: Any) -> Named:
        """Weights, states, traces, counts, random keys and the optimizer's state, by name."""
        return {
            leaf: value
            for name, state in self._named_states().items()
            for leaf, value in named(name, state.value).items()
        }

    @alone
    def assign(self: Any, values: Named) -> None:
        """Give some of these other values: all of them or none."""
        states, new = self._named_states(), {}
        for name, state in states.items():
            if wanted := {k: values[k] for k in named(name, state.value) if k in values}:
                new[name] = renewed(name, state.value, wanted)
        swap_states({name: states[name] for name in new}, new)

    def expect(self: Any, names: Mapping[str, Any]) -> Callable[[], None]:
        """Have the traces of step functions that are among the names of arrays; returns the undo.

        Those that a file has and the learner has not are made, those of which it has none are
        zero when they are next needed.
        """
        held, own = self.etraces, self._compiled().names
        before = dict(held)
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

    def identity(self: Any) -> dict[str, Any]:
        """The rule, how it is run, and the samples it is mapped over."""
        rule = rule_identity(self.learning_rule, self.rule)
        return {**rule, "vjp_method": self.vjp_method, "vmap": self.samples}

    def check_optimizer(self, optimizer: Any) -> None:
        """Any optimizer will do: of optax, with states, or a tree of its arrays."""

    def _named_states(self: Any) -> dict[str, brainstate.State]:
        if not self.is_compiled:
            raise not_compiled(f"{self.title} is saved or loaded")
        trained = {id(s) for s in self.param_states.values()}
        states: dict[str, brainstate.State] = {}
        for path, state in self.states().items():
            if path == ("optimizer_state",):
                continue
            inside = path[0] == "model4compile"
            group = WEIGHTS if id(state) in trained else STATES
            owner = "model" if inside else "learner"
            states["/".join([group, owner, *map(str, path[inside:])])] = state
        synthesizer = getattr(self, "synthesizer", None)
        if synthesizer is not None:
            found = synthesizer.states_dict()
            states |= {f"{STATES}/synthesizer/{k}": s for k, s in found.items()}
        if not any(s is brainstate.random.DEFAULT for s in states.values()):
            states[f"{STATES}/random/default"] = brainstate.random.DEFAULT
        if self.optimizer_state is not None:
            states[OPTIMIZER] = self.optimizer_state
        return states
