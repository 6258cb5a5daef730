"""One update of a learner as three functions in C, and where everything lies in its struct.

    step      what the outputs need
    learn     the loss, the gradient, the update, the new state and traces
    advance   the new state and traces alone: what the next step does first if nobody called `learn`

`learn` and `advance` are alternatives; both go on from values that `step` leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from .._errors import not_supported
from ..program import Program
from ._formulas import TYPES
from ._loops import ANYWHERE, Loop, Section, section_of
from ._lower import Lowerer, Pair, folded
from ._memory import Layout, laid_out
from ._nodes import Node, Nodes, walk
from ._text import Where, loop_lines


class Role(Enum):
    """What an input of the program is."""

    PARAMETER = "parameters"
    OPTIMIZER = "optimizer"
    CARRY = "carry"
    INPUT = "inputs"  # of a step
    TARGET = "targets"  # what only `learn` is told


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """An input of the program: its name in C, its value when it is exported."""

    name: str
    role: Role
    value: np.ndarray

    @property
    def is_kept(self) -> bool:
        return self.role not in (Role.INPUT, Role.TARGET)


@dataclass(frozen=True, eq=False, slots=True)
class Update:
    """A traced update: inputs to outputs of the step, the loss, and new values of what is kept.

    The outputs of the program are those of the step, the loss, then a value for every slot that
    is kept, in their order.
    """

    program: Program
    consts: Sequence[Any]
    slots: tuple[Slot, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Sizes:
    """Bytes of an emitted learner. `live` is the most of the scratch that is in use at one time."""

    parameters: int
    optimizer: int
    carry: int
    inputs: int
    scratch: int
    live: int
    tables: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.carry + self.inputs + self.scratch


@dataclass(frozen=True, eq=False, slots=True)
class Code:
    """Three functions as lines of C, and what they refer to."""

    step: list[str]
    learn: list[str]
    advance: list[str]
    kept: tuple[Slot, ...]  # the slots with an array in the struct, in order
    inputs: tuple[Slot, ...]  # arguments of `step`
    targets: tuple[Slot, ...]  # arguments of `learn`
    held: tuple[Slot, ...]  # inputs that are copied into the struct
    outputs: tuple[tuple[str, Node], ...]
    loss: np.dtype
    scratch: dict[np.dtype, int]
    tables: dict[str, np.ndarray]
    sizes: Sizes


def code_of(update: Update) -> Code:
    """Emit an update."""
    nodes = Nodes()
    known = folded(update.program, update.consts)
    given = [nodes.slot(s.name, s.value.shape, s.value.dtype) for s in update.slots]
    results: list[Node] = []
    for value in Lowerer(nodes).run(*known, given):
        if isinstance(value, Pair):
            raise not_supported(
                "an output of the step is complex.",
                why="the emitted C has float, double and integers",
                do="return its real and imaginary part",
            )
        results.append(value)
    n = len(update.outputs)
    outputs, loss = results[:n], results[n]
    kept = [s for s in update.slots if s.is_kept]
    new = dict(zip(kept, results[n + 1 :], strict=True))
    of_slot = dict(zip(update.slots, given, strict=True))
    live = _live(nodes, [*outputs, loss], new, of_slot)
    return _Emitting(nodes, update, of_slot, outputs, loss, live).code()


def _live(
    nodes: Nodes, results: Sequence[Node], new: dict[Slot, Node], of_slot: dict[Slot, Node]
) -> dict[Slot, Node]:
    """The slots that anything depends on, now or at a later step, and their new values."""
    found: set[Node] = set()
    wanted = list(results)
    while True:
        found = {n for n in walk(wanted) if n.kind == "slot"}
        live = {slot: value for slot, value in new.items() if of_slot[slot] in found}
        if len(wanted) == len(results) + len(live):
            return live
        wanted = [*results, *live.values()]


@dataclass(eq=False, slots=True)
class _Emitting:
    nodes: Nodes
    update: Update
    of_slot: dict[Slot, Node]
    outputs: list[Node]
    loss: Node
    live: dict[Slot, Node]

    def code(self) -> Code:
        of_slot, nodes = self.of_slot, self.nodes
        new = [(of_slot[s], v) for s, v in self.live.items() if v is not of_slot[s]]
        changed = [(slot, self.array(v)) for slot, v in new]
        carried = [(n, v) for n, v in changed if self.slot(n).role is Role.CARRY]
        outs = [self.array(o) for o in self.outputs]
        before = {n for n in walk(outs) if n.kind not in _FREE}
        stop = lambda node: node in before
        later = walk([self.loss, *(v for _, v in changed)], stop)
        read = [a for n in later for a in n.args] + [self.loss, *(v for _, v in changed)]
        left = list(dict.fromkeys(n for n in read if n in before))
        step = section_of(nodes, list(dict.fromkeys([*outs, *left])), ())
        learn = section_of(nodes, [self.array(self.loss)], changed, before)
        advance = section_of(nodes, [], carried, before)
        sections = (step, learn, advance)
        layout, times = self.layout(sections, outs, left)
        inputs, targets = self.arguments(sections)
        held = tuple(s for s in inputs if _reads((learn, advance), of_slot[s]))
        tables: dict[str, np.ndarray] = {}
        texts = [self.lines(s, layout, times, tables, held) for s in sections]
        loss = self.refer(learn, layout, times, tables, held)(self.array(self.loss))
        texts[1].append(f"return {_element(*loss)};")
        outputs = tuple(zip(self.update.outputs, outs, strict=True))
        where = self.refer(step, layout, times, tables, held)
        texts[0] += [_copied_out(name, node, where) for name, node in outputs]
        kept = tuple(self.live)
        total = lambda role: sum(s.value.nbytes for s in kept if s.role is role)
        sizes = Sizes(
            total(Role.PARAMETER),
            total(Role.OPTIMIZER),
            total(Role.CARRY),
            sum(s.value.nbytes for s in held),
            layout.nbytes,
            layout.live,
            sum(t.nbytes for t in tables.values()),
        )
        return Code(
            step=texts[0],
            learn=texts[1],
            advance=texts[2],
            kept=kept,
            inputs=inputs,
            targets=targets,
            held=held,
            outputs=outputs,
            loss=self.loss.dtype,
            scratch=layout.sizes,
            tables=tables,
            sizes=sizes,
        )

    def slot(self, node: Node) -> Slot:
        return next(s for s, n in self.of_slot.items() if n is node)

    def array(self, node: Node) -> Node:
        """A node that has an array of its own."""
        while node.kind == "reshape":
            (node,) = node.args
        return self.nodes.copy(node) if node.kind in _FREE else node

    def arguments(
        self, sections: tuple[Section, Section, Section]
    ) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        """The arguments of `step` and of `learn`: what only that reads is told to it."""
        step, _, advance = sections
        told = [s for s in self.update.slots if not s.is_kept]
        early = lambda s: s.role is Role.INPUT or _reads((step, advance), self.of_slot[s])
        return tuple(s for s in told if early(s)), tuple(s for s in told if not early(s))

    def layout(
        self, sections: tuple[Section, Section, Section], outs: Sequence[Node], left: Sequence[Node]
    ) -> tuple[Layout, dict[Node, int]]:
        """Where arrays lie, from the times at which they are there: one for each loop."""
        times: dict[Node, int] = {}
        clock = 0
        for section in sections:
            clock = _note(section, clock, times, {*left}, {*outs})
        arrays = {}
        for node, bits in times.items():
            found = [read for s in sections for read in s.reads.get(node, [])]
            anywhere = any(read.offset is ANYWHERE for read in found)  # a variable has no places
            local = node.size == 1 and not anywhere and node not in left and node not in outs
            homes = [s.stored[node].root.kind for s in sections if node in s.stored]
            if not (local and all(kind in ("map", "reduce") for kind in homes)):
                arrays[node] = bits
        return laid_out(arrays), arrays

    def refer(
        self,
        section: Section,
        layout: Layout,
        times: dict[Node, int],
        tables: dict[str, np.ndarray],
        held: Sequence[Slot],
    ) -> Where:
        """Where arrays lie, in a function of this section."""
        slots = {node: slot for slot, node in self.of_slot.items()}

        def where(node: Node) -> tuple[str, int | None]:
            node = section.in_place.get(node, node)
            if node in slots:
                slot = slots[node]
                return (f"l->{slot.name}" if slot.is_kept or slot in held else slot.name), 0
            if node.kind == "const":
                name = f"table{node.number}"
                tables[name] = node.about
                return name, 0
            if node in layout.starts:
                return f"l->{block(node.dtype)}", layout.starts[node]
            return f"v{node.number}", None

        return where

    def lines(
        self,
        section: Section,
        layout: Layout,
        times: dict[Node, int],
        tables: dict[str, np.ndarray],
        held: Sequence[Slot],
    ) -> list[str]:
        where = self.refer(section, layout, times, tables, held)
        lines = [line for loop in section.loops for line in loop_lines(section, loop, where)]
        for slot, value in section.copied:
            lines.append(_copied_out(where(slot)[0], value, where))
        return lines


_FREE = ("slot", "const", "empty", "view", "reshape")


def block(dtype: np.dtype) -> str:
    """The name of the scratch of a type."""
    return f"scratch_{TYPES[str(dtype)].removesuffix('_t').split()[-1]}"


def _reads(sections: Sequence[Section], node: Node) -> bool:
    return any(section.reads.get(node) for section in sections)


def _copied_out(name: str, node: Node, where: Where) -> str:
    source, start = where(node)
    if start is None:
        return f"{name}[0] = {source};"
    return f"memcpy({name}, {source} + {start}, {node.size} * sizeof {name}[0]);"


def _element(name: str, start: int | None) -> str:
    return name if start is None else f"{name}[{start}]"


def _note(
    section: Section, clock: int, times: dict[Node, int], left: set[Node], outs: set[Node]
) -> int:
    """Note when the arrays of a section are there; the time after it."""
    at: dict[Loop, int] = {loop: clock + i for i, loop in enumerate(section.loops)}
    end = clock + len(section.loops)
    copied = {value for _, value in section.copied}
    first = clock == 0
    arrays = {n: at[loop] for n, loop in section.stored.items() if n not in section.in_place}
    arrays |= {n: clock for n in left if n not in arrays and section.reads.get(n)}
    for node, start in arrays.items():
        reads = [at[r.nest.loop] for r in section.reads.get(node, [])]
        stays = node in copied or (first and (node in left or node in outs)) or not reads
        last = end if stays else max(reads)
        times[node] = times.get(node, 0) | ((1 << (last + 1)) - (1 << start))
    return end + 1
