"""The states to differentiate: one, a list or a dict of them, and the arrays in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
from jax import Array

from .._errors import dotted, type_error, value_error
from ..frontend import ModuleInfo, States, assign, floating, in_states
from ..graph import Path
from ..program import PyTree

State: TypeAlias = brainstate.State
StateTree: TypeAlias = Any  # a State, a list or a dict of them


@dataclass(frozen=True, eq=False, slots=True)
class WeightTree:
    """States in a container of the user, and trees that have something for each in its place.

    Attributes:
        keys: of the states in their container, in order.
        states: these.
        container: dict, or the type of a list; None for a state alone.
    """

    keys: tuple[Any, ...] = ()
    states: tuple[State, ...] = ()
    container: Any = dict

    @classmethod
    def of(cls, weights: StateTree, params: States) -> WeightTree:
        """The states to differentiate, checked; None stands for all floating ones of `params`."""
        weights = floating(params) if weights is None else weights
        if isinstance(weights, (list, tuple)):
            tree = cls(tuple(range(len(weights))), tuple(weights), type(weights))
        elif hasattr(weights, "values"):
            tree = cls(tuple(weights), tuple(weights.values()))
        else:
            tree = cls((0,), (weights,), None)
        if not tree.states or not all(isinstance(w, brainstate.State) for w in tree.states):
            names = [w for w in tree.states if isinstance(w, str)]
            raise (type_error if tree.states else value_error)(
                f"weights is {weights!r}.",
                why="it holds the states to differentiate",
                do="pass a State, a list or a dict of them, or nothing for all parameters; "
                + _choices(params, names),
            )
        bad = {
            name: w
            for name, w in tree.named({}).items()
            if not isinstance(w, brainstate.ParamState) or not floating({name: w})
        }
        if bad:
            kinds = (f"{dotted(n)} (a {type(w).__name__} of {_kinds(w)})" for n, w in bad.items())
            raise value_error(
                f"no weight: {', '.join(kinds)}.",
                why="a weight is a brainstate.ParamState of floating numbers; other states change "
                "from step to step or have no gradient",
                do=_choices(params, map(dotted, bad)),
            )
        return tree

    def named(self, paths: States) -> dict[Path, State]:
        """The states by their path; those that are no part of the model by their key."""
        path_of = {id(s): path for path, s in paths.items()}
        keys = self.keys if self.container is dict else [("weights", i) for i in self.keys]
        own = [key if isinstance(key, tuple) else (key,) for key in keys]
        return {path_of.get(id(s), k): s for s, k in zip(self.states, own, strict=True)}

    def values(self) -> PyTree:
        """The values of the states."""
        return self.joined([s.value for s in self.states])

    def parts(self, tree: PyTree) -> list[PyTree]:
        """What a tree has for each of the states."""
        return [tree] if self.container is None else [tree[k] for k in self.keys]

    def leaves(self, tree: PyTree) -> list[PyTree]:
        """The arrays of a tree, in the order of the states."""
        return [a for part in self.parts(tree) for a in jax.tree.leaves(part)]

    def arrays(self) -> list[Array]:
        """The arrays of the states."""
        return [a for s in self.states for a in jax.tree.leaves(s.value)]

    def tree(self, leaves: Sequence[Array]) -> PyTree:
        """The inverse of `leaves`."""
        items = iter(leaves)
        trees: list[Any] = [jax.tree.structure(s.value) for s in self.states]
        return self.joined([t.unflatten([next(items) for _ in range(t.num_leaves)]) for t in trees])

    def write(self, leaves: Sequence[Array]) -> None:
        """Give the states new arrays."""
        assign(in_states((*at, a) for at, a in zip(self.places(), leaves, strict=True)))

    def places(self) -> list[tuple[State, int]]:
        """Of every array its state, and its number there."""
        return [(s, i) for s in self.states for i in range(len(jax.tree.leaves(s.value)))]

    def joined(self, parts: Sequence[Any]) -> PyTree:
        """A tree of something for each of the states."""
        if self.container is None:
            return parts[0]
        pairs = zip(self.keys, parts, strict=True)
        return dict(pairs) if self.container is dict else self.container(parts)


@dataclass(frozen=True, eq=False, slots=True)
class Differentiated:
    """The weights of a step: where each of their arrays is among the parameters of the step.

    An array that the step does not use has the place None: its gradient is zero.
    """

    weights: WeightTree
    places: tuple[int | None, ...]

    @classmethod
    def of(cls, weights: WeightTree, info: ModuleInfo) -> Differentiated:
        at = {(id(info.states[p.path]), p.index): i for i, p in enumerate(info.step.params)}
        return cls(weights, tuple(at.get((id(s), i)) for s, i in weights.places()))

    @property
    def wanted(self) -> tuple[int, ...]:
        """The parameters of the step whose gradients are wanted."""
        return tuple(i for i in self.places if i is not None)

    def gradients(self, found: Sequence[Array]) -> list[Array]:
        """The gradients by all arrays, from those by `wanted`."""
        if None not in self.places:
            return list(found)
        rest, pairs = iter(found), zip(self.places, self.weights.arrays(), strict=True)
        return [jnp.zeros_like(v) if i is None else next(rest) for i, v in pairs]

    def unused(self) -> list[Array]:
        """The arrays that the step does not use."""
        pairs = zip(self.places, self.weights.arrays(), strict=True)
        return [v for i, v in pairs if i is None]

    def leaves(self, trained: Sequence[Array], unused: Sequence[Array]) -> list[Array]:
        """All arrays, from those of the step and the others."""
        rest = iter(unused)
        return [next(rest) if i is None else trained[i] for i in self.places]

    def placed(
        self, leaves: Sequence[Array], trained: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """The inverse of `leaves`; parameters that are no weights stay."""
        new, rest = list(trained), []
        for i, value in zip(self.places, leaves, strict=True):
            if i is None:
                rest.append(value)
            else:
                new[i] = value
        return new, rest


def check_read(weights: States, params: States, read: Iterable[State]) -> None:
    """Refuse weights, by name, that neither the model has nor a step function reads."""
    used = {id(s) for s in (*params.values(), *read)}
    bad = [name for name, s in weights.items() if id(s) not in used]
    if bad:
        raise value_error(
            f"weights holds {', '.join(map(dotted, bad))}, which nothing reads.",
            why="it is no parameter of the model, and step_fn does not use it: its gradient would "
            "be zero",
            do=_choices(params, map(dotted, bad)),
        )


def _kinds(state: State) -> str:
    return ", ".join(str(jnp.result_type(a)) for a in jax.tree.leaves(state.value)) or "nothing"


def _choices(params: States, names: Iterable[str]) -> str:
    """What may be meant: the parameters of the model, those like the names first."""
    names_of_all = [dotted(path) for path in floating(params)]
    near = [m for n in names for m in get_close_matches(n, names_of_all, n=1)]
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}choose among learner.param_states: {', '.join(names_of_all)}"
