"""One file of named arrays: a JSON header, the raw bytes, a checksum; written whole or not at all.

Layout: 16 bytes of MAGIC and version, 8 bytes of header length (little-endian), the header, then
every array at a multiple of ALIGN bytes, then the SHA-256 of all before it. `arrays` in the header
lists shape, type and place of each array, so that any program can read the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._errors import error, value_error

try:
    import fcntl
except ImportError:  # not there on every system; an open file cannot be removed on those
    fcntl = None  # type: ignore[assignment]

Json: TypeAlias = dict[str, Any]  # an object of the header
MAGIC = b"braintrace\r\n\x1a\0"
VERSION = 1
ALIGN = 64
_PROLOGUE = struct.Struct("<14sHQ")
_DIGEST = hashlib.sha256().digest_size


def write(path: str | os.PathLike, header: Json, arrays: Sequence[np.ndarray]) -> None:
    """Put the file in place of an older one; whoever reads `path` sees either, whole.

    The bytes go to a file beside it and reach the disk before it takes the name; then the folder
    does. What writers that were killed left behind is removed.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise error(IsADirectoryError)(
            f"{os.fspath(path)!r} is a folder.",
            why="a checkpoint is one file",
            do="name a file in it",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target)
    beside = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # somebody is writing it
            digest = hashlib.sha256()
            for part in _parts(header, arrays):
                digest.update(part)
                _write_all(file, part)
            _write_all(file, memoryview(digest.digest()))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    if os.name != "nt":  # a folder cannot be opened there
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: str | os.PathLike) -> tuple[Json, list[np.ndarray]]:
    """The header and the arrays."""
    if not Path(path).is_file():
        raise error(FileNotFoundError)(
            f"there is no file {os.fspath(path)}.",
            why="a checkpoint is one file",
            do="pass the path that was passed to learner.save",
        )
    data = Path(path).read_bytes()
    if len(data) < _PROLOGUE.size or not data.startswith(MAGIC):
        raise _refused(
            path, "its first bytes are not those of one", "pass a file that learner.save wrote"
        )
    _, version, length = _PROLOGUE.unpack_from(data)
    if version > VERSION:
        raise _refused(
            path,
            f"its format is version {version}, this one reads up to {VERSION}",
            "install a newer braintrace",
        )
    whole = memoryview(data)
    if len(data) < _PROLOGUE.size + _DIGEST or hashlib.sha256(whole[:-_DIGEST]).digest() != bytes(
        whole[-_DIGEST:]
    ):
        raise _refused(
            path,
            "its checksum is wrong: it was cut short or changed after it was written",
            "load another checkpoint, or copy the file again",
        )
    start = _PROLOGUE.size + length
    header = json.loads(bytes(whole[_PROLOGUE.size : start]))
    body = _aligned(start)
    return header, [_array(data, body, entry) for entry in header["arrays"]]


def _parts(header: Json, arrays: Sequence[np.ndarray]) -> Iterator[memoryview]:
    entries, at = [], 0
    for a in arrays:
        entries.append({"dtype": a.dtype.name, "shape": list(a.shape), "at": at})
        at = _aligned(at + a.nbytes)
    text = json.dumps({**header, "arrays": entries}, allow_nan=False).encode()
    start = _PROLOGUE.size + len(text)
    first = _PROLOGUE.pack(MAGIC, VERSION, len(text)) + text
    yield memoryview(first + bytes(_aligned(start) - start))
    for a in arrays:
        flat = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        yield flat.data
        yield memoryview(bytes(_aligned(a.nbytes) - a.nbytes))


def _array(data: bytes, body: int, entry: Json) -> np.ndarray:
    dtype, shape = jnp.dtype(entry["dtype"]), tuple(entry["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(data, dtype, count, body + entry["at"]).reshape(shape)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _write_all(file: int, part: memoryview) -> None:
    while part.nbytes:
        part = part[os.write(file, part) :]


def _clean(target: Path) -> None:
    """Remove what killed writers of this file left; a file that is being written is locked."""
    for beside in target.parent.iterdir():
        name = beside.name
        if not (name.startswith(f".{target.name}.") and name.endswith(".tmp")):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            if fcntl is not None:
                with beside.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    beside.unlink()
            else:
                beside.unlink()


def _refused(path: str | os.PathLike, why: str, do: str) -> ValueError:
    return value_error(f"{os.fspath(path)} is not a checkpoint.", why=why, do=do)
