"""What surrounds a step and is differentiated with it: found, named, refused or warned about.

The derivative of a call by its inputs, and by what the step closes over, is that within the step.
An encoder before the call therefore has no memory, whatever the rule: what its earlier outputs did
to the state is left out. That is a definition, not an error, but few users mean it; so it is said.

Only JAX knows what is differentiated. A function with a derivative of its own is asked for it where
its argument has one, and only there: under `grad` at once, under `jit` when that is differentiated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from .._errors import CompilationError, dotted, message, warn
from ..program import PyTree, any_traced, is_traced, line_of
from ._tree import is_floating, path_of

_WITHIN = (
    "its derivative is that within the step (or window), under every rule: what its values did to "
    "later steps is left out"
)
_MOVE = (
    "compute it inside of the step, from its parameters in params (an encoder, another learner's "
    "step; a value of the step before is a part of the state); or, if that derivative is wanted, "
)
_CONSTANT = "jax.lax.stop_gradient says that it is a constant"


class Outside:
    """Notes each differentiated value around a step once, or refuses it."""

    def __init__(self, step: Callable[..., Any], strict: bool):
        self.step, self.strict = step, strict
        self._said: set[str] = set()

    def inputs(self, inputs: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """The inputs of a call."""
        if not any_traced(inputs):
            return inputs
        names = _arguments(self.step, len(inputs))
        return tuple(
            self._watched(tree, f"the input {name} is differentiated.", name, _WITHIN, _MOVE)
            for name, tree in zip(names, inputs, strict=True)
        )

    def closed_over(self, consts: Sequence[Any], *functions: Callable[..., Any]) -> tuple[Any, ...]:
        """The constants of the program of a step, which calls these functions."""
        out = []
        for value in consts:
            if is_traced(value) and is_floating(value):
                name = _variable(value, functions) or f"a {value.dtype}{list(value.shape)}"
                what = f"the step closes over {name}, which is differentiated."
                value = self._watched(value, what, name, _WITHIN, _MOVE)
            out.append(value)
        return tuple(out)

    def state(self, state: PyTree) -> PyTree:
        """The state that a learner is started with."""
        if not any_traced(state):
            return state
        return self._watched(
            *(state, "the initial state {} is differentiated.", "state"),
            "the derivative of a learner by its carry is zero, under every rule",
            "init(params, lambda params: state, x) learns an initial state: its function is "
            "called in the first step; or ",
        )

    def _watched(self, tree: PyTree, what: str, default: str, why: str, do: str) -> PyTree:
        leaves, structure = tree_flatten_with_path(tree)
        out = []
        for keys, leaf in leaves:
            if is_traced(leaf) and is_floating(leaf):
                name = dotted(path_of(keys, default)) if keys else default
                shown = what.format(name) if "{}" in what else what.replace(default, name, 1)
                leaf = self._asked(leaf, shown, why, do)
            out.append(leaf)
        return jax.tree.unflatten(structure, out)

    def _asked(self, value: Any, what: str, why: str, do: str) -> Any:
        """`value`, with a derivative that speaks up when it is asked for."""

        @jax.custom_jvp
        def same(value: Any) -> Any:
            return value

        def differentiated(primals: Any, tangents: Any) -> Any:
            self._say(what, why, do)
            return primals[0], tangents[0]

        same.defjvp(differentiated, symbolic_zeros=True)
        return same(value)

    def _say(self, what: str, why: str, do: str) -> None:
        where = line_of(self.step)
        if self.strict:
            do += f"leave out strict=True; {_CONSTANT}"
            raise CompilationError(message(f"strict=True, and {what}", where=where, why=why, do=do))
        if what not in self._said:
            self._said.add(what)
            warn(what, where=where, why=why, do=f"{do}ignore this; {_CONSTANT}")


def _arguments(step: Callable[..., Any], count: int) -> list[str]:
    """What the step calls its inputs."""
    try:
        parameters = list(inspect.signature(step).parameters.values())[2:]
    except (TypeError, ValueError):  # some builtins have none
        parameters = []
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL][:count]
    return [*names, *(str(i + 1) for i in range(len(names), count))]


def _variable(value: Any, functions: Sequence[Callable[..., Any]]) -> str | None:
    """The variable of a function that holds a value."""
    for function in functions:
        try:
            found = inspect.getclosurevars(inspect.unwrap(function))
        except (TypeError, ValueError):
            continue
        for name, held in {**found.globals, **found.nonlocals}.items():
            for keys, leaf in tree_flatten_with_path(held)[0]:
                if leaf is value:
                    return dotted(path_of((jax.tree_util.GetAttrKey(name), *keys), name))
    return None
