"""Where the boxes of a drawing lie, and how its links run between them; lengths in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from ._picture import Column, Edge, Node, Picture

LINE, NOTE, GAP = 17.0, 15.0, 12.0  # heights, and between boxes
HEAD = 34.0  # above the boxes: the names of the columns
MOST_LINES = 5
_HEADS = ("parameters", "operators", "states", "no state")


@dataclass(frozen=True, slots=True)
class Form:
    """How wide a drawing is.

    Attributes:
        name: its class in the style, which sets the size of letters.
        letter: width of a letter of a line.
        small: width of a letter of a note.
        letters: most letters of a line.
        pad: around the text of a box.
        margin: around the drawing.
        between: columns.
        loop: room for links at the right of the last column.
        brief: whether notes are short.
    """

    name: str
    letter: float
    small: float
    letters: int
    pad: float
    margin: float
    between: float
    loop: float
    brief: bool = False


WIDE = Form("wide", 7.3, 6.4, 32, 11.0, 14.0, 110.0, 46.0)
NARROW = Form("narrow", 6.7, 5.9, 14, 5.0, 4.0, 28.0, 24.0, brief=True)  # three columns on a phone


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
    """A placed drawing; `heads` are the names of the columns, and where each begins."""

    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]
    heads: tuple[tuple[float, float, str], ...]
    width: float
    height: float


def place(picture: Picture, form: Form = WIDE) -> Layout:
    """Three columns: parameters in order, the others beside what they belong to."""
    columns = [[n for n in picture.nodes if n.column == c] for c in Column]
    widths = [max((_width(n, form) for n in nodes), default=0.0) for nodes in columns]
    lefts = [form.margin]
    for width in widths[:2]:
        lefts.append(lefts[-1] + width + form.between)
    lefts.append(lefts[-1])  # below the states
    boxes: dict[str, Box] = {}
    heads: list[tuple[float, float, str]] = []
    for column, nodes in enumerate(columns):
        wished = {n.key: _wish(n, picture.edges, boxes) for n in nodes}
        if column:
            nodes = sorted(nodes, key=lambda n: wished[n.key])
        below = max(
            (b.y + b.height + GAP for b in boxes.values() if b.x == lefts[column]), default=0
        )
        top = below + HEAD
        at = (lefts[column], widths[column], top, form)
        placed = _stack(nodes, wished if column else {}, *at)
        if placed or column < Column.STEP:
            first = placed[0].y if below else top
            heads.append((lefts[column], first - HEAD + 20, _HEADS[column]))
        boxes |= {b.node.key: b for b in placed}
    right = max((b.x + b.width for b in boxes.values()), default=0.0)
    bottom = max((b.y + b.height for b in boxes.values()), default=HEAD)
    last = {n.key for n in columns[Column.STATE]}
    loops = any(e.source in last and e.target in last for e in picture.edges)
    width = right + form.margin + (form.loop if loops else 0.0)
    curves = tuple(_curves(picture.edges, boxes))
    return Layout(tuple(boxes.values()), curves, tuple(heads), width, bottom + form.margin)


def cut(text: str, most: int) -> str:
    """The end of a name that is too long: there lies what tells it from others."""
    return text if len(text) <= most else "…" + text[-(most - 1) :]


def _lines(node: Node, form: Form) -> tuple[str, ...]:
    lines = node.lines
    if len(lines) > MOST_LINES:
        lines = (*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more")
    if form.brief and node.column in (Column.OPERATOR, Column.STEP):  # words, not names
        lines = tuple(part for line in lines for part in wrap(line, 11))
    return tuple(cut(line, form.letters) for line in lines)


def _note(node: Node, form: Form) -> str:
    if not form.brief:
        return cut(node.note, form.letters + 4)
    if node.column == Column.OPERATOR:  # its line is a long one
        return ""
    return node.standing.brief if node.standing else node.note


def _width(node: Node, form: Form) -> float:
    letters = max(map(len, _lines(node, form)))
    longest = max(form.letter * letters, form.small * len(_note(node, form)))
    return longest + 2 * form.pad + 6


def _wish(node: Node, edges: Iterable[Edge], boxes: Mapping[str, Box]) -> float:
    """The height at which a node would like to lie: the mean of what leads to it."""
    leading = [e for e in edges if e.target == node.key and e.source in boxes]
    solid = [e for e in leading if not e.left_out] or leading
    before = [boxes[e.source].middle for e in solid]
    return sum(before) / len(before) if before else float("inf")


def _stack(
    nodes: Sequence[Node],
    wished: Mapping[str, float],
    x: float,
    width: float,
    top: float,
    form: Form,
) -> list[Box]:
    """Boxes of a column from `top` to bottom, near their wishes and never over each other."""
    notes = [_note(n, form) for n in nodes]
    rows = zip(nodes, notes, strict=True)
    sizes = [LINE * len(_lines(n, form)) + NOTE * bool(note) + 11 for n, note in rows]
    # Boxes that would overlap make a block, which lies at the mean of their wishes.
    blocks: list[tuple[list[int], float]] = []  # indices of nodes, top

    def top_of(block: list[int]) -> float:
        tops, offset = [], 0.0
        for i in block:
            wish = wished.get(nodes[i].key, float("inf"))
            if wish < float("inf"):
                tops.append(wish - sizes[i] / 2 - offset)
            offset += sizes[i] + GAP
        return max(top, sum(tops) / len(tops)) if tops else top

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
            out.append(Box(nodes[i], x, y, width, sizes[i], _lines(nodes[i], form), notes[i]))
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
