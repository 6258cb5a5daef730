"""What a rule takes besides the loss: keywords of a call, and a learning signal of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._errors import type_error, value_error
from ..graph import HiddenGroup
from ..program import PyTree
from ..rules import LearningRule

Array = jax.Array


class SignalMixin:
    """Keywords for the rule, and the hook for a learning signal."""

    takes: tuple[str, ...] = ()  # keyword arguments of a call that are for the rule
    signals: tuple[str, ...] = ("symmetric", "random_feedback")  # that a config may ask for
    windows: str | None = None  # why windows are refused, if they are
    vjp_method: str
    title: str
    learning_rule: LearningRule
    _compiled: Callable[[], Any]

    @property
    def _overrides_signal(self) -> bool:
        return type(self).learning_signal is not SignalMixin.learning_signal

    @property
    def _has_signal(self) -> bool:
        return self._overrides_signal or self.learning_rule.record.signal is not None

    def _check_signal(self) -> None:
        """Refuse windows and signals that the rule has no place for."""
        reason = self.windows
        if reason is None and self.takes:
            reason = "what a call passes to the rule belongs to its steps"
        if reason is not None and self.vjp_method == "multi-step":
            raise value_error(
                f"{self.title} has no windows (vjp_method='multi-step').",
                why=f"{reason}; inside a window reverse mode is the only signal",
                do="use vjp_method='single-step'",
            )
        if self._overrides_signal and not self.learning_rule.record.takes_signal:
            raise type_error(
                f"{self.title} has a learning signal and no trace for it.",
                why="this rule carries derivatives to the loss, not traces to a signal",
                do="make it from D_RTRL, pp_prop or SnAp",
            )

    def _of_rule(self) -> dict[str, PyTree]:
        """The arrays that the rule reads, the same at every step."""
        return self.signal_values() if self._has_signal else {}

    def _arguments(self, args: tuple, kwargs: dict[str, PyTree]) -> tuple[tuple, dict[str, PyTree]]:
        """The arguments of a call as the model and the rule take them."""
        return args, kwargs

    def _check_extra(self, extra: dict[str, PyTree]) -> None:
        """Refuse a call without what the rule needs."""
        self._compiled().plan.check_call(extra)

    def _extra(self, kwargs: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """The keyword arguments of the model, and those that are for the rule."""
        mine = {k: kwargs[k] for k in self.takes if kwargs.get(k) is not None}
        return {k: v for k, v in kwargs.items() if k not in self.takes}, mine

    def learning_signal(
        self, group: HiddenGroup, cotangent: Array, state: Array, extra: dict[str, PyTree]
    ) -> Array:
        """The signal that meets the traces of a group; a class may put its own here.

        All arrays have a leading axis of steps and the shape (*varshape, num_state) of the group
        after it. In windows the signal meets the traces where the window enters. It is compiled
        once: what it reads from `self` must stay the same. Arrays that change belong into
        `signal_values`.

        Args:
            group: the hidden group.
            cotangent: the loss's own signal, its derivative by the states.
            state: the states after each step.
            extra: what the learner was called with by the names in `takes`, with a leading axis of
                steps; and `signal_values()`, without one.
        """
        of_group = self.learning_rule.signal
        return cotangent if of_group is None else of_group(group, cotangent, state, extra)

    def signal_values(self) -> dict[str, PyTree]:
        """Arrays that `learning_signal` reads from `extra`, as they are at each call."""
        return dict(self.learning_rule.values)
