"""The files of an emitted learner: header, source, an example, and a page about it."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from ._formulas import TYPES
from ._functions import functions_in
from ._learner import Code, Role, Slot, block
from ._text import numbers

FORMAT = 1  # of saved bytes
_MAGIC = 0x52545442  # "BTTR" in a file of a little-endian machine
_HEADER = struct.Struct("=5I")


def ctype(dtype: np.dtype) -> str:
    return TYPES[str(dtype)]


def size_of(shape: Sequence[int]) -> int:
    return int(np.prod(shape)) if shape else 1


def layout_number(code: Code) -> int:
    """A number for names, shapes and types of what is saved: only equal ones may be loaded."""
    about = [(s.name, s.role.value, s.value.shape, str(s.value.dtype)) for s in code.kept]
    return int.from_bytes(hashlib.sha256(repr(about).encode()).digest()[:4], "little")


def saved_bytes(code: Code, values: Sequence[np.ndarray]) -> bytes:
    """What `save` writes in C: a header with version and checksum, then all arrays."""
    parts = zip(code.kept, values, strict=True)
    data = b"".join(np.ascontiguousarray(v, s.value.dtype).tobytes() for s, v in parts)
    header = (_MAGIC, FORMAT, layout_number(code), len(data), zlib.crc32(data))
    return _HEADER.pack(*header) + data


def saved_values(code: Code, data: bytes) -> list[np.ndarray] | None:
    """The arrays in saved bytes; None if they are not those of this learner."""
    if len(data) < _HEADER.size:
        return None
    magic, version, layout, size, check = _HEADER.unpack_from(data)
    data = data[_HEADER.size :]
    same = (magic, version, layout) == (_MAGIC, FORMAT, layout_number(code))
    if not same or size != len(data) or check != zlib.crc32(data):
        return None
    values, at = [], 0
    for slot in code.kept:
        flat = np.frombuffer(data, slot.value.dtype, slot.value.size, at)
        values.append(flat.reshape(slot.value.shape).copy())
        at += slot.value.nbytes
    return values


def _arguments(slots: Sequence[Slot]) -> str:
    return "".join(f", const {ctype(s.value.dtype)} *restrict {s.name}" for s in slots)


def _prototypes(code: Code, name: str) -> dict[str, str]:
    outs = "".join(f", {ctype(node.dtype)} *restrict {out}" for out, node in code.outputs)
    me = f"{name} *restrict l"
    return {
        "init": f"void {name}_init({me})",
        "reset": f"void {name}_reset({me})",
        "step": f"void {name}_step({me}{_arguments(code.inputs)}{outs})",
        "learn": f"{ctype(code.loss)} {name}_learn({me}{_arguments(code.targets)})",
        "save": f"size_t {name}_save({me}, void *bytes)",
        "load": f"int {name}_load({me}, const void *bytes, size_t size)",
    }


def header(code: Code, name: str, about: str) -> str:
    """The `.h`."""
    of = _prototypes(code, name)
    upper = name.upper()
    fields = []
    for role in (Role.PARAMETER, Role.OPTIMIZER, Role.CARRY):
        slots = [s for s in code.kept if s.role is role]
        total = sum(s.value.nbytes for s in slots)
        fields += [f"    /* {role.value}: {total} bytes */"] if slots else []
        fields += [_field(s.name, s.value) for s in slots]
    if code.held:
        fields += ["    /* the inputs of the last step */"]
        fields += [_field(s.name, s.value) for s in code.held]
    if code.scratch:
        fields += ["    /* what is computed on the way; arrays share it */"]
        fields += [f"    {ctype(d)} {block(d)}[{n}];" for d, n in code.scratch.items()]
    size = _HEADER.size + sum(s.value.nbytes for s in code.kept)
    shapes = [f"{s.name}{list(s.value.shape)}" for s in (*code.inputs, *code.targets)]
    shapes += [f"{out}{list(node.shape)}" for out, node in code.outputs]
    return f"""/* {about}
 * Written by braintrace. Arrays: {", ".join(shapes)}. */
#ifndef {upper}_H
#define {upper}_H

#include <stddef.h>
#include <stdint.h>

#define {upper}_BYTES {size}u /* what {name}_save writes */

typedef struct {{
{chr(10).join(fields)}
    int pending; /* whether a step was taken that nothing was learned from yet */
}} {name};

/* Parameters, state and traces as they were exported. */
{of["init"]};
/* A new sequence: state and traces as they were exported; what was learned stays. */
{of["reset"]};
/* One step of the network. */
{of["step"]};
/* Learn from the last step, and return its loss; NAN if there was no step since. */
{of["learn"]};
/* Write everything that learning goes on from; returns {upper}_BYTES. */
{of["save"]};
/* Read it; 0, or 1: wrong size, 2: not of this program or version, 3: damaged. */
{of["load"]};

#endif
"""


def _field(name: str, value: np.ndarray) -> str:
    shape = f" /* {list(value.shape)} */" if value.ndim != 1 else ""
    return f"    {ctype(value.dtype)} {name}[{size_of(value.shape)}];{shape}"


def source(code: Code, name: str, initial: bool) -> str:
    """The `.c`; `initial` says whether values of parameters stand in it."""
    of, parts = _prototypes(code, name), []
    tables = [
        f"static const {ctype(t.dtype)} {n}[{t.size}] = {numbers(t)};"
        for n, t in code.tables.items()
    ]
    starts = {s: s.value for s in code.kept if initial or s.role is Role.CARRY}
    filled = {s: v for s, v in starts.items() if np.any(v)}
    tables += [
        f"static const {ctype(v.dtype)} first_{s.name}[{v.size}] = {numbers(v)};"
        for s, v in filled.items()
    ]
    parts += ["\n\n".join(tables)] if tables else []
    parts += functions_in([*code.step, *code.learn, *code.advance])
    parts.append(_CHECKSUM)
    parts.append(
        _function(f"static void {name}_advance({name} *restrict l)", code.advance or ["(void)l;"])
    )
    carried = [s for s in code.kept if s.role is Role.CARRY]
    reset = [_started(s, s in filled) for s in carried] + ["l->pending = 0;"]
    parts.append(_function(of["reset"], reset))
    rest = [_started(s, s in filled) for s in code.kept if s.role is not Role.CARRY]
    parts.append(_function(of["init"], ["memset(l, 0, sizeof *l);", *rest, f"{name}_reset(l);"]))
    hold = [f"memcpy(l->{s.name}, {s.name}, sizeof l->{s.name});" for s in code.held]
    unused = [f"(void){s.name};" for s in code.inputs if not _names(s.name, [*hold, *code.step])]
    step = [f"if (l->pending) {name}_advance(l);", "l->pending = 1;", *unused, *hold, *code.step]
    parts.append(_function(of["step"], step))
    unused = [f"(void){s.name};" for s in code.targets if not _names(s.name, code.learn)]
    learn = [*unused, "if (!l->pending) return NAN;", "l->pending = 0;", *code.learn]
    parts.append(_function(of["learn"], learn))
    parts += _saving(code, name, of)
    head = f'#include "{name}.h"\n\n#include <math.h>\n#include <string.h>\n'
    return head + "\n" + "\n\n".join(parts) + "\n"


def _names(name: str, lines: Sequence[str]) -> bool:
    """Whether a line reads an argument."""
    return any(
        f" {name}[" in f" {line}".replace("(", " ") or f", {name}," in line for line in lines
    )


def _function(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{head} {{", *(f"    {line}" for line in lines), "}"])


def _started(slot: Slot, filled: bool) -> str:
    if filled:
        return f"memcpy(l->{slot.name}, first_{slot.name}, sizeof l->{slot.name});"
    return f"memset(l->{slot.name}, 0, sizeof l->{slot.name});"


_CHECKSUM = """static uint32_t checksum(const unsigned char *bytes, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (0xedb88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}"""


def _saving(code: Code, name: str, of: dict[str, str]) -> list[str]:
    upper, size = name.upper(), _HEADER.size
    first = f"0x{_MAGIC:08x}u, {FORMAT}u, 0x{layout_number(code):08x}u, {upper}_BYTES - {size}u"
    save = [
        f"uint32_t head[5] = {{{first}, 0}};",
        f"unsigned char *to = (unsigned char *)bytes + {size};",
    ]
    save += [] if code.kept else ["(void)to;"]
    save.append(f"if (l->pending) {name}_advance(l);")
    save.append("l->pending = 0;")
    for slot in code.kept:
        save += [
            f"memcpy(to, l->{slot.name}, sizeof l->{slot.name});",
            f"to += sizeof l->{slot.name};",
        ]
    save.append(f"head[4] = checksum((unsigned char *)bytes + {size}, head[3]);")
    save += ["memcpy(bytes, head, sizeof head);", f"return {upper}_BYTES;"]
    load = [
        "uint32_t head[5];",
        f"const unsigned char *from = (const unsigned char *)bytes + {size};",
    ]
    load.append(f"if (size != {upper}_BYTES) return 1;")
    load.append("memcpy(head, bytes, sizeof head);")
    other = [f"0x{_MAGIC:08x}u", f"{FORMAT}u", f"0x{layout_number(code):08x}u"]
    expected = " || ".join(f"head[{i}] != {number}" for i, number in enumerate(other))
    load.append(f"if ({expected}) return 2;")
    load.append(f"if (head[3] != size - {size}u || head[4] != checksum(from, head[3])) return 3;")
    for slot in code.kept:
        load += [
            f"memcpy(l->{slot.name}, from, sizeof l->{slot.name});",
            f"from += sizeof l->{slot.name};",
        ]
    load += ["l->pending = 0;", "return 0;"]
    return [_function(of["save"], save), _function(of["load"], load)]


def example(code: Code, name: str, initial: bool) -> str:
    """A `main.c` that learns one pair of input and target."""
    lines = [f"static {name} l;", ""]
    arrays = [
        f"static const {ctype(s.value.dtype)} {s.name}[] = {numbers(s.value)};"
        for s in (*code.inputs, *code.targets)
    ]
    outs = [f"static {ctype(node.dtype)} {out}[{node.size}];" for out, node in code.outputs]
    call, learn = _calls(code)
    out = code.outputs[0][0]
    load = (
        []
        if initial
        else [
            f"static unsigned char bytes[{name.upper()}_BYTES];",
            f'FILE *file = fopen("{name}.bin", "rb");',
            "size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;",
            f'if ({name}_load(&l, bytes, size)) return puts("{name}.bin is not this"), 1;',
            "fclose(file);",
        ]
    )
    main = [f"{name}_init(&l);", *load]
    main += ["for (int t = 0; t < 20; t++) {", f"    {name}_step({call});"]
    main += [f"    double loss = (double){name}_learn({learn});"]
    main += [
        f'    printf("step %2d  {out}[0] %10.6f  loss %10.6f\\n", t, (double){out}[0], loss);',
        "}",
    ]
    main.append("return 0;")
    head = f'#include <stdio.h>\n\n#include "{name}.h"\n'
    return "\n".join([head, *lines, *arrays, *outs, "", _function("int main(void)", main), ""])


def readme(code: Code, name: str, about: str, initial: bool) -> str:
    """A page of ten lines, for someone who has a C compiler."""
    s, (step, learn) = code.sizes, _calls(code)
    told = [(x.name, x.value.dtype, x.value.shape) for x in (*code.inputs, *code.targets)]
    arrays = [_declared(*a) for a in (*told, *((o, n.dtype, n.shape) for o, n in code.outputs))]
    file = "" if initial else f" First values are in `{name}.bin`, which `main.c` loads."
    return f"""# {name}

{about}. C99, no allocation. Build and run: `cc -O3 {name}.c main.c -lm && ./a.out`{file}
All memory is one struct that you own: `static {name} l; {name}_init(&l);`. Then, at every step,
`{name}_step({step})` computes outputs from inputs, and `{name}_learn({learn})` takes what they
should have been, learns from it and returns the error. Without that call nothing is learned.
`{name}_reset` begins a new sequence; `{name}_save` writes what was learned as bytes, which
`{name}_load` reads. Arrays, row by row: {", ".join(arrays)}.
Bytes: {s.parameters:,} parameters, {s.optimizer:,} optimizer, {s.carry:,} state and traces,
{s.inputs:,} inputs, {s.scratch:,} scratch ({s.live:,} at one time), {s.tables:,} constant.
"""


def _declared(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    """An array as C declares it, with its shape if it has rows."""
    rows = f" ({' x '.join(map(str, shape))})" if len(shape) > 1 else ""
    return f"`{ctype(dtype)} {name}[{size_of(shape)}]`{rows}"


def _calls(code: Code) -> tuple[str, str]:
    """The arguments of `step` and of `learn`, for a struct named l."""
    step = ", ".join(["&l", *(s.name for s in code.inputs), *(out for out, _ in code.outputs)])
    return step, ", ".join(["&l", *(s.name for s in code.targets)])
