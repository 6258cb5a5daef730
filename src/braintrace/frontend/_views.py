"""What a `ModuleInfo` shows of the step: JAX's own variables and jaxprs, computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import brainstate
import jax
from jax import Array
from jax.tree_util import PyTreeDef

from .._errors import dotted, value_error
from ..graph import Path, Step
from ..program import Atom, PyTree, closed_jaxpr_of, evaluate, jaxpr_of, operand_of, variable

JaxVar: TypeAlias = Any  # a variable of a jaxpr


class ModuleViews:
    """What a `ModuleInfo` shows of the step."""

    __slots__ = ()
    model: brainstate.nn.Module
    step: Step
    consts: tuple[Array, ...]
    states: Mapping[Path, brainstate.State]
    arg_tree: PyTreeDef
    out_tree: PyTreeDef

    @property
    def closed_jaxpr(self) -> Any:
        """The step: from arguments and states to results and states."""
        return closed_jaxpr_of(self.step.program, self.consts)

    @property
    def jaxpr(self) -> Any:
        """The jaxpr of `closed_jaxpr`."""
        return jaxpr_of(self.step.program)

    @property
    def num_var_out(self) -> int:
        """How many of the jaxpr's results are those of the model."""
        return self.step.n_outs

    @property
    def num_var_state(self) -> int:
        """How many of the jaxpr's results are new states."""
        return len(self.step.program.outputs) - self.step.n_outs

    @property
    def compiled_model_states(self) -> tuple[brainstate.State, ...]:
        """The states that the step touches, in the order of the jaxpr."""
        return tuple(self.states.values())

    @property
    def retrieved_model_states(self) -> Mapping[Path, brainstate.State]:
        """All states of the model, by path."""
        return brainstate.graph.states(self.model)

    @property
    def state_tree_invars(self) -> tuple[PyTree, ...]:
        """For each of `compiled_model_states`, its value with variables in place of arrays."""
        return self._trees(self.step.program.inputs[self.step.n_args :])

    @property
    def state_tree_outvars(self) -> tuple[PyTree, ...]:
        """The same after the step."""
        return self._trees(self.step.program.outputs[self.step.n_outs :])

    @property
    def hidden_invars(self) -> list[JaxVar]:
        """Variables of the hidden states before the step."""
        return [variable(self.step.entry(leaf)) for leaf in self.step.hidden]

    @property
    def hidden_outvars(self) -> list[JaxVar]:
        """Variables of the hidden states after the step."""
        return [variable(self.step.exit(leaf)) for leaf in self.step.hidden]

    @property
    def weight_invars(self) -> list[JaxVar]:
        """Variables of the parameters."""
        return [variable(self.step.entry(leaf)) for leaf in self.step.params]

    @property
    def hidden_path_to_invar(self) -> dict[Path, JaxVar]:
        """Variable of every hidden state before the step."""
        return {leaf.path: variable(self.step.entry(leaf)) for leaf in self.step.hidden}

    @property
    def hidden_path_to_outvar(self) -> dict[Path, JaxVar]:
        """Variable of every hidden state after the step."""
        return {leaf.path: variable(self.step.exit(leaf)) for leaf in self.step.hidden}

    @property
    def invar_to_hidden_path(self) -> dict[JaxVar, Path]:
        """The hidden state of every variable before the step."""
        return {v: path for path, v in self.hidden_path_to_invar.items()}

    @property
    def outvar_to_hidden_path(self) -> dict[JaxVar, Path]:
        """A hidden state of every variable after the step."""
        return {v: path for path, v in self.hidden_path_to_outvar.items()}

    @property
    def hidden_outvar_to_invar(self) -> dict[JaxVar, JaxVar]:
        """From variables after to variables before the step."""
        return dict(zip(self.hidden_outvars, self.hidden_invars, strict=True))

    @property
    def weight_path_to_invars(self) -> dict[Path, tuple[JaxVar, ...]]:
        """Variables of every parameter's leaves."""
        out: dict[Path, tuple[JaxVar, ...]] = {}
        for leaf, var in zip(self.step.params, self.weight_invars, strict=True):
            out[leaf.path] = (*out.get(leaf.path, ()), var)
        return out

    @property
    def invar_to_weight_path(self) -> dict[JaxVar, Path]:
        """The parameter of every variable of one."""
        return {v: path for path, vs in self.weight_path_to_invars.items() for v in vs}

    def jaxpr_call(
        self, *args: PyTree, old_state_vals: Sequence[PyTree] | None = None, **kwargs: PyTree
    ) -> tuple[PyTree, dict[Path, PyTree], dict[Path, PyTree], dict[JaxVar, Array]]:
        """Run the step without storing anything.

        Args:
            *args: arguments of the model.
            old_state_vals: values of `compiled_model_states`, the present ones by default.
            **kwargs: keyword arguments of the model.

        Returns:
            the results, hidden states and other states after the step by path, and everything the
            step computed, by variable.

        Raises:
            ValueError: arguments or states do not have the structure the step was traced with.
        """
        states = self.compiled_model_states
        values = [s.value for s in states] if old_state_vals is None else list(old_state_vals)
        flat, tree = jax.tree.flatten((args, kwargs))
        structure: PyTreeDef = jax.tree.structure([s.value for s in states])
        if tree != self.arg_tree or structure != jax.tree.structure(values):
            raise value_error(
                "jaxpr_call: arguments or states have another structure than in the trace.",
                why=f"it was traced for {self.arg_tree}, and got {tree}; states are "
                f"{', '.join(map(dotted, self.states))}",
                do="pass what extract_module_info was called with, and one value per state of "
                "compiled_model_states",
            )
        program, n = self.step.program, self.step.n_outs
        computed = [v for eqn in program.equations for v in eqn.outputs]
        every = (*program.consts, *program.inputs, *computed)
        wide = replace(program, outputs=(*program.outputs, *every))
        outs = evaluate(wide, self.consts, [*flat, *jax.tree.leaves(values)])
        split_at = len(program.outputs)
        new = dict(zip(self.states, jax.tree.unflatten(structure, outs[n:split_at]), strict=True))
        hidden = {leaf.path for leaf in self.step.hidden}
        others = {leaf.path for leaf in self.step.others} - hidden
        return (
            jax.tree.unflatten(self.out_tree, outs[:n]),
            {path: value for path, value in new.items() if path in hidden},
            {path: value for path, value in new.items() if path in others},
            dict(zip(map(variable, every), outs[split_at:], strict=True)),
        )

    def _trees(self, atoms: Sequence[Atom]) -> tuple[PyTree, ...]:
        values = [s.value for s in self.compiled_model_states]
        return tuple(jax.tree.unflatten(jax.tree.structure(values), map(operand_of, atoms)))
