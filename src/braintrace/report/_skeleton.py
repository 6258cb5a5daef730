"""Which of the left-out links are worth drawing: those that do not follow from nearer ones.

In a stack of layers the states of the first reach the operators of all others, each through the
layers between. A drawing needs the links from a layer to the next; what they are about is passed
on to them.
"""

from __future__ import annotations

from typing import Any

from ..graph import strongly_connected

Links = dict[tuple[str, str, bool], dict[str, Any]]  # (source, target, left out): what it is about


def skeleton(links: Links) -> Links:
    """The links without the left-out ones that follow from others."""
    traced: dict[str, set[str]] = {}
    out: dict[str, set[str]] = {}
    for source, target, left_out in links:
        if left_out and _is_operator(target):
            out.setdefault(source, set()).add(target)
        elif not left_out and _is_group(target):
            traced.setdefault(source, set()).add(target)

    near = _ranks(traced, out)
    drawn = dict(links)
    for source, target, left_out in links:  # an operator to states, where the path is drawn
        if left_out and _is_operator(source) and _is_group(target):
            through = [v for v in out.get(source, ()) if target in _beyond(v, traced, out)]
            about = drawn.pop((source, target, True)) if through else {}
            for via in through:
                drawn[source, via, True] = {**drawn[source, via, True], **about}
    # Operators first: what they are about goes on to groups, and from these to nearer ones.
    for source, targets in sorted(out.items(), key=lambda item: _is_group(item[0])):
        own = traced.get(source, set())  # of an operator; what these groups reach, it reaches
        for target in targets:
            nearer = {
                group
                for via in targets
                for group in traced.get(via, ())
                if near[group] < near[target]
                and (_is_operator(source) or near[source] < near[group])
            }
            instead = [g for g in sorted(own | nearer) if target in out.get(g, ())]
            if not instead:
                continue
            about = drawn.pop((source, target, True))
            for group in instead:
                key = (group, target, True)
                if key in drawn:
                    drawn[key] = {**drawn[key], **about}
    return drawn


def _beyond(operator: str, traced: dict[str, set[str]], out: dict[str, set[str]]) -> set[str]:
    """The groups that an operator reaches, by traces and by left-out links from these."""
    groups: set[str] = set()
    todo = set(traced.get(operator, ()))
    while todo:
        group = todo.pop()
        groups.add(group)
        todo |= {g for v in out.get(group, ()) for g in traced.get(v, ())} - groups
    return groups


def _is_operator(key: str) -> bool:
    return key[0] == "o" or key == "plain"


def _is_group(key: str) -> bool:
    return key[0] == "g"


def _ranks(traced: dict[str, set[str]], out: dict[str, set[str]]) -> dict[str, int]:
    """How far along the network a group lies, and the nearest that an operator reaches."""
    groups = sorted(set().union(*traced.values()) | set(filter(_is_group, out)))
    reached = {g: {t for via in out.get(g, ()) for t in traced.get(via, ())} for g in groups}
    index = {g: i for i, g in enumerate(groups)}
    masks = strongly_connected([sum(1 << index[t] for t in reached[g]) for g in groups])
    component = dict(zip(groups, masks, strict=True))
    rank: dict[int, int] = {}

    def depth(k: int) -> int:
        if k not in rank:
            before = {component[g] for g in groups if any(component[t] == k for t in reached[g])}
            rank[k] = 1 + max((depth(b) for b in before - {k}), default=0)
        return rank[k]

    ranks = {g: depth(component[g]) for g in groups}
    far = len(groups) + 1
    for operator in {v for targets in out.values() for v in targets} | set(traced):
        to = traced.get(operator) or {
            g for via in out.get(operator, ()) for g in traced.get(via, ())
        }
        ranks[operator] = min((ranks[g] for g in to), default=far)
    return ranks
