"""Binary files of event cameras: N-MNIST, and the AEDAT 3.1 files of DVS128 Gesture."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ._events import Events
from ._files import Name, existing, layout_error

NMNIST, DVS128 = (2, 34, 34), (2, 128, 128)  # polarity, y, x
OVERFLOW = 240  # the row of what is no event of a pixel
HEADER = struct.Struct("<hhiiiiii")  # of a packet: type, source, size, offset, overflow, ...
POLARITY = 1  # the type of packets that have events of pixels


def read_nmnist(path: Name) -> list[Events]:
    """Read N-MNIST: one `.bin` file, or a folder of them in folders by digit.

    An event has 40 bits: x (8), y (8), polarity (1), time in microseconds (23). One with y = 240 is
    none of a pixel: it adds 2**13 microseconds to the times from there on.

    Args:
        path: `Train/5/00001.bin`, or `Train` for all of them.

    Returns:
        Recordings of the shape (2, 34, 34); the label is the name of the file's folder, if that is
        a digit.

    Raises:
        FileNotFoundError: there is no such file, or no `.bin` file in the folder's folders.
        ValueError: the file has another layout.
    """
    path = existing(path, "N-MNIST")
    files = sorted(path.glob("*/*.bin")) if path.is_dir() else [path]
    if not files:
        existing(path / "0" / "*.bin", "N-MNIST")
    return [_nmnist(file) for file in files]


def _nmnist(path: Path) -> Events:
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if len(data) % 5:
        raise layout_error(path, f"the file has {len(data)} bytes.", "an event has 5 bytes")
    x, y, high, middle, low = data.reshape(-1, 5).astype(np.int64).T
    folder = path.absolute().parent.name
    label = int(folder) if folder in tuple("0123456789") else None
    overflow = y == OVERFLOW
    times = ((high & 127) << 16 | middle << 8 | low) + (np.cumsum(overflow) << 13)
    parts = (part[~overflow] for part in (times, high >> 7, y, x))
    return _camera(path, *parts, shape=NMNIST, label=label)


def read_dvs_gesture(path: Name, labels: Name | None = None) -> list[Events]:
    """Read a session of DVS128 Gesture: an AEDAT 3.1 file and its labels.

    Args:
        path: `user01_natural.aedat`, for example.
        labels: its table `class,startTime_usec,endTime_usec`, default `user01_natural_labels.csv`
            beside it.

    Returns:
        A recording of the shape (2, 128, 128) per line of the table. Times begin with 0, and labels
        too (class 1 is 0). Events that the file marks as invalid are left out.

    Raises:
        FileNotFoundError: one of the two files does not exist.
        ValueError: a file has another layout.
    """
    path = existing(path, "DVS128 Gesture")
    table = existing(labels or path.with_name(f"{path.stem}_labels.csv"), "the table of labels")
    time, polarity, y, x = _aedat(path)
    names, *lines = table.read_text("utf-8").splitlines() or [""]
    if [name.strip() for name in names.split(",")] != ["class", "startTime_usec", "endTime_usec"]:
        raise layout_error(
            table,
            f"the first line is {names!r}.",
            "the table of labels has the columns class,startTime_usec,endTime_usec",
        )
    recordings = []
    for line in filter(str.strip, lines):
        try:
            label, start, end = map(int, line.split(","))
        except ValueError as error:
            raise layout_error(
                table, f"a line is {line!r}.", "a line has three whole numbers"
            ) from error
        inside = (time >= start) & (time < end)
        parts = (part[inside] for part in (time - start, polarity, y, x))
        recordings.append(_camera(path, *parts, shape=DVS128, label=label - 1))
    return recordings


def _aedat(path: Path) -> tuple[np.ndarray, ...]:
    """Time (microseconds), polarity, y and x of the valid events of all packets."""
    content = path.read_bytes()
    if not content.startswith(b"#!AER-DAT3.1"):
        raise layout_error(
            path, f"the file begins with {content[:12]!r}.", "AEDAT 3.1 begins with #!AER-DAT3.1"
        )
    end = b"#!END-HEADER\r\n"
    at = content.find(end) + len(end)
    if at < len(end):
        raise layout_error(path, "the header does not end.", f"its last line is {end.decode()!r}")
    words, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while at < len(content):
        head = content[at : at + HEADER.size].ljust(HEADER.size, b"\0")
        kind, _, size, _, overflow, capacity, _, _ = HEADER.unpack(head)
        body = content[at + HEADER.size : at + HEADER.size + size * capacity]
        if size < 1 or len(body) != size * capacity or (kind == POLARITY and size != 8):
            raise layout_error(
                path,
                f"the packet at byte {at} is broken or not complete.",
                "a packet has a header of 28 bytes and as many events as it says; an event of a "
                "pixel has 8 bytes",
            )
        at += HEADER.size + len(body)
        if kind == POLARITY:
            word, low = np.frombuffer(body, "<u4").reshape(-1, 2).T.astype(np.int64)
            valid = word & 1 == 1
            words.append(word[valid])
            times.append((low | overflow << 31)[valid])
    word, time = np.concatenate(words), np.concatenate(times)
    return time, word >> 1 & 1, word >> 2 & 0x7FFF, word >> 17 & 0x7FFF


def _camera(
    path: Path,
    time: np.ndarray,
    polarity: np.ndarray,
    y: np.ndarray,
    x: np.ndarray,
    *,
    shape: tuple[int, int, int],
    label: int | None,
) -> Events:
    """Events of a camera; `time` is in microseconds."""
    _, height, width = shape
    if len(time) and (y.max() >= height or x.max() >= width):
        raise layout_error(
            path,
            f"there is an event at x = {x.max()}, y = {y.max()}.",
            f"the camera has {width} x {height} pixels",
        )
    return Events(time * 1e-6, (polarity * height + y) * width + x, shape, label)
