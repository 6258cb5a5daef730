"""`export_c`: an update as a folder of C."""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._errors import not_supported, value_error
from .._files import replace_file
from ..program import flatten, prune
from ._files import example, header, readme, saved_bytes, saved_values, source
from ._formulas import TYPES
from ._functions import NAMES
from ._learner import Code, Role, Sizes, Slot, Update, code_of

_TAKEN = NAMES | set(
    """
    auto break case char const continue default do double else enum extern float for goto if inline
    int long register restrict return short signed sizeof static struct switch typedef union
    unsigned void volatile while l part lane sum pending main
    """.split()
)


_LOCAL = re.compile(r"(scratch|table|first|bits)_|table\d|[tvi]\d+$|p\d+_\d+$")


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """An array of an update: its path as a user would write it, what it is, its value."""

    path: str
    role: Role
    value: Any


@dataclass(frozen=True, eq=False, slots=True)
class OneUpdate:
    """One update of a learner, as a function of the values of its leaves.

    Attributes:
        function: returns the outputs of the step, the loss, and new values of all leaves that are
            neither inputs nor targets.
        leaves: its arguments.
        outputs: paths of the outputs.
        about: one line on what it is.
    """

    function: Callable[..., Sequence[Any]]
    leaves: tuple[Leaf, ...]
    outputs: tuple[str, ...]
    about: str


@dataclass(frozen=True, eq=False, slots=True)
class ExportedC:
    """A learner as C, see `Online.export_c`.

    Attributes:
        path: the folder.
        name: of the struct, the functions and the files.
        sizes: bytes of parameters, optimizer, carry, inputs, scratch and constant tables; `live`
            is the most of the scratch that is in use at one time.
        code: what was emitted.
    """

    path: Path
    name: str
    sizes: Sizes
    code: Code

    def pack(self, values: dict[str, Any] | None = None) -> bytes:
        """The bytes that `load` reads in C: as exported, but for some arrays by their C names."""
        values = values or {}
        names = [slot.name for slot in self.code.kept]
        if unknown := sorted(set(values) - set(names)):
            raise value_error(
                f"the learner has no {', '.join(unknown)}.",
                why=f"it has {', '.join(names)}",
                do="name arrays as the header does",
            )
        return saved_bytes(self.code, [values.get(s.name, s.value) for s in self.code.kept])

    def unpack(self, data: bytes) -> dict[str, np.ndarray]:
        """The arrays that `save` wrote in C, by their names there."""
        values = saved_values(self.code, data)
        if values is None:
            raise value_error(
                f"these {len(data)} bytes are not of this learner.",
                why="size, version, shapes and checksum must be those of what was exported",
                do=f"pass what {self.name}_save wrote, all of it",
            )
        return {slot.name: value for slot, value in zip(self.code.kept, values, strict=True)}

    def __repr__(self) -> str:
        s = self.sizes
        return (
            f"{self.path / self.name}.c: {s.total:,} bytes: {s.parameters:,} parameters, "
            f"{s.optimizer:,} optimizer, {s.carry:,} carry, {s.inputs:,} inputs, {s.scratch:,} "
            f"scratch (live {s.live:,}); {s.tables:,} constant"
        )


def write_c(
    update: OneUpdate, path: str | os.PathLike, name: str = "learner", initial: str = "source"
) -> ExportedC:
    """Trace an update, emit it, and write the folder.

    Args:
        update: what is emitted.
        path: the folder.
        name: of struct, functions and files.
        initial: where the values of parameters go, "source" or "file".
    """
    leaves, about = update.leaves, update.about
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _TAKEN or keyword.iskeyword(name):
        raise value_error(
            f"name={name!r}.",
            why="it names a struct, functions and files in C",
            do="use small letters, digits and _, beginning with a letter",
        )
    if initial not in ("source", "file"):
        raise value_error(
            f"initial={initial!r}.",
            why="the values of the parameters stand in the source, or in a file beside it",
            do="'source' or 'file'",
        )
    names = c_names([*(leaf.path for leaf in leaves), *update.outputs])
    values = [np.asarray(leaf.value) for leaf in leaves]
    for leaf, value in zip(leaves, values, strict=True):
        if str(value.dtype) not in TYPES:
            raise not_supported(
                f"{leaf.path} has type {value.dtype}.",
                why="the emitted C has float, double and integers",
                do="keep real and imaginary part apart"
                if value.dtype.kind == "c"
                else "make it float32 or float64",
            )
    slots = [Slot(n, leaf.role, v) for n, leaf, v in zip(names, leaves, values, strict=False)]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    program, consts = flatten(jax.make_jaxpr(lambda *a: update.function(*a))(*shapes))
    made = Update(prune(program), consts, tuple(slots), tuple(names[len(leaves) :]))
    code = code_of(made)
    folder, inside = Path(path), initial == "source"
    texts = {
        f"{name}.h": header(code, name, about),
        f"{name}.c": source(code, name, inside),
        "main.c": example(code, name, inside),
        "README.md": readme(code, name, about, inside),
    }
    for file, text in texts.items():
        replace_file(folder / file, [text.encode()])
    exported = ExportedC(folder, name, code.sizes, code)
    if not inside:
        replace_file(folder / f"{name}.bin", [exported.pack()])
    return exported


def c_names(paths: Sequence[str]) -> list[str]:
    """Names in C, each once."""
    names: list[str] = []
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_") or "a"
        name = f"a_{name}" if name[0].isdigit() else name
        taken = lambda n: n in names or n in _TAKEN or _LOCAL.match(n)
        if taken(name):
            k = 1
            while taken(f"{name}_{k}"):
                k += 1
            name = f"{name}_{k}"
        names.append(name)
    return names
