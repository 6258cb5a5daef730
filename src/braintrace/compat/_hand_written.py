"""Parts of operators that the published packages had written by hand: here they are derived."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

from .._errors import meant, message
from ..ops import ETPPrimitive

# `init_<learning rule>` is one of them for every learning rule.
_NAMES = tuple("dt_to_t yw_to_w xy_to_dw fast_path pp_x_repr snap_anchor snap_adjacency".split())
_warned: WeakSet[ETPPrimitive] = WeakSet()  # operators whose rules are known not to be used


def taker(primitive: ETPPrimitive, name: str) -> Callable[..., None]:
    """What takes rules of an operator, all or one at a time: they are not used.

    For `primitive.register_etp_rules(xy_to_dw=rule)` and `primitive.register_xy_to_dw(rule)`; a
    warning says so, once per operator.

    Raises:
        AttributeError: there is no rule of this name.
    """
    rule = name.removeprefix("register_")
    if rule == "etp_rules":
        return lambda **rules: _not_used(primitive, rules)
    if _is_rule(rule):
        return lambda function: _not_used(primitive, {rule: function})
    near = _did_you_mean(rule, ("etp_rules", *_NAMES), "register_")
    raise AttributeError(f"{type(primitive).__name__} has no attribute {name!r}{near or '.'}")


def _not_used(primitive: ETPPrimitive, rules: Mapping[str, object]) -> None:
    for name, rule in rules.items():
        if not _is_rule(name):
            near = _did_you_mean(name, _NAMES)
            raise TypeError(f"an operator has no rule {name!r}{near or '.'}")
        if rule is not None and not callable(rule):
            raise TypeError(f"rule {name} of {primitive.name} is not callable: {rule!r}.")
    unused = [name for name, rule in rules.items() if rule is not None]
    if unused and primitive not in _warned:
        _warned.add(primitive)
        text = message(
            f"rules for {primitive.name} are not used: {', '.join(unused)}.",
            why="all of them are derived from the function that defines the operator",
            do="leave them out; to learn with another derivative, give that function one: "
            "jax.custom_vjp",
        )
        warnings.warn(text, stacklevel=3)


def _is_rule(name: str) -> bool:
    return name in _NAMES or name.startswith("init_")


def _did_you_mean(name: str, names: Sequence[str], prefix: str = "") -> str:
    near = meant(name, names)
    return "" if near is None else f"; did you mean {prefix + near!r}?"
