"""The state that holds a trace."""

from __future__ import annotations

from collections.abc import Sequence

import brainstate
import jax

from ..program import PyTree


class EligibilityTrace(brainstate.ShortTermState):
    """The trace of one operator, or a part of it: a pytree of arrays.

    A learner reads and writes it by `take` and `put`. Whoever reads or assigns `value` may hold the
    arrays, so that their memory is not reused (`seen`).
    """

    @classmethod
    def owned(cls, arrays: PyTree) -> EligibilityTrace:
        """A trace of arrays that nobody else holds."""
        trace = cls(arrays)
        trace.__dict__["seen"] = False
        return trace

    @property
    def value(self) -> PyTree:
        """The arrays."""
        self.__dict__["seen"] = True
        return brainstate.State.value.fget(self)

    @value.setter
    def value(self, new: PyTree) -> None:
        self.__dict__["seen"] = True
        brainstate.State.value.fset(self, new)

    def take(self) -> PyTree:
        """The arrays, for the learner."""
        return brainstate.State.value.fget(self)

    def put(self, new: PyTree) -> None:
        """New arrays, which nobody else holds; one that stays is held by whoever saw it."""
        before = {id(a) for a in jax.tree.leaves(self.take())} if self.seen else set()
        brainstate.State.value.fset(self, new)
        self.__dict__["seen"] = not before.isdisjoint(map(id, jax.tree.leaves(new)))

    @property
    def seen(self) -> bool:
        """Whether somebody may hold the arrays."""
        return vars(self).get("seen", True)


def taken(traces: Sequence[EligibilityTrace]) -> tuple[list[PyTree], bool]:
    """The arrays of traces, and whether somebody else may hold some."""
    return [trace.take() for trace in traces], any(trace.seen for trace in traces)
