"""The operators that consume parameters, as a report lists them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..graph import Graph, Path


@dataclass(frozen=True, slots=True)
class Use:
    """Operators that consume the same parameters at the same line; `count` of them.

    `groups` are the state groups that their traces belong to, None if traces belong to parameters
    and not to operators.
    """

    operator: str
    line: str | None
    parameters: tuple[Path, ...]
    groups: tuple[int, ...] | None
    count: int = 1


def uses_of(graph: Graph, per_parameter: bool) -> tuple[Use, ...]:
    """The trained operators of a step; `per_parameter` says that traces belong to parameters."""
    relation_of = {r.site.equation: r for r in graph.relations}
    uses: Counter[tuple[str, str | None, tuple[Path, ...], tuple[int, ...] | None]] = Counter()
    for site in graph.sites:
        leaves = [i for v in site.leaves.values() for i in v]
        if not leaves:
            continue
        paths = tuple(dict.fromkeys(graph.step.params[i].path for i in leaves))
        relation = relation_of.get(site.equation)
        groups = () if relation is None else tuple(g.index for g in relation.hidden_groups)
        of = None if per_parameter else groups
        uses[site.equation.name, site.equation.where(), paths, of] += 1
    return tuple(Use(*key, count=count) for key, count in uses.items())
