"""A step whose new hidden states take an additive perturbation: dL/dp is dL/dh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..frontend import ModuleInfo
from ..graph import HiddenGroup, Path, Step
from ..program import JaxVar, bind, evaluate, variable


@dataclass(frozen=True, eq=False, slots=True)
class HiddenPerturbation:
    """The step with `h = h_raw + p` at every hidden state; later readers in the step see `h`."""

    step: Step
    consts: tuple[Any, ...]
    perturb_hidden_states: tuple[Any, ...] = ()

    @property
    def perturb_vars(self) -> tuple[JaxVar, ...]:
        """Variables of the new hidden states."""
        return tuple(variable(self.step.exit(leaf)) for leaf in self.step.hidden)

    @property
    def perturb_hidden_paths(self) -> tuple[Path, ...]:
        return tuple(leaf.path for leaf in self.step.hidden)

    def init_perturb_data(self) -> list[Array]:
        """Zeros, one array per hidden state."""
        entries = [self.step.entry(leaf) for leaf in self.step.hidden]
        return [jnp.zeros(v.shape, v.dtype) for v in entries]

    def eval_jaxpr(self, inputs: Sequence[Array], perturb_data: Sequence[Array]) -> list[Array]:
        """Run the step on its flat inputs with the perturbations added."""
        step = self.step
        if len(perturb_data) != len(step.hidden):
            raise ValueError(f"expected {len(step.hidden)} perturbations, got {len(perturb_data)}.")
        exits = [step.exit(leaf) for leaf in step.hidden]
        computed = {o for eqn in step.program.equations for o in eqn.outputs}
        pairs = zip(exits, perturb_data, strict=True)
        own = {v: p for v, p in pairs if v in computed and exits.count(v) == 1}

        def apply(eqn, values):
            outs = zip(eqn.outputs, bind(eqn, values), strict=True)
            return [out + own[v] if v in own else out for v, out in outs]

        outs = evaluate(step.program, self.consts, inputs, apply)
        for leaf, p in zip(step.hidden, perturb_data, strict=True):
            # No equation of its own: an input passed on, a constant, a value of several states.
            if step.exit(leaf) not in own:
                outs[leaf.output] = outs[leaf.output] + p
        return outs

    def perturb_data_to_hidden_group_data(
        self, data: Sequence[Array], groups: Sequence[HiddenGroup]
    ) -> list[Array]:
        """Stack per-state arrays into one array per group."""
        if len(data) != len(self.step.hidden):
            raise ValueError(f"expected {len(self.step.hidden)} arrays, got {len(data)}.")
        return [g.concat_hidden([data[i] for i in g.leaves]) for g in groups]


def perturbed(minfo: ModuleInfo) -> HiddenPerturbation:
    """The step of a traced model with a perturbation added to every new hidden state."""
    states = tuple(minfo.states[leaf.path] for leaf in minfo.step.hidden)
    return HiddenPerturbation(minfo.step, minfo.consts, states)
