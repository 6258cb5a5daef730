"""What a user asks about control flow: which bodies stay closed, and what to do about that."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._errors import CompilationError, dotted, error, type_error, value_error
from ..program import Equation, deep_equations
from ._reach import bits_of, reach
from ._sites import Site
from ._step import Step

_CHOICES = {
    "cond": ("convert", "opaque"),
    "while_hidden": ("opaque-fwd", "error"),
    "etp_in_control_flow": ("error", "exclude"),
    "scan_descent": ("auto", "off"),
}


@dataclass(frozen=True, slots=True)
class ControlFlowPolicy:
    """Which control flow around operators may be followed; the default follows all of it.

    Without a policy operators inside `cond` and `scan` are traced as they stand, whatever their
    length, so a policy only ever takes traces away: a weight in a closed body keeps its exact
    gradient within the step, the report says so, and no other gradient changes. An operator inside
    a `while_loop` is refused in any case. `UORO` needs no traces of operators: there a policy can
    only raise errors.

    Args:
        cond: 'convert' follows operators in branches, 'opaque' closes the branches.
        scan_unroll_limit: with `scan_descent='off'`, loops up to this length are followed;
            without effect otherwise.
        while_hidden: 'error' refuses a step in which a `while_loop` computes a hidden state.
        etp_in_control_flow: for operators in closed bodies, 'error' raises `CompilationError` and
            names all of them, 'exclude' leaves them without a trace.
        scan_descent: 'auto' follows operators in loops, 'off' closes loops longer than
            `scan_unroll_limit`.
        fixpoint_iteration_limit: accepted, without effect: nothing is rewritten.

    Raises:
        ValueError: a field has an unknown value.
        TypeError: a limit is not an integer.

    Example:
        >>> import braintrace
        >>> braintrace.ControlFlowPolicy(cond='opaque', etp_in_control_flow='exclude').cond
        'opaque'
    """

    cond: str = "convert"
    scan_unroll_limit: int = 16
    while_hidden: str = "opaque-fwd"
    etp_in_control_flow: str = "error"
    scan_descent: str = "auto"
    fixpoint_iteration_limit: int = 64

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise value_error(
                    f"ControlFlowPolicy: {name}={getattr(self, name)!r}.",
                    why=f"the values are {', '.join(map(repr, choices))}",
                    do="choose one of them",
                )
        for name, least in (("scan_unroll_limit", 0), ("fixpoint_iteration_limit", 1)):
            value = getattr(self, name)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not whole or value < least:
                raise error(ValueError if whole else TypeError)(
                    f"ControlFlowPolicy: {name}={value!r}.",
                    why="it is a number of iterations",
                    do=f"pass an integer >= {least}",
                )


def check_policy(policy: Any) -> ControlFlowPolicy | None:
    """Accept a policy or None."""
    if policy is not None and not isinstance(policy, ControlFlowPolicy):
        raise type_error(
            f"control_flow has type {type(policy).__name__}.",
            why="it says what to do about operators in branches and loops",
            do="pass a braintrace.ControlFlowPolicy, or leave it out",
        )
    return policy


def close_bodies(policy: ControlFlowPolicy | None, step: Step, sites: Sequence[Site]) -> list[Site]:
    """The sites, those in closed bodies marked."""
    if policy is None:
        return list(sites)
    if policy.while_hidden == "error":
        _refuse_while(step)
    sites = [replace(s, closed=_closed(policy, s)) for s in sites]
    offenders = [s for s in sites if s.closed is not None]
    if offenders and policy.etp_in_control_flow == "error":
        leaves = [i for s in offenders for v in s.leaves.values() for i in v]
        names = [dotted(step.params[i].path) for i in leaves]
        raise error(CompilationError)(
            f"operators of {', '.join(dict.fromkeys(names))} are inside closed control flow.",
            where=_lines([s.equation for s in offenders]),
            why=f"control_flow={policy}",
            do="leave control_flow out to trace them, or pass etp_in_control_flow='exclude' to "
            "learn them within the step only",
        )
    return sites


def _closed(policy: ControlFlowPolicy, site: Site) -> Equation | None:
    for level in site.levels:
        if level.length is None:
            closed = policy.cond == "opaque"
        else:
            closed = policy.scan_descent == "off" and level.length > policy.scan_unroll_limit
        if closed:
            return level.equation
    return None


def _refuse_while(step: Step) -> None:
    loops = [e for e in deep_equations(step.program) if e.name == "while"]
    seeds = {v: 1 << i for i, e in enumerate(loops) for v in e.outputs}
    bits = reach(step.program, seeds)
    masks = {leaf.path: bits_of(step.exit(leaf), bits) for leaf in step.hidden}
    offenders = [e for i, e in enumerate(loops) if any(m >> i & 1 for m in masks.values())]
    if offenders:
        names = ", ".join(dotted(path) for path, mask in masks.items() if mask)
        raise error(CompilationError)(
            f"a while_loop computes {names}.",
            where=_lines(offenders),
            why="control_flow=ControlFlowPolicy(while_hidden='error')",
            do="use a loop with a fixed number of iterations, or leave while_hidden out",
        )


def _lines(equations: Sequence[Equation]) -> str:
    return ", ".join(dict.fromkeys(filter(None, (e.where() for e in equations))))
