"""Where the boxes of a drawing lie, and how its links run between them; lengths in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ._picture import Column, Edge, Node, Picture

LETTER = 7.3  # width of a letter of a line, and of a note
SMALL = 6.4
LINE, NOTE = 17.0, 15.0  # heights
PAD, GAP, MARGIN = 11.0, 12.0, 14.0
BETWEEN = 110.0  # columns
HEAD = 34.0  # above the boxes: the names of the columns
MOST_LETTERS, MOST_LINES = 32, 5
REACH = 6  # operators that one box without a trace stands beside
LOOP = 46.0  # room for links at the right of the last column


@dataclass(frozen=True, slots=True)
class Box:
    """A placed node; `lines` and `note` are cut to fit."""

    node: Node
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]
    note: str

    @property
    def words(self) -> str:
        """The key of the node that this box shows, one of several or the only one."""
        return "step" if self.node.key.startswith("step") else self.node.key

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Curve:
    """A placed edge: from a point to a point, each with the side of its box it leaves from."""

    edge: Edge
    start: tuple[float, float]
    end: tuple[float, float]
    leaves_right: bool
    enters_left: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """A placed drawing; `columns` are the left ends of the columns."""

    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]
    columns: tuple[float, ...]
    width: float
    height: float


def place(picture: Picture) -> Layout:
    """Three columns: parameters in order, the others beside what they belong to."""
    picture = _split(picture)
    columns = [[n for n in picture.nodes if n.column == c] for c in Column]
    widths = [max((_width(n) for n in nodes), default=0.0) for nodes in columns]
    lefts = [MARGIN]
    for width in widths[:-1]:
        lefts.append(lefts[-1] + width + BETWEEN)
    boxes: dict[str, Box] = {}
    for column, nodes in enumerate(columns):
        wished = {n.key: _wish(n, picture.edges, boxes) for n in nodes}
        if column:
            nodes = sorted(nodes, key=lambda n: wished[n.key])
        placed = _stack(nodes, wished if column else {}, lefts[column], widths[column])
        boxes |= {b.node.key: b for b in placed}
    right = max((b.x + b.width for b in boxes.values()), default=0.0)
    bottom = max((b.y + b.height for b in boxes.values()), default=HEAD)
    last = {n.key for n in columns[-1]}
    loops = any(e.source in last and e.target in last for e in picture.edges)
    width = right + MARGIN + (LOOP if loops else 0.0)
    curves = tuple(_curves(picture.edges, boxes))
    return Layout(tuple(boxes.values()), curves, tuple(lefts), width, bottom + MARGIN)


def cut(text: str, most: int) -> str:
    """The end of a name that is too long: there lies what tells it from others."""
    return text if len(text) <= most else "…" + text[-(most - 1) :]


def _lines(node: Node) -> tuple[str, ...]:
    lines = node.lines
    if len(lines) > MOST_LINES:
        lines = (*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more")
    return tuple(cut(line, MOST_LETTERS) for line in lines)


def _width(node: Node) -> float:
    lines, note = _lines(node), cut(node.note, MOST_LETTERS + 4)
    longest = max(*(LETTER * len(line) for line in lines), SMALL * len(note))
    return longest + 2 * PAD + 6


def _split(picture: Picture) -> Picture:
    """The box of what has no trace, several times if far operators lead to it."""
    operators = [n.key for n in picture.nodes if n.column == Column.OPERATOR]
    row = {key: i for i, key in enumerate(operators)}
    nodes = {n.key: n for n in picture.nodes}
    if "step" not in nodes:
        return picture
    first, copies, instead = -REACH, list[Node](), dict[Edge, Edge]()
    for e in sorted((e for e in picture.edges if e.target == "step"), key=lambda e: row[e.source]):
        if row[e.source] - first >= REACH:
            first = row[e.source]
            copies.append(replace(nodes["step"], key=f"step{len(copies)}"))
        instead[e] = replace(e, target=copies[-1].key)
    others = [n for n in picture.nodes if n.key != "step"]
    edges = tuple(instead.get(e, e) for e in picture.edges)
    return replace(picture, nodes=(*others, *copies), edges=edges)


def _wish(node: Node, edges: Iterable[Edge], boxes: Mapping[str, Box]) -> float:
    """The height at which a node would like to lie: the mean of what leads to it."""
    leading = [e for e in edges if e.target == node.key and e.source in boxes]
    solid = [e for e in leading if not e.left_out] or leading
    before = [boxes[e.source].middle for e in solid]
    return sum(before) / len(before) if before else float("inf")


def _stack(nodes: Sequence[Node], wished: Mapping[str, float], x: float, width: float) -> list[Box]:
    """Boxes of a column from top to bottom, near their wishes and never over each other."""
    sizes = [LINE * len(_lines(n)) + NOTE + PAD for n in nodes]
    # Boxes that would overlap make a block, which lies at the mean of their wishes.
    blocks: list[tuple[list[int], float]] = []  # indices of nodes, top

    def top_of(block: list[int]) -> float:
        tops, offset = [], 0.0
        for i in block:
            wish = wished.get(nodes[i].key, float("inf"))
            if wish < float("inf"):
                tops.append(wish - sizes[i] / 2 - offset)
            offset += sizes[i] + GAP
        return max(HEAD, sum(tops) / len(tops)) if tops else HEAD

    def bottom_of(block: tuple[list[int], float]) -> float:
        return block[1] + sum(sizes[i] + GAP for i in block[0])

    for i in range(len(nodes)):
        blocks.append(([i], top_of([i])))
        while len(blocks) > 1 and bottom_of(blocks[-2]) > blocks[-1][1]:
            last = blocks.pop()
            joined = [*blocks[-1][0], *last[0]]
            blocks[-1] = (joined, top_of(joined))
    out = []
    for block, y in blocks:
        for i in block:
            node = nodes[i]
            note = cut(node.note, MOST_LETTERS + 4)
            out.append(Box(node, x, y, width, sizes[i], _lines(node), note))
            y += sizes[i] + GAP
    return out


def _curves(edges: Sequence[Edge], boxes: Mapping[str, Box]) -> Iterable[Curve]:
    """Links with their ends spread along the sides of the boxes, so that none share a point."""

    ends: dict[tuple[str, bool], list[tuple[float, bool, int, bool]]] = {}
    sides = []
    for i, e in enumerate(edges):
        source, target = boxes[e.source], boxes[e.target]
        # Forward: right to left. Back: left to right. Within a column: around its right side.
        right = source.node.column <= target.node.column
        left = source.node.column < target.node.column
        sides.append((right, left))
        ends.setdefault((e.source, right), []).append((target.middle, e.left_out, i, False))
        ends.setdefault((e.target, not left), []).append((source.middle, e.left_out, i, True))
    at: dict[tuple[int, bool], float] = {}
    for (key, _), points in ends.items():
        box = boxes[key]
        for n, (_, _, i, is_end) in enumerate(sorted(points)):
            at[i, is_end] = box.y + box.height * (n + 1) / (len(points) + 1)
    for i, (e, (right, left)) in enumerate(zip(edges, sides, strict=True)):
        source, target = boxes[e.source], boxes[e.target]
        start = (source.x + source.width * right, at[i, False])
        end = (target.x + target.width * (not left), at[i, True])
        yield Curve(e, start, end, right, left)
