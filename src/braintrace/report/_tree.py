"""A drawing of the compiled graph for a terminal: a tree per state group."""

from __future__ import annotations

import os
from typing import TextIO

from ._picture import Column, Node, Picture, Standing

_MARKS = {"─": "in the gradient", "┄": "left out", "×": "no gradient arrives"}
Row = tuple[list[str], Standing]
_PLAIN = str.maketrans("├└─┄×·→", "|`-.x;>")


def coloured(file: TextIO) -> bool:
    """Whether a file is a terminal that wants colours (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and file.isatty()


def tree(picture: Picture, colours: bool = False) -> str:
    """The drawing as lines of text."""
    nodes = {n.key: n for n in picture.nodes}
    blocks: list[tuple[str, list[Row]]] = []
    for target in (n for n in picture.nodes if n.column >= Column.STATE):
        rows: list[Row] = []
        for edge in picture.edges:
            if edge.target == target.key and nodes[edge.source].column == Column.OPERATOR:
                for key in _consumed(picture, edge.source):
                    if key in edge.parameters:
                        cells = _row(nodes[key], nodes[edge.source], edge.left_out)
                        rows.append((cells, nodes[key].standing or edge.standing))
                for far in (e for e in picture.edges if e.target == edge.source and e.left_out):
                    for key in _consumed(picture, far.source):
                        if key in far.parameters and target.key != "step":
                            through = f"through {_weights(picture, nodes, far.target)}"
                            cells = ["┄", nodes[key].lines[0], through, "left out"]
                            rows.append((cells, far.standing))
        ways = [e for e in picture.edges if e.source == target.key]
        within = [nodes[e.target] for e in ways if nodes[e.target].column == Column.STATE]
        if within:
            names = ", ".join(name for n in within for name in n.lines)
            cells = ["┄", f"from here to {names}", "", "left out"]
            rows.append((cells, Standing.APPROXIMATE))
        crossed = [_weights(picture, nodes, e.target) for e in ways]
        if any(crossed):
            names = ", ".join(dict.fromkeys(filter(None, crossed)))
            cells = ["┄", f"from here through {names}", "", "left out"]
            rows.append((cells, Standing.APPROXIMATE))
        blocks.append((f"→ {', '.join(target.lines)}  ({target.note})", rows))
    alone = [n for n in picture.nodes if n.standing is Standing.UNTOUCHED]
    if alone:
        rows = [(["─", n.lines[0], "", n.note], Standing.UNTOUCHED) for n in alone]
        blocks.append(("nowhere", rows))
    every = [row for _, rows in blocks for row, _ in rows]
    widths = [max((len(row[k]) for row in every if row[2]), default=0) for k in range(4)]
    lines = [picture.summary]
    for head, rows in blocks:
        lines += ["", head]
        for i, (row, standing) in enumerate(rows):
            fork = "└" if i == len(rows) - 1 else "├"
            cells = [c.ljust(w) for c, w in zip(row[1:], widths[1:], strict=True) if row[2]]
            text = "  ".join(cells or (c for c in row[1:] if c)).rstrip()
            if colours:
                text = f"\x1b[{standing.colour}m{text}\x1b[0m"
            lines.append(f"{fork}{row[0] * 2} {text}")
    marks = {row[0] for row in every}
    if marks - {"─"}:
        lines += ["", "   ".join(f"{m * 2} {_MARKS[m]}" for m in _MARKS if m == "─" or m in marks)]
    return "\n".join(lines)


def encodable(text: str, file: TextIO) -> str:
    """The text, in ASCII if the file takes nothing else."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
    return text


def _consumed(picture: Picture, operator: str) -> list[str]:
    """The parameters that an operator consumes."""
    return [e.source for e in picture.edges if e.target == operator and not e.left_out]


def _weights(picture: Picture, nodes: dict[str, Node], operator: str) -> str:
    return ", ".join(nodes[key].lines[0] for key in _consumed(picture, operator))


def _row(parameter: Node, operator: Node, left_out: bool) -> list[str]:
    through = operator.lines[0]
    if operator.key != "plain":
        through += f" at {operator.note}"
    silent = parameter.standing is Standing.SILENT
    return [
        "┄" if left_out else "×" if silent else "─",
        parameter.lines[0],
        through,
        parameter.note,
    ]
