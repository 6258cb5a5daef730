"""Learner classes from the table of rules.

A class names its rule and the order of its arguments. Defaults and documentation of an argument are
those of the function that makes the rule, or, for what every learner has, those below.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any, Self

import brainstate

from .._errors import type_error
from ..graph import MOST_ENTRIES
from ..learner import Learner
from ..program import PyTree
from ..rules import (
    BY_NAME,
    LearningRule,
    check_config,
    crossings_of,
    rule_of,
    trace_type,
    with_signal,
)

# The arguments that learners have beside their rule's: default and documentation.
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "name": (None, "name of the learner."),
    "vjp_method": (
        "single-step",
        "'single-step', or 'multi-step' for exact gradients inside windows.",
    ),
    "fast_solve": (True, "accepted; there is one path."),
    "chunked_trace": (True, "accepted; there is one path."),
    "control_flow": (
        None,
        "which control flow around operators stays closed, none by default.",
    ),
    "config": (None, "other coordinates of the rule, with traces of the same layout."),
    "random_feedback_key": (None, "seed or key of random feedback, where the config has it."),
    "feedback_scale": (
        1.0,
        "of the random operands' entries, relative to 1 / sqrt(outputs).",
    ),
    "snap_max_jacobian_elements": (
        MOST_ENTRIES,
        "how many entries the Jacobian of one relation may have.",
    ),
    "memory_limit": (
        None,
        "bytes that the traces may need, None for no limit; more is refused before it\n"
        "        is allocated.",
    ),
    "modulator": (None, "used in calls without one."),
    "synthesizer": (None, "a `SyntheticGradient`, or attach one after compiling."),
}


class ETraceVjpAlgorithm(Learner):
    """A learner whose gradient is taken by reverse mode inside a step or a window."""


class RuleLearner(ETraceVjpAlgorithm):
    """A learner of a rule that is a value.

    Args:
        model: the network, one step in `update`, states initialised.
        rule: the rule, a value of `braintrace.rules`.
        name: name of the learner.
        vjp_method: 'single-step', or 'multi-step' for exact gradients inside windows.
        control_flow: which control flow around operators stays closed, none by default.
        memory_limit: bytes that the traces may need; None takes the rule's own limit.
    """

    _row: Any = None  # of the table of rules

    def __init_subclass__(
        cls,
        rule: str | None = None,
        arguments: str | None = None,
        attributes: str = "",
        **defaults: Any,
    ) -> None:
        """Make the constructor of a rule's class.

        Args:
            cls: the class.
            rule: the name of its rule in the table.
            arguments: the names of its arguments in order, `*` before those by name only.
            attributes: those that its learners have as attributes.
            **defaults: of arguments, where they are not the rule's.
        """
        super().__init_subclass__()
        if rule is None or arguments is None:
            return
        cls._row, cls._attributes = BY_NAME[rule], tuple(attributes.split())
        options = inspect.signature(cls._row.make).parameters
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(n, kind) for n in ("self", "model")]
        for name in arguments.split():
            if name == "*":
                kind = inspect.Parameter.KEYWORD_ONLY
                continue
            default = options[name].default if name in options else _ARGUMENTS[name][0]
            parameters.append(inspect.Parameter(name, kind, default=defaults.get(name, default)))
        signature = inspect.Signature(parameters)

        def __init__(self: Any, *args: PyTree, **kwargs: PyTree) -> None:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise _misfit(cls.__name__, signature, kwargs, str(error)) from None
            bound.apply_defaults()
            values = dict(bound.arguments)
            _, model = values.pop("self"), values.pop("model")
            self._set_up(model, self._rule_of(values), values)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[method-assign]
        cls.__doc__ = _documented(cls, list(signature.parameters)[1:])

    @classmethod
    def of(cls, model: brainstate.nn.Module, rule: LearningRule, **arguments: Any) -> Self:
        """The learner of a rule that is a value."""
        learner = cls.__new__(cls)
        learner._set_up(model, rule, arguments)
        return learner

    def _rule_of(self, arguments: dict[str, Any]) -> LearningRule:
        """The rule with these arguments of the class."""
        options = inspect.signature(self._row.make).parameters
        names = {"snap_max_jacobian_elements": "most_entries"}
        named = {names.get(k, k): v for k, v in arguments.items()}
        return self._row.make(**{k: v for k, v in named.items() if k in options})

    def _set_up(
        self, model: brainstate.nn.Module, rule: LearningRule, arguments: dict[str, Any]
    ) -> None:
        entries = arguments.get("snap_max_jacobian_elements")
        rule = rule if entries is None else replace(rule, most_entries=entries)
        names = ("name", "vjp_method", "control_flow", "memory_limit")
        own = {"vjp_method": self._default("vjp_method")}
        own |= {k: arguments[k] for k in names if k in arguments}
        ETraceVjpAlgorithm.__init__(self, model, rule, **own)
        for name in getattr(self, "_attributes", ()):
            value = arguments.get(name, rule.options.get(name, self._default(name)))
            setattr(self, name, self._attribute(name, value))

    def _default(self, name: str) -> Any:
        parameter = inspect.signature(type(self).__init__).parameters.get(name)
        return _ARGUMENTS[name][0] if parameter is None else parameter.default

    def _attribute(self, name: str, value: Any) -> Any:
        """An argument as it is an attribute of the learner."""
        if name == "trace_dtype":
            return trace_type(value)
        parameter = inspect.signature(self._row.make).parameters.get(name)
        kind = "" if parameter is None else str(parameter.annotation)
        word = value is None or isinstance(value, str | tuple | list)
        if word or not kind.startswith(("float", "int")):
            return value
        return float(value) if kind.startswith("float") else int(value)


class TracesLearner(RuleLearner):
    """A learner of a rule whose coordinates a config may replace."""

    def _rule_of(self, arguments: dict[str, Any]) -> LearningRule:
        value, config = super()._rule_of(arguments), arguments.get("config")
        if config is None:
            return value
        check_config(type(self).__name__, config, value.config, self.signals)
        record = rule_of(
            config,
            key=arguments.get("random_feedback_key"),
            scale=arguments.get("feedback_scale", 1.0),
            trace_dtype=arguments.get("trace_dtype"),
        )
        if value.record.signal is not None:
            record = with_signal(record, value.record.signal)
        return replace(value, config=config, record=record, crossings=crossings_of(config))


# -------------------------------------------------------------------------------- documentation


def _documented(cls: type[RuleLearner], names: list[str]) -> str:
    """The docstring of a class, with its arguments before the example."""
    own = arguments_in(inspect.getdoc(cls._row.make) or "")
    lines = ["Args:", "    model: the network, one step in `update`, states initialised."]
    for name in names[1:]:
        lines.append(f"    {name}: {own[name] if name in own else _ARGUMENTS[name][1]}")
    head, mark, example = (inspect.cleandoc(vars(cls)["__doc__"])).partition("\nExample:\n")
    return "\n".join([head.rstrip(), "", *lines, ""]) + (mark + example)


def arguments_in(doc: str) -> dict[str, str]:
    """The arguments that a docstring lists, by name, with the text of each."""
    _, _, listed = doc.partition("Args:\n")
    listed = re.split(r"\n\n(?=\S)", listed)[0]
    return dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.M))


def _misfit(
    learner: str, signature: inspect.Signature, kwargs: dict[str, PyTree], error: str
) -> TypeError:
    """The error of arguments that a class does not have, or lacks."""
    names = [n for n in signature.parameters if n != "self"]
    unknown = sorted(set(kwargs) - set(names))
    return type_error(
        f"{learner} takes no {', '.join(unknown)}." if unknown else f"{learner}: {error}.",
        why=f"its arguments are {', '.join(names)}",
        do="pass these",
    )
