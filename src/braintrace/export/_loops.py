"""Nodes as loops: which of them are computed in one loop, and in which order the loops run.

A map that is read in one loop only, each element once, is computed there and has no array. One that
is also read elsewhere is stored by that loop. Every other node has a loop of its own:

    g = a * b;  m = 0.9 m + g;  w = w - m        one loop: g is a local variable, m and w are stored
    s = sum(a * b);  y = a * s                   two loops: y reads s at every place
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ._index import Index, Place, offset, own_place, place_of, runs_once, viewed
from ._nodes import Node, Nodes, walk

ANYWHERE = Index(-1)  # a place that is computed when the loop runs
GIVEN = ("slot", "const", "empty")


@dataclass(eq=False, slots=True)
class Nest:
    """Loops around one statement: their extents, and the last `summed` of them a reduction's."""

    loop: Loop
    extents: tuple[int, ...]
    summed: int = 0


@dataclass(eq=False, slots=True)
class Loop:
    """What is computed together. `root` decides its kind; `stores` are the nodes with an array."""

    root: Node
    nests: list[Nest] = field(default_factory=list)
    stores: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Read:
    """An element that a nest reads: at a place, or at an offset that is not known as a place."""

    nest: Nest
    place: Place | None
    offset: Index


@dataclass(eq=False, slots=True)
class Section:
    """Loops in the order in which they run.

    Attributes:
        inline: the nest that computes a node that has no array.
        reads: who reads a node.
        in_place: nodes that are stored over the slot that they are the new value of.
        copied: pairs (slot, node) that are copied when all loops have run.
    """

    loops: list[Loop]
    inline: dict[Node, Nest]
    reads: dict[Node, list[Read]]
    in_place: dict[Node, Node]
    copied: list[tuple[Node, Node]]

    @property
    def stored(self) -> dict[Node, Loop]:
        return {node: loop for loop in self.loops for node in loop.stores}


def read_at(
    node: Node, place: Place | None, at: Index, extents: Sequence[int]
) -> tuple[Place | None, Index]:
    """A place in the operand of a view or a reshape, and its offset there."""
    (operand,) = node.args
    if node.kind == "view":
        assert place is not None
        inner = viewed(node.about, place)
        return inner, offset(inner, operand.shape)
    return (None if at is ANYWHERE else place_of(at, operand.shape, extents)), at


@dataclass(eq=False, slots=True)
class _Fusing:
    """Nodes are assigned to loops from the results to the operands."""

    kept: Collection[Node]
    loops: list[Loop] = field(default_factory=list)
    inline: dict[Node, Nest] = field(default_factory=dict)
    home: dict[Node, Loop] = field(default_factory=dict)
    reads: dict[Node, list[Read]] = field(default_factory=dict)
    after: dict[Loop, set[Loop]] = field(default_factory=dict)  # the loops that read from a loop

    def reaches(self, start: Loop, goals: set[Loop]) -> bool:
        seen, stack = set(), [start]
        while stack:
            loop = stack.pop()
            if loop in goals:
                return True
            if loop not in seen:
                seen.add(loop)
                stack += self.after[loop]
        return False

    def add(self, node: Node) -> None:
        """Find the loop of a node whose readers have theirs."""
        reads = self.reads.setdefault(node, [])
        if node.kind in GIVEN:
            return
        if node.kind in ("view", "reshape"):
            for read in reads:
                self.read(
                    node.args[0],
                    read.nest,
                    *read_at(node, read.place, read.offset, read.nest.extents),
                )
            return
        nest = self.nest_for(node, reads) if node.kind == "map" else None
        if nest is None:
            nest = self.own_loop(node)
            place, _ = own_place(node.shape)
        else:
            place = next(r.place for r in reads if r.nest is nest and r.place is not None)
            others = {r.nest.loop for r in reads if r.nest is not nest}
            if others or node in self.kept:
                self.store(node, nest.loop, others)
            else:
                self.inline[node] = nest
        if node.kind == "map":
            for operand in node.args:
                self.read(operand, nest, place)

    def nest_for(self, node: Node, reads: list[Read]) -> Nest | None:
        """A nest of a reader that may compute the node."""
        for nest in dict.fromkeys(read.nest for read in reads):
            places = {read.offset for read in reads if read.nest is nest}
            known = all(read.place is not None for read in reads if read.nest is nest)
            (at,) = places if len(places) == 1 else (None,)
            if at is None or not known or not runs_once(at, nest.extents, node.size):
                continue
            others = {r.nest.loop for r in reads if r.nest is not nest}
            if not others and node not in self.kept:
                return nest
            if nest.loop.root.kind != "map" or nest.loop in others:
                continue
            if not any(self.reaches(other, {nest.loop}) for other in others):
                return nest
        return None

    def own_loop(self, node: Node) -> Nest:
        loop = Loop(node)
        self.loops.append(loop)
        self.after[loop] = set()
        self.store(node, loop, {read.nest.loop for read in self.reads[node]})
        if node.kind == "map":
            loop.nests = [Nest(loop, own_place(node.shape)[1])]
        elif node.kind == "reduce":
            (operand,), (_, along) = node.args, node.about
            # Loops over what is kept first, those of the sum last.
            order = [i for i in range(len(operand.shape)) if i not in along] + list(along)
            moved, extents = own_place(tuple(operand.shape[i] for i in order))
            summed = sum(operand.shape[i] != 1 for i in along)
            loop.nests = [Nest(loop, extents, summed)]
            place = tuple(moved[order.index(i)] for i in range(len(operand.shape)))
            self.read(operand, loop.nests[0], place)
        elif node.kind == "write":
            for operand in node.args[: 1 + len(node.about)]:
                self.nest_over(operand, loop)
        elif node.kind == "scatter":
            for operand in node.args[:2]:
                self.nest_over(operand, loop)
            self.whole(node.args[2], loop.nests[1])
        else:  # gather, running
            loop.nests = [Nest(loop, own_place(node.shape)[1])]
            for operand in node.args:
                self.whole(operand, loop.nests[0])
        return loop.nests[0]

    def nest_over(self, operand: Node, loop: Loop) -> None:
        """A nest over all elements of an operand."""
        place, extents = own_place(operand.shape)
        loop.nests.append(Nest(loop, extents))
        self.read(operand, loop.nests[-1], place)

    def whole(self, operand: Node, nest: Nest) -> None:
        """An operand of which computed places are read."""
        self.reads.setdefault(operand, []).append(Read(nest, None, ANYWHERE))

    def store(self, node: Node, loop: Loop, readers: Iterable[Loop]) -> None:
        loop.stores.append(node)
        self.home[node] = loop
        self.after[loop] |= set(readers) - {loop}

    def read(self, node: Node, nest: Nest, place: Place | None, at: Index | None = None) -> None:
        at = offset(place, node.shape) if at is None and place is not None else at
        assert at is not None
        read = Read(nest, place, at)
        if read not in self.reads.setdefault(node, []):
            self.reads[node].append(read)


def section_of(
    nodes: Nodes,
    results: Sequence[Node],
    updates: Sequence[tuple[Node, Node]],
    given: Collection[Node] = (),
) -> Section:
    """The loops that compute some nodes, and new values of slots from what they were before.

    Args:
        results: nodes that must have an array afterwards.
        updates: pairs (slot, its new value).
        given: nodes that were computed before.
    """
    claimed: dict[Node, Node] = {}
    for slot, value in updates:
        while value.kind == "reshape":
            (value,) = value.args
        while value.kind in ("view", *GIVEN) or value in given or value in claimed:
            value = nodes.copy(value)
        claimed[value] = slot
    fusing = _Fusing({*results, *claimed})
    found = walk([*results, *claimed], lambda node: node in given)
    for node in reversed(found):
        fusing.add(node)
    in_place, copied = _updated(fusing, claimed)
    loops = _ordered(fusing)
    return Section(loops, fusing.inline, fusing.reads, in_place, copied)


def _updated(
    fusing: _Fusing, claimed: dict[Node, Node]
) -> tuple[dict[Node, Node], list[tuple[Node, Node]]]:
    """Which new values of slots may be stored over the old ones, when all others have read."""
    in_place, copied = {}, []
    for value, slot in claimed.items():
        writer = fusing.home[value]
        reads = fusing.reads.get(slot, [])
        readers = {read.nest.loop for read in reads} - {writer}
        own = [read for read in reads if read.nest.loop is writer]
        stores = _store_offset(fusing, value)
        same = all(read.offset == stores and writer.root.kind == "map" for read in own)
        if same and not any(fusing.reaches(writer, {reader}) for reader in readers):
            for reader in readers:
                fusing.after[reader].add(writer)
            in_place[value] = slot
        else:
            copied.append((slot, value))
    return in_place, copied


def _store_offset(fusing: _Fusing, node: Node) -> Index:
    """Where a loop stores a node."""
    return store_place(fusing.home[node], node, fusing.reads)[1]


def store_place(loop: Loop, node: Node, reads: dict[Node, list[Read]]) -> tuple[Place, Index]:
    """The place at which a map loop computes a node that it stores."""
    if node is loop.root:
        place = own_place(node.shape)[0]
        return place, offset(place, node.shape)
    read = next(r for r in reads[node] if r.nest is loop.nests[0])
    assert read.place is not None
    return read.place, read.offset


def _ordered(fusing: _Fusing) -> list[Loop]:
    """Operands before readers; of the loops that may run, the one that takes least memory."""
    loops, after = fusing.loops, fusing.after
    waits = {loop: 0 for loop in loops}
    for loop in loops:
        for reader in after[loop]:
            waits[reader] += 1
    sources: dict[Loop, set[Node]] = {loop: set() for loop in loops}
    for node in fusing.home:
        for read in fusing.reads.get(node, []):
            sources[read.nest.loop].add(node)
    left = {n: {r.nest.loop for r in fusing.reads.get(n, [])} for n in fusing.home}

    def taken(loop: Loop) -> int:
        new = sum(n.nbytes for n in loop.stores)
        return new - sum(
            n.nbytes for n in sources[loop] if left[n] == {loop} and n not in fusing.kept
        )

    # Of equals the last one, so that a program is the same text every time.
    place = {loop: -i for i, loop in enumerate(loops)}
    ready, order = [loop for loop in loops if not waits[loop]], []
    while ready:
        loop = min(ready, key=lambda loop: (taken(loop), place[loop]))
        ready.remove(loop)
        order.append(loop)
        for node in sources[loop]:
            left[node].discard(loop)
        for reader in after[loop]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    assert len(order) == len(loops)
    return order
