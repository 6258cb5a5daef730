"""Tables of words."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[object]], left: int = 1, gap: str = "  ") -> list[str]:
    """Lines with columns of equal width; the first `left` ones begin at the left, others end right.

    Example:
        >>> aligned([["rule", "ms"], ["bptt", 1.25]])
        ['rule    ms', 'bptt  1.25']
    """
    words = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*words, strict=True)]
    sides = [str.ljust if n < left else str.rjust for n in range(len(widths))]
    line = lambda row: gap.join(side(*c) for side, *c in zip(sides, row, widths, strict=True))
    return [line(row).rstrip() for row in words]
