"""One file of named arrays: a JSON header, the raw bytes, checksums; written whole or not at all.

    prologue   MAGIC, version, length of the header: 24 bytes, little-endian
    header     JSON; `values` says what every array is, by name, in the order of the arrays
    digest     SHA-256 of all before it
    arrays     each at a multiple of ALIGN bytes
    digest     SHA-256 of all before it

Any program can read it. A reader believes nothing: the header has the size of what follows, and
that is the size of the file, before an array is made; arrays are read when they are wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterator
from math import prod
from typing import Any, NoReturn, Self

import jax
import ml_dtypes
import numpy as np

from .._errors import error, value_error
from .._files import replace_file
from ._names import PYTHON, Named

Json = dict[str, Any]  # an object of JSON
MAGIC = b"braintrace\r\n\x1a\0"
VERSION = 2
ALIGN = 64
LONGEST = 2**26  # bytes of a header
MOST = 2**48  # elements of an array
_NARROW = [t for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)]
DTYPES = {np.dtype(t).name: np.dtype(t) for t in (*_NARROW, *"?bhilqBHILQefdFD")}
_PROLOGUE = struct.Struct("<14sHQ")
_DIGEST = hashlib.sha256().digest_size


def write(path: str | os.PathLike, header: Json, values: Named) -> None:
    """Put the file in place of an older one; whoever reads `path` sees either, whole.

    `values` are arrays of numpy, or numbers and texts of Python.
    """
    arrays = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
    entry = lambda a: {"dtype": a.dtype.name, "shape": list(a.shape)}
    specs = {k: entry(v) if k in arrays else {"value": v} for k, v in values.items()}
    text = json.dumps({**header, "values": specs}).encode()
    if len(text) > LONGEST:
        raise value_error(
            f"the checkpoint would have a header of {len(text)} bytes.",
            why=f"names, and the numbers of Python in extra, may take {LONGEST}",
            do="turn lists of numbers into arrays",
        )

    def parts() -> Iterator[Any]:
        yield _PROLOGUE.pack(MAGIC, VERSION, len(text)) + text
        yield digest.digest()
        # `bytes(-at % 64)` fills up to the next multiple: from 100, 28 zeros, to 128.
        at = _PROLOGUE.size + len(text) + _DIGEST
        for array in arrays.values():
            yield bytes(-at % ALIGN)
            yield _bytes(np.ascontiguousarray(array, DTYPES[array.dtype.name]))
            at += -at % ALIGN + array.nbytes
        yield digest.digest()

    def hashed() -> Iterator[Any]:
        for part in parts():
            digest.update(part)
            yield part

    digest = hashlib.sha256()
    replace_file(path, hashed())


class Container:
    """An open file, with its header; `values` has shapes and types in place of arrays."""

    def __init__(self, path: str | os.PathLike):
        self.path = path
        if not os.path.exists(path):
            raise error(FileNotFoundError)(
                f"there is no file {os.fspath(path)}.",
                why="a checkpoint is one file",
                do="pass the path that was passed to learner.save",
            )
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            self.refuse("it is a folder, a pipe or a device", "name a file")
        self._file = open(path, "rb")  # closed by __exit__
        self.header: Json = {}
        self.values: Named = {}

    def __enter__(self) -> Self:
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self) -> Named:
        """The values, with the numbers of arrays."""
        values = {}
        for name, value in self.values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                self._read(bytearray(-self._file.tell() % ALIGN))
                value = np.empty(value.shape, value.dtype)
                self._read(_bytes(value))
            values[name] = value
        self._check_digest()
        return values

    def refuse(self, why: str, do: str) -> NoReturn:
        """Raise the error of a file that is no checkpoint."""
        raise value_error(f"{os.fspath(self.path)} is not a checkpoint.", why=why, do=do) from None

    def refuse_entries(self, cause: object) -> NoReturn:
        """Refuse a file with right checksums that `save` has not written."""
        why = f"its header is not one that save writes: {str(cause)[:200]!r}"
        self.refuse(why, "do not trust where it comes from")

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        prologue = self._file.read(_PROLOGUE.size)
        if len(prologue) < _PROLOGUE.size or not prologue.startswith(MAGIC):
            self.refuse("its first bytes are not those of one", "pass what learner.save wrote")
        _, version, length = _PROLOGUE.unpack(prologue)
        if version != VERSION:
            self.refuse(
                f"its format is version {version}, this one reads {VERSION}",
                "load it with the braintrace that wrote it, and take its weights over with "
                "to_pytree and from_pytree(tree, weights_only=True)",
            )
        if length > min(LONGEST, size - _PROLOGUE.size - 2 * _DIGEST):
            self._refuse_damage()
        text = self._file.read(length)
        self._hash = hashlib.sha256(prologue + text)
        self._check_digest()
        try:
            self.header = json.loads(text, object_pairs_hook=_once)
            self.values = {k: _value(words) for k, words in self.header.pop("values").items()}
        # What a file may say is without end, and none of it is worth an error of its own.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as cause:
            self.refuse_entries(cause)
        at = _PROLOGUE.size + length + _DIGEST
        for value in self.values.values():
            if isinstance(value, jax.ShapeDtypeStruct):
                at += -at % ALIGN + prod(value.shape) * value.dtype.itemsize
        if at + _DIGEST != size:
            self._refuse_damage()

    def _read(self, into: Any) -> None:
        if self._file.readinto(into) != len(into):
            self._refuse_damage()  # it has become shorter
        self._hash.update(into)

    def _check_digest(self) -> None:
        digest = self._file.read(_DIGEST)
        if digest != self._hash.digest():
            self._refuse_damage()
        self._hash.update(digest)

    def _refuse_damage(self) -> NoReturn:
        self.refuse(
            "its checksum is wrong: it was cut short or changed after it was written",
            "load another checkpoint, or copy the file again",
        )


def _once(pairs: list[tuple[str, Any]]) -> Json:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an entry is there twice")
    return dict(pairs)


def _value(words: Json) -> Any:
    """A number or text of Python, or the shape and type of an array."""
    match words:
        case {"value": value} if len(words) == 1 and isinstance(value, PYTHON):
            return value
        case {"dtype": str(name), "shape": [*shape]} if len(words) == 2:
            sized = all(type(n) is int and n >= 0 for n in shape) and len(shape) <= 32
            if name in DTYPES and sized and prod(n for n in shape if n) <= MOST:
                return jax.ShapeDtypeStruct(tuple(shape), DTYPES[name])
    raise ValueError(f"{str(words)[:99]} is no value")


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
