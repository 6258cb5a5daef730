"""`export`: an update as a compiled program that JAX alone runs, and a manifest of its arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from .._errors import MissingExtra, value_error
from .._files import replace_file
from ._export import OneUpdate, c_names
from ._learner import Role

FORMAT = 1  # of the manifest


@dataclass(frozen=True, slots=True)
class ExportedProgram:
    """A learner as a program, see `Online.export`.

    Attributes:
        path: the folder: `update.stablehlo`, `manifest.json`, `start.npz`.
        platforms: what it runs on.
        nbytes: of the program.
    """

    path: Path
    platforms: tuple[str, ...]
    nbytes: int


def write_program(
    update: OneUpdate, path: str | os.PathLike, platforms: Sequence[str]
) -> ExportedProgram:
    """Trace an update for some platforms, and write the folder."""
    leaves = update.leaves
    known = ("cpu", "cuda", "rocm", "tpu")
    if isinstance(platforms, str) or not platforms or set(platforms) - set(known):
        raise value_error(
            f"platforms={platforms!r}.",
            why=f"a program is compiled for kinds of machines that JAX knows: {', '.join(known)}",
            do="pass a list of them, platforms=['cpu', 'cuda']",
        )
    values = [np.asarray(leaf.value) for leaf in leaves]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    function = jax.jit(lambda *a: update.function(*a))
    program = export.export(function, platforms=list(platforms))(*shapes)
    try:
        data = program.serialize()
    except ImportError as error:
        raise MissingExtra("A program for JAX", "flatbuffers", "export") from error
    names = c_names([*(leaf.path for leaf in leaves), *update.outputs])
    kept = [leaf.role not in (Role.INPUT, Role.TARGET) for leaf in leaves]
    shown = lambda a: {"shape": list(a.shape), "dtype": str(a.dtype)}
    arguments = [
        {"name": n, "path": leaf.path, "what": leaf.role.value, **shown(a)}
        for n, leaf, a in zip(names, leaves, shapes, strict=False)
    ]
    results = [*names[len(leaves) :], "loss"]
    results += [n for n, k in zip(names, kept, strict=False) if k]
    pairs = zip(results, program.out_avals, strict=True)
    manifest = {
        "format": FORMAT,
        "about": update.about,
        "jax": jax.__version__,
        "platforms": list(platforms),
        "arguments": arguments,
        "results": [{"name": n, **shown(a)} for n, a in pairs],
    }
    start = BytesIO()
    arrays: dict[str, Any] = {n: v for n, v, k in zip(names, values, kept, strict=False) if k}
    np.savez(start, **arrays)
    folder = Path(path)
    replace_file(folder / "update.stablehlo", [bytes(data)])
    replace_file(folder / "manifest.json", [json.dumps(manifest, indent=1).encode()])
    replace_file(folder / "start.npz", [start.getvalue()])
    return ExportedProgram(folder, tuple(platforms), len(data))
