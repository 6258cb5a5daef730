"""Loops as C."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ._formulas import REDUCTIONS, TYPES, formula
from ._index import Index, Place, combined, offset, own_place, strides
from ._loops import Loop, Nest, Section, read_at, store_place
from ._nodes import Node

LANES = 8  # partial sums of a long sum, so that a compiler may take them at once
_TOKEN = re.compile("\0(\\d+)\0")
# Where an array lies: its name in C and its first element there; None for a local variable.
Where = Callable[[Node], tuple[str, int | None]]


def literal(value: Any) -> str:
    """A number in C."""
    value = np.asarray(value).reshape(())[()]
    kind = value.dtype.kind
    if kind == "b":
        return str(int(value))
    if kind == "f":
        if not np.isfinite(value):
            return "NAN" if np.isnan(value) else "INFINITY" if value > 0 else "(-INFINITY)"
        single = value.dtype == np.float32
        text = f"{float(value):.{9 if single else 17}g}"
        short = np.format_float_scientific(value, trim="-") if len(text) > 9 else text
        text = short if "e" in short or "." in short else short + ".0"
        text += "f" if single else ""
        return f"({text})" if text.startswith("-") else text
    suffix = ("u" if kind == "u" else "") + ("LL" if value.dtype.itemsize == 8 else "")
    number = int(value)
    if number == np.iinfo(value.dtype).min and kind == "i":
        return f"({number + 1}{suffix} - 1)"
    return f"({number}{suffix})" if number < 0 else f"{number}{suffix}"


def numbers(value: np.ndarray) -> str:
    """The elements of an array in C, in lines."""
    texts = [literal(v) for v in value.reshape(-1)]
    lines = [", ".join(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    return "{\n    " + ",\n    ".join(lines) + "}"


def applied(name: str, dtype: np.dtype, operand: np.dtype, values: Sequence[str]) -> str:
    """A formula with its operands."""
    text = formula(name, str(operand))
    assert text is not None, name
    plain = TYPES[str(dtype)]
    signed = plain.removeprefix("u")
    names = dict(t=plain, s=signed, u=f"u{signed}", b=f"{8 * dtype.itemsize}u")
    names |= dict(f="f" if operand == np.float32 else "", o=TYPES[str(operand)])
    return text.format(*values, **names)


@dataclass(slots=True)
class _Body:
    """The lines inside of a nest, with tokens in the place of offsets.

    A new value may be stored over the old one, which another line reads: `stores` come last.
    """

    section: Section
    nest: Nest
    where: Where
    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    offsets: list[Index] = field(default_factory=list)
    known: dict[Node, str] = field(default_factory=dict)

    def at(self, index: Index) -> str:
        self.offsets.append(index)
        return f"\0{len(self.offsets) - 1}\0"

    def element(self, node: Node, index: Index) -> str:
        """An element of an array."""
        while node.kind == "reshape":
            (node,) = node.args
        name, start = self.where(node)
        if start is None:
            return name
        return f"{name}[{self.at(replace(index, start=index.start + start))}]"

    def value(self, node: Node, place: Place | None, at: Index) -> str:
        """The value of a node at a place, as a variable, a literal or an element."""
        while node.kind in ("view", "reshape"):
            place, at = read_at(node, place, at, self.nest.extents)
            (node,) = node.args
        if node.kind == "const" and node.size == 1:
            return literal(node.about)
        here = self.section.inline.get(node) is self.nest
        here |= node.kind == "map" and node in self.nest.loop.stores
        if not here:
            return self.element(node, at)
        if node not in self.known:
            self.compute(node, place)
        return self.known[node]

    def compute(self, node: Node, place: Place | None) -> None:
        """A line for a map, after those of its operands."""
        assert place is not None
        operands = [self.value(a, place, offset(place, a.shape)) for a in node.args]
        text = applied(node.about, node.dtype, node.args[0].dtype, operands)
        stored = node in self.nest.loop.stores
        name, start = self.where(node) if stored else ("", 0)
        local = f"t{node.number}" if start is not None else name
        self.lines.append(f"const {TYPES[str(node.dtype)]} {local} = {text};")
        self.known[node] = local
        if stored and start is not None:
            _, at = store_place(self.nest.loop, node, self.section.reads)
            self.stores.append(f"{self.element(node, at)} = {local};")


@dataclass(frozen=True, slots=True)
class _Counter:
    """One loop: its variable, how often it runs, and whether it belongs to a sum."""

    variable: int
    extent: int
    summed: bool


def loop_lines(section: Section, loop: Loop, where: Where) -> list[str]:
    """A loop as lines of C."""
    make = {"map": _map, "reduce": _reduce, "write": _write, "scatter": _scatter}
    return make.get(loop.root.kind, _computed)(section, loop, where)


def _map(section: Section, loop: Loop, where: Where) -> list[str]:
    body = _Body(section, loop.nests[0], where)
    for node in (loop.root, *loop.stores):
        place, at = store_place(loop, node, section.reads)
        body.value(node, place, at)
    body.lines += body.stores
    return _nested(_merged(body), body)


def _reduce(section: Section, loop: Loop, where: Where) -> list[str]:
    """A sum: rows are added to the result where that runs along memory, else element by element."""
    (nest,), node = loop.nests, loop.root
    (operand,), (how, along) = node.args, node.about
    body = _Body(section, nest, where)
    order = [i for i in range(len(operand.shape)) if i not in along] + list(along)
    moved, _ = own_place(tuple(operand.shape[i] for i in order))
    place = tuple(moved[order.index(i)] for i in range(len(operand.shape)))
    value = body.value(operand, place, offset(place, operand.shape))
    own, _ = own_place(node.shape)
    dtype, (start, join) = TYPES[str(node.dtype)], _reduction(how, node.dtype)
    name, at = where(node)
    out = name if at is None else body.element(node, offset(own, node.shape))
    counters = _merged(body)
    outer = [c for c in counters if not c.summed]
    inner = [c for c in counters if c.summed]
    best = max(counters, key=lambda c: (_along_memory(c, body), c.summed, c.variable))
    if not best.summed:
        rest = [c for c in outer if c is not best]
        added = f"{out} = {join.format(out, value)};"
        zero = _nested([*rest, best], body, [f"{out} = {start};"])
        return zero + _nested([*rest, *inner, best], body, [*body.lines, added])
    inner = [c for c in inner if c is not best] + [best]
    declare = f"{dtype} {name} = {start};" if at is None else ""
    total = name if at is None else "sum"
    inside = [] if at is None else [f"{dtype} sum = {start};"]
    add = [*body.lines, f"{total} = {join.format(total, value)};"]
    if how == "sum" and node.dtype.kind == "f" and best.extent >= 2 * LANES:
        whole = best.extent - best.extent % LANES
        lane_lines = [*body.lines, f"lane[part] += {value};"]
        inside.append(f"{dtype} lane[{LANES}] = {{0}};")
        inside += _nested([*inner[:-1], replace(best, extent=whole)], body, lane_lines, lanes=True)
        if whole < best.extent:
            inside += _nested(inner, body, add, first={best: whole})
        inside.append(f"for (int part = 0; part < {LANES}; part++) {total} += lane[part];")
    else:
        inside += _nested(inner, body, add)
    if at is None:
        return [declare, "{", *inside, "}"]
    return _nested(outer, body, [*inside, f"{out} = {total};"])


def _reduction(how: str, dtype: np.dtype) -> tuple[str, str]:
    start, join = REDUCTIONS[how]
    if how in ("max", "min") and dtype.kind != "f":
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        start = literal(dtype.type(limits[how == "min"]))
        join = "{0} > {1} ? {0} : {1}" if how == "max" else "{0} < {1} ? {0} : {1}"
    return start, join


def _along_memory(counter: _Counter, body: _Body) -> int:
    """How many elements lie side by side along a loop, less those that do not."""
    steps = [index.step(counter.variable) for index in body.offsets]
    return sum(s == 1 for s in steps) - 2 * sum(s not in (0, 1) for s in steps)


def _write(section: Section, loop: Loop, where: Where) -> list[str]:
    node = loop.root
    base, *parts = node.args[: 1 + len(node.about)]
    lines = [] if base.kind == "empty" else _copied(section, loop, 0, base, where)
    for k, (part, piece) in enumerate(zip(parts, node.about, strict=True), 1):
        body = _Body(section, loop.nests[k], where)
        place, _ = own_place(part.shape)
        value = body.value(part, place, offset(place, part.shape))
        pairs = zip(piece.starts, piece.steps, place, strict=True)
        target = tuple(combined(start, [(step, index)]) for start, step, index in pairs)
        body.lines.append(f"{body.element(node, offset(target, node.shape))} = {value};")
        lines += _nested(_merged(body), body)
    return lines


def _copied(section: Section, loop: Loop, k: int, base: Node, where: Where) -> list[str]:
    """A nest that copies an operand to the result."""
    body = _Body(section, loop.nests[k], where)
    place, _ = own_place(base.shape)
    at = offset(place, base.shape)
    value = body.value(base, place, at)
    body.lines.append(f"{body.element(loop.root, at)} = {value};")
    return _nested(_merged(body), body)


def _scatter(section: Section, loop: Loop, where: Where) -> list[str]:
    """Updates at computed places, one after another."""
    node, (base, updates, places) = loop.root, loop.root.args
    lead, axes, outside, add = node.about
    lines = _copied(section, loop, 0, base, where)
    body = _Body(section, loop.nests[1], where)
    place, _ = own_place(updates.shape)
    value = body.value(updates, place, offset(place, updates.shape))
    window = updates.shape[len(lead) :]
    row, rest = place[: len(lead)], place[len(lead) :]
    starts, inside = _starts(body, places, row, axes, node.shape, window, outside)
    at = body.element(node, offset(rest, node.shape))
    target = at[:-1] + "".join(f" + {s}" for s in starts) + "]"
    store = f"{target} {'+=' if add else '='} {value};"
    body.lines.append(f"if ({' && '.join(inside)}) {store}" if inside else store)
    return lines + _nested(_merged(body), body)


def _starts(
    body: _Body,
    places: Node,
    row: Place,
    axes: Sequence[int],
    shape: Sequence[int],
    window: Sequence[int],
    outside: str,
) -> tuple[list[str], list[str]]:
    """Offsets of computed places, and the conditions under which these are inside of an array."""
    starts, conditions = [], []
    steps = strides(tuple(shape))
    for k, axis in enumerate(axes):
        index = offset((*row, Index(k)), places.shape)
        number, last = f"p{body.nest.loop.root.number}_{k}", shape[axis] - window[axis]
        body.lines.append(f"int64_t {number} = (int64_t){body.element(places, index)};")
        if outside == "clip":
            body.lines.append(
                f"{number} = {number} < 0 ? 0 : ({number} > {last} ? {last} : {number});"
            )
        else:
            conditions.append(f"{number} >= 0 && {number} <= {last}")
        starts.append(f"{number} * {steps[axis]}")
    return starts, conditions


def _computed(section: Section, loop: Loop, where: Where) -> list[str]:
    """A gather, or partial results along an axis."""
    node = loop.root
    body = _Body(section, loop.nests[0], where)
    place, _ = own_place(node.shape)
    at = offset(place, node.shape)
    if node.kind == "running":
        how, axis = node.about
        _, join = _reduction(how, node.dtype)
        value = body.value(node.args[0], place, at)
        out = body.element(node, at)
        if node.shape[axis] > 1:
            before = replace(at, start=at.start - strides(node.shape)[axis])
            earlier = body.element(node, before)
            value = f"{body.at(place[axis])} > 0 ? {join.format(earlier, value)} : {value}"
        body.lines.append(f"{out} = {value};")
        return _nested(_merged(body), body)
    operand, places = node.args
    along, collapsed, axes, sizes, outside, fill = node.about
    row = tuple(p for i, p in enumerate(place) if i not in along)
    rest = iter(place[i] for i in along)
    inner = tuple(Index() if i in collapsed else next(rest) for i in range(len(operand.shape)))
    starts, inside = _starts(body, places, row, axes, operand.shape, sizes, outside)
    found = body.element(operand, offset(inner, operand.shape))
    found = found[:-1] + "".join(f" + {s}" for s in starts) + "]"
    if inside:
        missing = _missing(node.dtype) if fill is None else node.dtype.type(fill)
        found = f"({' && '.join(inside)}) ? {found} : {literal(missing)}"
    body.lines.append(f"{body.element(node, at)} = {found};")
    return _nested(_merged(body), body)


def _missing(dtype: np.dtype) -> Any:
    """What JAX has for an element that is not there."""
    if dtype.kind == "f":
        return dtype.type(np.nan)
    return dtype.type(1 if dtype.kind == "b" else np.iinfo(dtype).min or np.iinfo(dtype).max)


# --------------------------------------------------------------------------------------- nests


def _merged(body: _Body) -> list[_Counter]:
    """The loops of a nest; two that run through memory as one are one."""
    extents = dict(enumerate(body.nest.extents))
    first_summed = len(extents) - body.nest.summed
    for v in reversed(range(len(extents) - 1)):
        inner = min(k for k in extents if k > v)
        if inner >= first_summed > v:
            continue
        if all(index.step(v) == index.step(inner) * extents[inner] for index in body.offsets):
            extents[inner] *= extents.pop(v)
            rest = [tuple(t for t in i.terms if t[0] != v) for i in body.offsets]
            pairs = zip(body.offsets, rest, strict=True)
            body.offsets = [replace(index, terms=terms) for index, terms in pairs]
    return [_Counter(v, n, v >= first_summed) for v, n in extents.items()]


def _nested(
    counters: Sequence[_Counter],
    body: _Body,
    lines: Sequence[str] | None = None,
    lanes: bool = False,
    first: dict[_Counter, int] | None = None,
) -> list[str]:
    """Lines inside of loops; with `lanes` the last loop takes several places at once."""
    inside = list(body.lines if lines is None else lines)
    heads = []
    for c in counters:
        name, start = f"i{c.variable}", (first or {}).get(c, 0)
        wide = lanes and c is counters[-1]
        step = f"{name} += {LANES}" if wide else f"{name}++"
        heads.append(f"for (int {name} = {start}; {name} < {c.extent}; {step})")
    if lanes:
        heads.append(f"for (int part = 0; part < {LANES}; part++)")
    last = counters[-1].variable if lanes else None
    text = lambda found: _written(body.offsets[int(found.group(1))], last)
    inside = [_TOKEN.sub(text, line) for line in inside]
    if not heads:
        return inside
    head = " ".join(heads)
    if len(inside) == 1:
        return [f"{head} {inside[0]}"]
    return [f"{head} {{", *(f"    {line}" for line in inside), "}"]


def _written(index: Index, lane: int | None) -> str:
    """An offset in C."""
    parts = []
    for variable, step in index.terms:
        name = f"(i{variable} + part)" if variable == lane else f"i{variable}"
        parts.append(name if step == 1 else f"{name} * {step}")
    if index.start or not parts:
        parts.append(str(index.start))
    return " + ".join(parts)
