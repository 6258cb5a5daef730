"""What a program computes, as nodes that loops can be made of.

Every operation of a program becomes one of few kinds of node:

    slot      an array that is there before: a parameter, a state, a trace, an input
    const     numbers that are known
    map       a formula of the elements at one place of all operands, which have one shape
    view      elements of one operand, at an affine map of the place: transpose, broadcast, slice
    reshape   the same elements in the same order
    reduce    a sum (maximum, ...) along axes
    running   the same along one axis, with every partial result
    gather    elements of an operand whose places are computed
    write     a copy of an operand, into which other operands are written

A product of matrices is a sum over a map of two views: `y[j] = sum_k x[k] w[k, j]` reads `x` at
`(k)` and `w` at `(k, j)` of the space of `(j, k)`. Equal nodes are one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A value: its kind, the nodes it is made of, and `about`, what the kind needs to know."""

    kind: str
    shape: Shape
    dtype: np.dtype
    args: tuple[Node, ...] = ()
    about: Any = None
    number: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex value, as its real and imaginary part, or a random key, as its two words."""

    re: Node
    im: Node


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a view reads along one axis of its operand: `start` + sum of steps × the own place."""

    start: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Where an operand of `write` goes: along each axis from `starts` in `steps`; added or set.

    `at` numbers operands that hold computed places, one integer for each axis that it names.
    """

    starts: Shape
    steps: Shape
    add: bool = False


@dataclass(slots=True)
class Nodes:
    """All nodes of a program; whatever is asked for twice is made once."""

    made: dict[Any, Node] = field(default_factory=dict)
    count: int = 0

    def node(
        self,
        kind: str,
        shape: Sequence[int],
        dtype: Any,
        args: Sequence[Node] = (),
        about: Any = None,
    ) -> Node:
        shape, dtype = tuple(int(n) for n in shape), np.dtype(dtype)
        key = (kind, shape, dtype, tuple(a.number for a in args), about)
        if key not in self.made:
            self.count += 1
            self.made[key] = Node(kind, shape, dtype, tuple(args), about, self.count)
        return self.made[key]

    def slot(self, name: str, shape: Sequence[int], dtype: Any) -> Node:
        return self.node("slot", shape, dtype, (), name)

    def const(self, value: Any) -> Node:
        """Known numbers; an array of one number all over is a view of that number."""
        array = np.asarray(value)
        flat = array.reshape(-1)
        if array.size > 1 and (flat == flat[0]).all():
            return self.broadcast(self.const(flat[0]), array.shape, ())
        key = ("const", array.shape, array.dtype, array.tobytes())
        if key not in self.made:
            self.count += 1
            self.made[key] = Node("const", array.shape, array.dtype, (), array, self.count)
        return self.made[key]

    def map(self, name: str, dtype: Any, args: Sequence[Node]) -> Node:
        """A formula by name, of operands of one shape; what has size one is repeated."""
        shape = np.broadcast_shapes(*(a.shape for a in args))
        args = [self.broadcast(a, shape, range(len(a.shape))) for a in args]
        return _simpler(name, args) or self.node("map", shape, dtype, args, name)

    def view(self, a: Node, shape: Sequence[int], axes: Sequence[Axis]) -> Node:
        """Elements of `a`; a view of a view is a view, and one that changes nothing is `a`."""
        shape, axes = tuple(shape), tuple(axes)
        if a.kind == "view":
            a, axes = a.args[0], tuple(_through(axis, axes, len(shape)) for axis in a.about)
        same = all(x.start == 0 and x.steps == _unit(i, len(shape)) for i, x in enumerate(axes))
        return a if same and shape == a.shape else self.node("view", shape, a.dtype, (a,), axes)

    def broadcast(self, a: Node, shape: Sequence[int], at: Sequence[int]) -> Node:
        """`a` repeated along the axes of `shape` that are not `at`, or where it has size one."""
        n, pairs = len(shape), zip(a.shape, at, strict=True)
        axes = [Axis(0, _unit(i, n) if size != 1 else (0,) * n) for size, i in pairs]
        return self.view(a, shape, axes)

    def transpose(self, a: Node, order: Sequence[int]) -> Node:
        axes: list[Any] = [None] * len(order)
        for i, old in enumerate(order):
            axes[old] = Axis(0, _unit(i, len(order)))
        return self.view(a, [a.shape[i] for i in order], axes)

    def slice(
        self,
        a: Node,
        starts: Sequence[int],
        stops: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> Node:
        steps = [1] * len(a.shape) if steps is None else steps
        shape = [-(-(e - s) // d) for s, e, d in zip(starts, stops, steps, strict=True)]
        unit = lambda i, d: tuple(d * u for u in _unit(i, len(shape)))
        pairs = enumerate(zip(starts, steps, strict=True))
        return self.view(a, shape, [Axis(s, unit(i, d)) for i, (s, d) in pairs])

    def reverse(self, a: Node, along: Sequence[int]) -> Node:
        unit = lambda i, d: tuple(d * u for u in _unit(i, len(a.shape)))
        axes = [
            Axis(n - 1, unit(i, -1)) if i in along else Axis(0, unit(i, 1))
            for i, n in enumerate(a.shape)
        ]
        return self.view(a, a.shape, axes)

    def reshape(self, a: Node, shape: Sequence[int]) -> Node:
        """The elements in another shape; only axes of size one more or less are a view."""
        shape = tuple(int(n) for n in shape)
        if shape == a.shape:
            return a
        if [n for n in shape if n != 1] == [n for n in a.shape if n != 1]:
            wide = iter([i for i, n in enumerate(shape) if n != 1])
            none = (0,) * len(shape)
            axes = [Axis(0, _unit(next(wide), len(shape)) if n != 1 else none) for n in a.shape]
            return self.view(a, shape, axes)
        if a.kind == "reshape":
            return self.reshape(a.args[0], shape)
        if a.kind == "view" and a.args[0].size == 1:
            return self.broadcast(self.reshape(a.args[0], ()), shape, ())
        if a.kind == "view":
            a = self.copy(a)
        return self.node("reshape", shape, a.dtype, (a,))

    def copy(self, a: Node) -> Node:
        """The same values, in a loop of their own."""
        return self.node("map", a.shape, a.dtype, (a,), "copy")

    def solid(self, a: Node) -> Node:
        """A node with an array of its own, elements in order."""
        return self.copy(a) if a.kind == "view" else a

    def reduce(self, how: str, a: Node, along: Sequence[int]) -> Node:
        """Sum or the like; along axes of size one it is a reshape."""
        along = tuple(i for i in sorted(along) if a.shape[i] != 1)
        kept = [n for i, n in enumerate(a.shape) if i not in along]
        return self.node("reduce", kept, a.dtype, (a,), (how, along)) if along else a

    def write(
        self, base: Node, pieces: Sequence[tuple[Node, Piece]], places: Sequence[Node] = ()
    ) -> Node:
        """`base` with other values written over it; `places` are computed starts, one per axis."""
        parts, where = [a for a, _ in pieces], tuple(p for _, p in pieces)
        return self.node("write", base.shape, base.dtype, (base, *parts, *places), where)


def _unit(i: int, n: int) -> tuple[int, ...]:
    return tuple(int(k == i) for k in range(n))


def _through(axis: Axis, axes: Sequence[Axis], n: int) -> Axis:
    """An axis of a view's operand, read through another view."""
    start = axis.start + sum(s * a.start for s, a in zip(axis.steps, axes, strict=True))
    columns = (sum(s * a.steps[k] for s, a in zip(axis.steps, axes, strict=True)) for k in range(n))
    return Axis(start, tuple(columns))


def _number(a: Node) -> Any:
    """The number that all elements of a node are, if it is known."""
    a = a.args[0] if a.kind == "view" else a
    return a.about[()] if a.kind == "const" and a.shape == () else None


def _simpler(name: str, args: Sequence[Node]) -> Node | None:
    """An operand that a formula equals: a + 0, a * 1, a choice that is known."""
    if name in ("add", "mul"):
        neutral = 0 if name == "add" else 1
        return next((b for a, b in (args, args[::-1]) if _number(a) == neutral), None)
    if name in ("sub", "div"):
        return args[0] if _number(args[1]) == (name == "div") else None
    if name == "select" and args[1] is args[2]:
        return args[1]
    if name == "select" and (which := _number(args[0])) is not None:
        return args[2 if which else 1]
    return None


def walk(roots: Sequence[Node], until: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """The nodes that some nodes are computed from, operands first; `until` leaves nodes out."""
    found: dict[Node, None] = {}
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found and not until(node):
            stack.append((node, True))
            stack += [(a, False) for a in reversed(node.args) if a not in found]
    return list(found)
