"""Fuzz the readers of files by coverage: `pip install atheris; python benchmarks/fuzz_files.py`.

The first byte chooses the reader. Whatever the rest is, it is read, or refused by a ValueError in
four parts. Arguments are those of libFuzzer, `-max_total_time=1800 corpus`; crashes become tests.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["braintrace.checkpoint", "braintrace.lab.data"]):
    from braintrace.checkpoint import _container, _names
    from braintrace.lab import data

FOLDER = Path(tempfile.mkdtemp())
TABLE = FOLDER / "table.csv"
TABLE.write_text("class,startTime_usec,endTime_usec\n1,0,9\n2,9,30\n")
HEAD = b"#!AER-DAT3.1\r\n#!END-HEADER\r\n"


def checkpoint(path: Path) -> None:
    """A file with this header and right checksums; no arrays."""
    text = path.read_bytes()
    head = struct.pack("<14sHQ", _container.MAGIC, _container.VERSION, len(text)) + text
    head += hashlib.sha256(head).digest()
    head += bytes(-len(head) % _container.ALIGN) * (text.count(b"dtype") > 0)
    path.write_bytes(head + hashlib.sha256(head).digest())
    with _container.Container(path) as file:
        values = file.read()
        try:
            _names.unpacked(file.header.get("extra"), values)
        except (ValueError, TypeError, LookupError, RecursionError) as cause:
            file.refuse_entries(cause)


def gestures(path: Path) -> Any:
    """A session of events, with a header before the bytes."""
    path.write_bytes(HEAD + path.read_bytes())
    return data.read_dvs_gesture(path, TABLE)


def labels(path: Path) -> Any:
    """A table of labels."""
    (FOLDER / "session").write_bytes(HEAD)
    return data.read_dvs_gesture(FOLDER / "session", path)


READERS = (checkpoint, gestures, labels, data.read_nmnist, data.read_csv, data.read_ts)


def one(content: bytes) -> None:
    """Read one file."""
    if not content:
        return
    path = FOLDER / "a"
    path.write_bytes(content[1:])
    try:
        READERS[content[0] % len(READERS)](path)
    except ValueError as error:
        assert "why:" in str(error) and "do:" in str(error), repr(error)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
