"""Names of operators, states and traces that do not depend on what else a step contains.

A learner's own call of a model and a step function around that call are two steps with one model in
both. What is numbered in one has another number in the other, so a trace is named by its operator,
and an operator by its weights and by how often these were used before (not by what it is: a product
is the same whoever writes it, also in the random signs that are drawn for it):

    y = matmul(x, w) + matmul(h, w)          "w" and "w 2"

The trace of an operator is an array over its slots. Two arrays of one shape may mean different
states, so the states that the slots stand for, element by element, are a part of the name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from zlib import crc32

import numpy as np

from ._graph import Graph
from ._groups import HiddenGroup
from ._relations import HiddenParamOpRelation
from ._step import Leaf, Path, Step, components_of


def _joined(path: Path) -> str:
    """The keys of a path as they are; what a path is shown as depends on the other paths."""
    return ".".join(map(str, tuple(path)))


def leaf_name(leaf: Leaf) -> str:
    """A parameter or a state."""
    return f"{_joined(leaf.path)}[{leaf.index}]" if leaf.index else _joined(leaf.path)


def group_name(group: HiddenGroup) -> str:
    """A hidden group, by its states."""
    return " ".join(map(_joined, group.hidden_paths))


def site_names(graph: Graph) -> tuple[str, ...]:
    """Every operator of a step, in the order of the sites."""
    used: Counter[str] = Counter()
    out = []
    for site in graph.sites:
        leaves = sorted({i for of in site.leaves.values() for i in of})
        weights = "+".join(leaf_name(graph.step.params[i]) for i in leaves)
        name = weights or site.operator.primitive.name
        used[name] += 1
        out.append(f"{name} {used[name]}" if used[name] > 1 else name)
    return tuple(out)


def operator_names(graph: Graph) -> tuple[str, ...]:
    """The operator of every relation."""
    names = site_names(graph)
    of_equation = dict(zip((s.equation for s in graph.sites), names, strict=True))
    return tuple(of_equation[r.site.equation] for r in graph.relations)


def trace_names(graph: Graph) -> tuple[str, ...]:
    """The trace of every relation: its operator, and which state elements its slots stand for."""
    pairs = zip(operator_names(graph), graph.relations, strict=True)
    return tuple(f"{name} @{_slot_digest(graph.step, r)}" for name, r in pairs)


def step_digest(step: Step) -> str:
    """A digest of all parameters and states of a step: of a trace that follows all of them."""
    leaves = [(leaf_name(leaf), step.entry(leaf)) for leaf in (*step.params, *step.hidden)]
    return _digest(f"{name} {v.shape} {v.dtype};".encode() for name, v in leaves)


def inputs_digest(step: Step) -> str:
    """A digest of everything that a step is given: of a trace that evaluates it again."""
    leaves = [(leaf_name(leaf), step.entry(leaf)) for leaf in (*step.hidden, *step.others)]
    inputs = [(str(i), v) for i, v in enumerate(step.program.inputs[: step.n_args])]
    return _digest(f"{name} {v.shape} {v.dtype};".encode() for name, v in (*leaves, *inputs))


def seed_of(name: str) -> int:
    """A number to fold into a random key, the same for a name in every process."""
    return crc32(name.encode()) & 0x7FFFFFFF


def _slot_digest(step: Step, relation: HiddenParamOpRelation) -> str:
    components = components_of(step)
    sizes: Sequence[int] = [prod(c.shape) for c in components]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    elements = relation.slots.destination  # (lanes, y, slots), counted through all components
    # Components h (2,) at 0 and g (2,) at 2, slots [[0, 2], [1, 3]]: at [[0, 1], [0, 1]], so the
    # digest is of "g" with [[-1, 0], [-1, 1]] and of "h" with [[0, -1], [1, -1]], by name: with
    # another state before them the numbers change, and the digest does not.
    at = np.searchsorted(starts, elements, side="right") - 1
    parts = [str(relation.slots.shape).encode(), str(elements.shape).encode()]
    found = [(c, components[c]) for c in np.unique(at[elements >= 0]).tolist()]
    names = {c: f"{leaf_name(step.hidden[k.leaf])}:{k.part}:{k.imaginary}" for c, k in found}
    for c in sorted(names, key=names.__getitem__):
        local = np.where(at == c, elements - starts[c], -1)
        parts += [names[c].encode(), np.ascontiguousarray(local, np.int64).tobytes()]
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2s(b"".join(parts), digest_size=4).hexdigest()
