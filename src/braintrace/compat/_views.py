"""Attributes of the published records: jaxprs and variables of the step, computed.

`published` looks an attribute up in the class here that has the name of the record's. A jaxpr is
the part of the step between two sets of its variables. What else it reads, and the values at which
a rule's paths end (outputs of trained operators, results of equations that mix units), are its
constants: `ModuleInfo.jaxpr_call` returns all of them by variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import PyTreeDef

from .._errors import NotSupportedError, dotted, message, value_error
from ..graph import Path
from ..graph._groups import Followed
from ..graph._operands import operand_equations
from ..graph._step import join, split
from ..program import (
    Atom,
    Equation,
    Jaxpr,
    JaxVar,
    Literal,
    Params,
    Primitive,
    Program,
    PyTree,
    Var,
    bind_forward,
    closed_jaxpr_of,
    evaluate,
    jaxpr_of,
    opened,
    operand_of,
    section,
    variable,
)
from ._traces import Learner as Learner

Values = Sequence[Array] | Mapping[JaxVar, Array]


class ModuleInfo:
    """What a `ModuleInfo` shows of the step."""

    @property
    def closed_jaxpr(self: Any) -> Any:
        """The step: from arguments and states to results and states."""
        return closed_jaxpr_of(self.step.program, self.consts)

    @property
    def jaxpr(self: Any) -> Any:
        """The jaxpr of `closed_jaxpr`."""
        return jaxpr_of(self.step.program)

    @property
    def num_var_out(self: Any) -> int:
        """How many of the jaxpr's results are those of the model."""
        return self.step.n_outs

    @property
    def num_var_state(self: Any) -> int:
        """How many of the jaxpr's results are new states."""
        return len(self.step.program.outputs) - self.step.n_outs

    @property
    def compiled_model_states(self: Any) -> tuple[brainstate.State, ...]:
        """The states that the step touches, in the order of the jaxpr."""
        return tuple(self.states.values())

    @property
    def retrieved_model_states(self: Any) -> Mapping[Path, brainstate.State]:
        """All states of the model, by path."""
        return brainstate.graph.states(self.model)

    @property
    def state_tree_invars(self: Any) -> tuple[PyTree, ...]:
        """For each of `compiled_model_states`, its value with variables in place of arrays."""
        return self._trees(self.step.program.inputs[self.step.n_args :])

    @property
    def state_tree_outvars(self: Any) -> tuple[PyTree, ...]:
        """The same after the step."""
        return self._trees(self.step.program.outputs[self.step.n_outs :])

    @property
    def hidden_invars(self: Any) -> list[JaxVar]:
        """Variables of the hidden states before the step."""
        return [variable(self.step.entry(leaf)) for leaf in self.step.hidden]

    @property
    def hidden_outvars(self: Any) -> list[JaxVar]:
        """Variables of the hidden states after the step."""
        return [variable(self.step.exit(leaf)) for leaf in self.step.hidden]

    @property
    def weight_invars(self: Any) -> list[JaxVar]:
        """Variables of the parameters."""
        return [variable(self.step.entry(leaf)) for leaf in self.step.params]

    @property
    def hidden_path_to_invar(self: Any) -> dict[Path, JaxVar]:
        """Variable of every hidden state before the step."""
        return {leaf.path: variable(self.step.entry(leaf)) for leaf in self.step.hidden}

    @property
    def hidden_path_to_outvar(self: Any) -> dict[Path, JaxVar]:
        """Variable of every hidden state after the step."""
        return {leaf.path: variable(self.step.exit(leaf)) for leaf in self.step.hidden}

    @property
    def invar_to_hidden_path(self: Any) -> dict[JaxVar, Path]:
        """The hidden state of every variable before the step."""
        return {v: path for path, v in self.hidden_path_to_invar.items()}

    @property
    def outvar_to_hidden_path(self: Any) -> dict[JaxVar, Path]:
        """A hidden state of every variable after the step."""
        return {v: path for path, v in self.hidden_path_to_outvar.items()}

    @property
    def hidden_outvar_to_invar(self: Any) -> dict[JaxVar, JaxVar]:
        """From variables after to variables before the step."""
        return dict(zip(self.hidden_outvars, self.hidden_invars, strict=True))

    @property
    def weight_path_to_invars(self: Any) -> dict[Path, tuple[JaxVar, ...]]:
        """Variables of every parameter's leaves."""
        out: dict[Path, tuple[JaxVar, ...]] = {}
        for leaf, var in zip(self.step.params, self.weight_invars, strict=True):
            out[leaf.path] = (*out.get(leaf.path, ()), var)
        return out

    @property
    def invar_to_weight_path(self: Any) -> dict[JaxVar, Path]:
        """The parameter of every variable of one."""
        return {v: path for path, vs in self.weight_path_to_invars.items() for v in vs}

    def jaxpr_call(
        self: Any, *args: PyTree, old_state_vals: Sequence[PyTree] | None = None, **kwargs: PyTree
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

    def _trees(self: Any, atoms: Sequence[Atom]) -> tuple[PyTree, ...]:
        values = [s.value for s in self.compiled_model_states]
        return tuple(jax.tree.unflatten(jax.tree.structure(values), map(operand_of, atoms)))


class HiddenGroup:
    """What a hidden group shows of the step."""

    @property
    def hidden_invars(self: Any) -> list[JaxVar]:
        """Variables of the group's states before the step."""
        return [variable(v) for v in self._entries]

    @property
    def hidden_outvars(self: Any) -> list[JaxVar]:
        """Variables of the group's states after the step."""
        step = self.followed.step
        return [variable(step.exit(step.hidden[i])) for i in self.leaves]

    @property
    def transition_jaxpr(self: Any) -> Jaxpr:
        """From the group's states before the step to those after it, along the followed paths.

        Raises:
            NotSupportedError: a path ends inside control flow or a custom derivative.
        """
        return jaxpr_of(self._transition)

    @property
    def transition_jaxpr_constvars(self: Any) -> list[JaxVar]:
        """What `transition_jaxpr` reads besides the states."""
        return [variable(v) for v in self._transition.consts]

    @property
    def is_diagonal_recurrence(self: Any) -> bool:
        """Whether each unit depends, within the group, on its own states only."""
        edges, offsets = self.followed.pattern.edges, self.followed.influence.offsets
        component = np.searchsorted(offsets, edges, side="right") - 1
        inside = np.isin(component, self.components).all(axis=1)
        place = edges[inside] - offsets[component[inside]]
        return bool((place[:, 0] == place[:, 1]).all())

    def state_transition(
        self: Any, hidden_vals: Sequence[Array], input_vals: Values
    ) -> list[Array]:
        """The group's states after the step.

        Args:
            hidden_vals: the states before it, in the order of `hidden_paths`.
            input_vals: what else it reads, in the order of `transition_jaxpr_constvars` or by
                variable.
        """
        part = self._transition
        return evaluate(part, arranged(part, input_vals), hidden_vals, bind_forward)

    transition = state_transition

    def diagonal_jacobian(self: Any, hidden_vals: Sequence[Array], input_vals: Values) -> Array:
        """The derivative of each unit's states by its own states, (*varshape, S, S).

        Takes the arguments of `state_transition`; a complex state counts as two.
        """
        moved, parts = self._real(hidden_vals, input_vals)
        n, shape = len(parts), self.varshape
        if self.is_diagonal_recurrence:
            ones = [[jnp.full_like(p, i == k) for k, p in enumerate(parts)] for i in range(n)]
            columns = [jax.jvp(moved, parts, tangents)[1] for tangents in ones]
            return jnp.stack([jnp.stack(column, -1) for column in columns], -1)
        size = prod(shape)
        full = self.full_jacobian(hidden_vals, input_vals).reshape((size, n, size, n))
        own = np.arange(size)
        return full[own, :, own].reshape((*shape, n, n))

    def full_jacobian(self: Any, hidden_vals: Sequence[Array], input_vals: Values) -> Array:
        """The derivative of the group's states by all of them, (*varshape, S, *varshape, S)."""
        moved, parts = self._real(hidden_vals, input_vals)
        rows = jax.jacfwd(moved, argnums=tuple(range(len(parts))))(*parts)
        return jnp.stack([jnp.stack(row, -1) for row in rows], len(self.varshape))

    def dict(self: Any) -> dict[str, Any]:
        """What the group consists of, by name."""
        names = ("index", "hidden_paths", "hidden_states", "hidden_invars", "hidden_outvars",
                 "transition_jaxpr", "transition_jaxpr_constvars",
                 "is_diagonal_recurrence")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def _entries(self: Any) -> list[Var]:
        step = self.followed.step
        return [step.entry(step.hidden[i]) for i in self.leaves]

    @property
    def _transition(self: Any) -> Program:
        return between(self.followed, self._entries, frozenset(self.components), self.leaves)

    def _real(
        self: Any, hidden_vals: Sequence[Array], input_vals: Values
    ) -> tuple[Callable[..., list[Array]], list[Array]]:
        """The transition between real components, and those of the states."""
        all_of_step = self.followed.tangent.components
        own = [
            replace(all_of_step[i], leaf=self.leaves.index(all_of_step[i].leaf))
            for i in self.components
        ]

        def moved(*parts: Array) -> list[Array]:
            return split(own, self.state_transition(join(own, parts, len(self.leaves)), input_vals))

        return moved, split(own, [jnp.asarray(v) for v in hidden_vals])


class HiddenParamOpRelation:
    """What a relation shows of the step."""

    @property
    def eqn_params(self: Any) -> Params:
        return self.site.equation.params

    @property
    def x_var(self: Any) -> JaxVar | Literal | None:
        """Variable of the operator's input, None if it has none."""
        return None if self.site.x is None else operand_of(self.site.x)

    @property
    def y_var(self: Any) -> JaxVar:
        """Variable of the operator's output."""
        return variable(self.site.y)

    x, y = x_var, y_var

    @property
    def trainable_vars(self: Any) -> Mapping[str, JaxVar | Literal]:
        """Variables of the operator's weights."""
        at = self.site.operator.positions
        return {k: operand_of(self.site.equation.inputs[i]) for k, i in at.items()}

    @property
    def trainable_processing_chains(self: Any) -> Mapping[str, tuple[Primitive, ...]]:
        """For each weight, the primitives that compute it from parameters, in order."""
        program = self._followed.step.program
        return {
            key: tuple(eqn.primitive for eqn in operand_equations(program, self.site, key))
            for key in self.trainable_paths
        }

    @property
    def y_to_hidden_group_jaxprs(self: Any) -> list[Jaxpr]:
        """For each hidden group, a jaxpr from the operator's output to the group's new states.

        Raises:
            NotSupportedError: the operator, or the end of a path, is inside control flow.
        """
        return [jaxpr_of(part) for part in self._tails]

    def y_to_hidden_groups(
        self: Any, y: Array, const_vals: Mapping[JaxVar, Array], concat_hidden_vals: bool = True
    ) -> list[Array] | list[list[Array]]:
        """The new states of each hidden group for an output of the operator.

        Args:
            y: the output.
            const_vals: what else the step computed, by variable.
            concat_hidden_vals: whether a group's states come as one array.
        """
        tails = zip(self.hidden_groups, self._tails, strict=True)
        states = [(g, evaluate(t, arranged(t, const_vals), [y], bind_forward)) for g, t in tails]
        return (
            [g.concat_hidden(v) for g, v in states]
            if concat_hidden_vals
            else [v for _, v in states]
        )

    @property
    def _followed(self: Any) -> Followed:
        return self.hidden_groups[0].followed

    @property
    def _tails(self: Any) -> list[Program]:
        if self.site.levels:
            raise NotSupportedError(not_apart(self.site.equation, "the operator itself"))
        followed = self._followed
        i = next(i for i, s in enumerate(followed.sites) if s.equation is self.site.equation)
        sources = frozenset(followed.tangent.tap_sources(i))
        return [between(followed, [self.site.y], sources, g.leaves) for g in self.hidden_groups]


def between(
    followed: Followed, inputs: Sequence[Var], sources: frozenset[int], leaves: Sequence[int]
) -> Program:
    """The part of the step from `inputs` to new states, along the paths that are followed.

    `sources` are the source indices of the inputs.
    """
    step, tangent = followed.step, followed.tangent
    cuts, origins = _cuts(followed, sources, leaves), tangent.origins
    components = [i for i, c in enumerate(tangent.components) if c.leaf in leaves]
    seeds = [v for i, v in enumerate(tangent.sources) if i in sources]
    ends = {o for e in cuts for o in e.outputs}
    live = section(tangent.program, seeds, [tangent.exits[i] for i in components], ends)
    reached = {origins.get(e) for e in live.equations}
    fixed = {s.y for s in followed.sites if not followed.crossing}
    for cut in cuts:
        origin = origins.get(cut)
        if origin is None or origin.bodies or origin in reached:
            raise NotSupportedError(not_apart(cut, "an equation that mixes units"))
        fixed.update(origin.outputs)
    exits = [step.exit(step.hidden[i]) for i in leaves]
    part = section(step.program, inputs, exits, fixed)
    if not followed.crossing:
        around = opened(part, {s.equation: -1 for s in followed.sites}.get)
        for eqn in around:
            raise NotSupportedError(not_apart(eqn, "a trained operator"))
    return part


def _cuts(followed: Followed, sources: frozenset[int], leaves: Sequence[int]) -> list[Equation]:
    """The equations at which paths from the sources to the states end."""
    pairs = zip(followed.tangent.components, followed.influence.lost, strict=True)
    lost = [cuts for component, cuts in pairs if component.leaf in leaves]
    return [
        cut.equation
        for i, cut in enumerate(followed.influence.cuts)
        if cut.sources & sources and any(i in m for m in lost)
    ]


def not_apart(eqn: Equation, what: str) -> str:
    return message(
        "the paths that the rule follows here are no jaxpr of their own.",
        where=eqn.where(),
        why=f"{what} is inside control flow or a custom derivative, part of which is followed",
        do="read the arrays instead: ETraceVjpGraphExecutor.solve_h2w_h2h_jacobian",
    )


def arranged(part: Program, values: Values) -> list[Array]:
    """Values of a part's constants: by variable, or in their order already."""
    if isinstance(values, Mapping):
        return [values[variable(v)] for v in part.consts]
    return list(values)
