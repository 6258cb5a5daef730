"""What a rule does with a model, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import assert_never

from .._errors import dotted
from ..graph import ParameterReport

_FEW = 3  # names that are written out


def summary(parameters: Iterable[ParameterReport], rule: str = "") -> str:
    """How many parameters are exact, and what the gradients of the others leave out."""
    every = list(parameters)
    reports = [p for p in every if p.how != "none"]
    total, exact = len(reports), sum(p.exact for p in reports)
    which = f"all {total}" if 1 < total == exact else f"{exact} of {total}"
    equal = "parameters are exact (equal BPTT)"
    if exact == 1:
        equal = f"parameter{'s' * (total > 1)} is exact (equals BPTT)"
    groups: dict[_Left, list[ParameterReport]] = {}
    for p in (p for p in every if p.silent or (p.how != "none" and not p.exact)):
        groups.setdefault(_kind(p), []).append(p)
    parts = [
        f"{listed([dotted(p.path) for p in groups[kind]])} {_words(kind, groups[kind])}"
        for kind in _Left
        if kind in groups
    ]
    return (f"{rule}: " if rule else "") + "; ".join([f"{which} {equal}", *parts]) + "."


class _Left(Enum):
    """What a gradient leaves out: everything, earlier steps, paths through weights, or else."""

    ALL, EARLIER, THROUGH, OTHER = range(4)


def _kind(p: ParameterReport) -> _Left:
    if p.silent is not None:
        return _Left.ALL
    if p.how == "within-step":
        return _Left.EARLIER
    through = all(d.way is not None and d.way.via is not None for d in p.dropped)
    return _Left.THROUGH if through else _Left.OTHER


def _words(kind: _Left, group: Sequence[ParameterReport]) -> str:
    one = len(group) == 1
    ways = (d.way for p in group for d in p.dropped if d.way is not None)
    weights = listed(list(dict.fromkeys(dotted(w.via) for w in ways if w.via is not None)))
    match kind:
        case _Left.ALL:
            return "gets no gradient" if one else "get no gradient"
        case _Left.EARLIER:
            past = f", without what passes through {weights}" if weights else ""
            return f"{'has' if one else 'have'} the gradient of each step alone{past}"
        case _Left.THROUGH:
            return f"leave{'s' * one} out the paths to other states through {weights}"
        case _Left.OTHER:
            reasons = listed(list(dict.fromkeys(p.dropped[0].text for p in group)))
            return f"leave{'s' * one} out {reasons}"
        case _:
            assert_never(kind)


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    few = names if len(names) <= _FEW + 1 else names[:_FEW]
    more = [f"{len(names) - len(few)} more"] if len(few) < len(names) else []
    *first, last = [*few, *more] or [""]
    return f"{', '.join(first)} and {last}" if first else last
