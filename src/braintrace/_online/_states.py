"""What a learner remembers of the carries and inputs that it saw, so that errors can name them.

A state that was changed outside of the learner has traces of another state, and nothing in the
arrays says so. But each call returns a new count of steps: one count beside other states is a carry
whose state was replaced. That can be seen of the last carry, where its arrays are not traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CompilationError, value_error, warn
from ..program import PyTree, any_traced, failing_line

_CHANGED = "the state of the carry is another one than that of its traces."
_WHY = (
    "they are derivatives of the state that the learner returned; beside another one they are "
    "derivatives of nothing"
)
_DO = (
    "carry.replace(state=state, traces='reset') begins a new sequence, traces='keep' says that the "
    "new state depends on the parameters as the old one did"
)


class States:
    """The arrays of the last carry, and the inputs that `init` was called with."""

    def __init__(self, strict: bool):
        self.strict = strict
        self._seen: PyTree = None
        self._last: tuple[ReferenceType, list[Callable[[], Any]]] | None = None
        self._warned = False

    def saw(self, inputs: tuple[PyTree, ...]) -> None:
        """The inputs of a step that `init` was called with."""
        self._seen = jax.tree.map(_shown, inputs)

    def forget(self) -> None:
        self._seen = self._last = None

    def returned(self, carry: Any) -> None:
        """A carry that a call returns."""
        held = [carry.steps, *jax.tree.leaves(carry.state)]
        can_be_held = not any_traced(held) and jax.tree.leaves(carry.traces)
        self._last = (ref(held[0]), list(map(_held, held[1:]))) if can_be_held else None

    def check(self, carry: Any) -> None:
        """Refuse, or name, a carry whose state was replaced."""
        if self._last is None or self._last[0]() is not carry.steps:
            return
        if isinstance(carry.steps, np.ndarray) and carry.steps == 0:
            return  # the traces are zero
        leaves = jax.tree.leaves(carry.state)
        if all(of() is leaf for of, leaf in zip(self._last[1], leaves, strict=False)):
            return
        if self.strict:
            raise value_error(f"strict=True, and {_CHANGED}", why=_WHY, do=_DO)
        if not self._warned:
            self._warned = True
            warn(_CHANGED, why=_WHY, do=_DO)

    def explained(self, inputs: tuple[PyTree, ...], make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, whose errors name inputs of other shapes than those that `init` saw."""
        seen, now = self._seen, jax.tree.map(_shown, inputs)
        if seen is None or jax.tree.leaves(seen) == jax.tree.leaves(now):
            return make

        def explaining(*args: Any) -> Any:
            try:
                return make(*args)
            except Exception as cause:
                if isinstance(cause, CompilationError):
                    raise
                shown = lambda tree: ", ".join(jax.tree.leaves(tree))
                raise value_error(
                    f"init saw {shown(seen)}, this step gets {shown(now)}.",
                    where=failing_line(cause),
                    why=f"with these inputs the step fails: {str(cause).partition(chr(10))[0]}",
                    do="give a sequence the axis of time first and samples second, (T, B, ...), "
                    "and a call or init one step of it, xs[0]; for another batch, start with init",
                ) from cause

        return explaining


def check_same_state(old: PyTree, new: PyTree) -> None:
    """Refuse a new state of another structure, shape or type."""
    kinds = [
        [(path, np.shape(a), jnp.result_type(a)) for path, a in tree]
        for tree in map(lambda t: jax.tree_util.tree_flatten_with_path(t)[0], (old, new))
    ]
    if kinds[0] != kinds[1]:
        shown = lambda tree: jax.tree.map(_shown, tree)
        raise value_error(
            f"the new state is {shown(new)}.",
            why=f"that of the carry is {shown(old)}",
            do="give it the same structure, shapes and types; for others start with init",
        )


def _held(leaf: Any) -> Callable[[], Any]:
    """What returns this leaf of a state as long as somebody else holds it; a string has no such."""
    return ref(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else lambda: leaf


def _shown(array: Any) -> str:
    return f"{jnp.result_type(array)}{list(np.shape(array))}"
