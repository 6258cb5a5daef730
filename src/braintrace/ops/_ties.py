"""Which axes of an operator's output are axes of its weight.

An output axis `a` is *tied* to a weight axis `b` when y[..., i_a, ...] reads only weights with
i_b = i_a. Ties come from one walk over the operator's program that carries, for every axis of
every value, the weight axis it runs along (or None), from line to line of its equations. For a
weight `w` of shape (I, N)

    w                 (0, 1)
    w.T               (1, 0)
    x @ w             (None, 1): a line of the product runs along the columns of w
    x @ w + w[0]      (None, 1), since both run along it
    x @ w + w[0, 0]   (None, None)

An equation without lines drops all ties, which is always sound: the trace is then merely larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..program import Atom, lines, trace


def tied_axes(fun: Callable, args: tuple[Any, ...], index: int) -> tuple[tuple[int, int], ...]:
    """Pairs (output axis, axis of operand `index`) tied in `fun`; each axis at most once."""
    program, _ = trace(fun, *args)
    weight = program.inputs[index]
    # Of values that read the weight: per axis the one of the weight that it runs along.
    along: dict[Atom, tuple[int | None, ...]] = {weight: tuple(range(len(weight.shape)))}
    for eqn in program.equations:
        if not any(a in along for a in eqn.inputs):
            continue
        # Two operands that read the weight must agree: `w @ w` has a row line along axis 0 of the
        # left one and all of the right one, {0, None}: no tie.
        axes: dict[int, int | None] = {}
        for line in lines(eqn):
            read = zip(eqn.inputs, line.operands, strict=True)
            of = {None if d is None else along[a][d] for a, d in read if a in along}
            axes[line.result] = of.pop() if len(of) == 1 else None
        for out in eqn.outputs:
            along[out] = tuple(axes.get(d) for d in range(len(out.shape)))

    pairs: list[tuple[int, int]] = []
    for y_axis, w_axis in enumerate(along.get(program.outputs[0], ())):
        if w_axis is not None and all(w_axis != w for _, w in pairs):
            pairs.append((y_axis, w_axis))
    return tuple(pairs)
