"""What a report calls the states of a model: the shortest path to each, in short words.

Keys are brainstate's own, the first path in its own order: a population may be keyed as
`('E2I', 'post', 'V')` although it is `model.I`, and a synapse as the printed description of its
class. Names are for reading only; gradients and states are indexed by the keys.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from itertools import count
from typing import Any

import brainstate
from brainstate.graph import iter_leaf, iter_node

from .._errors import NamedPath
from ..graph import Path

_CLASS = re.compile(r"<class '(?:[^']*[.])?(\w+)'>")


def named_states(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """The states of a model by their keys, each key with a name."""
    shortest = _shortest(model)
    out: dict[Path, brainstate.State] = {}
    taken: set[str] = set()
    for key, state in brainstate.graph.states(model).items():
        name = _short(shortest.get(id(state), key))
        again = (f"{name}#{n}" for n in count(2))
        while name in taken:
            name = next(again)
        taken.add(name)
        out[NamedPath(key, name)] = state
    return out


def _shortest(model: brainstate.nn.Module) -> dict[int, Path]:
    """The shortest path to each state; of several, the first in brainstate's order."""
    shortest: dict[int, Path] = {}
    visited: set[int] = set()
    order = count()
    todo: list[tuple[int, int, Path, Any]] = [(0, next(order), (), model)]
    while todo:
        length, _, path, item = heapq.heappop(todo)
        if isinstance(item, brainstate.State):
            shortest.setdefault(id(item), path)
        elif id(item) not in visited:
            visited.add(id(item))
            for keys, child in (*iter_leaf(item, (0, 0)), *iter_node(item, (1, 1))):
                heapq.heappush(todo, (length + len(keys), next(order), (*path, *keys), child))
    return shortest


def _short(path: Iterable[Any]) -> str:
    """A printed description of classes becomes their names, without their container."""
    parts: list[str] = []
    for key in map(str, path):
        classes = _CLASS.findall(key)
        if classes and parts and parts[-1].startswith("_"):
            parts.pop()
        parts.append("+".join(classes) or key)
    return ".".join(parts)
