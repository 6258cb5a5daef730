"""Binary files of event cameras: N-MNIST, and the AEDAT 3.1 files of DVS128 Gesture."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ._events import Events
from ._files import Name, existing, layout_error, regular, within

NMNIST, DVS128 = (2, 34, 34), (2, 128, 128)  # polarity, y, x
OVERFLOW = 240  # the row of what is no event of a pixel
HEADER = struct.Struct("<hhiiiiii")  # of a packet: type, source, size, offset, overflow, ...
EVENTS = 10**8  # limit; a session of DVS128 Gesture has some 1e7
POLARITY = 1  # the type of packets that have events of pixels


def read_nmnist(path: Name, *, max_events: int = EVENTS) -> list[Events]:
    """Read N-MNIST: one `.bin` file, or a folder of them in folders by digit.

    An event has 40 bits: x (8), y (8), polarity (1), time in microseconds (23). One with y = 240 is
    none of a pixel: it adds 2**13 microseconds to the times from there on.

    Args:
        path: `Train/5/00001.bin`, or `Train` for all of them.
        max_events: events that are read at most, of all files.

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
    within(path, "events", sum(map(regular, files)) // 5, max_events, "max_events")
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
    times, polarity, y, x = (part[~overflow] for part in (times, high >> 7, y, x))
    _check_pixels(path, y, x, NMNIST)
    return Events(times * 1e-6, _channels(polarity, y, x, NMNIST), NMNIST, label)


def read_dvs_gesture(
    path: Name, labels: Name | None = None, *, max_events: int = EVENTS
) -> list[Events]:
    """Read a session of DVS128 Gesture: an AEDAT 3.1 file and its labels.

    Args:
        path: `user01_natural.aedat`, for example.
        labels: its table `class,startTime_usec,endTime_usec`, default `user01_natural_labels.csv`
            beside it.
        max_events: events that all recordings together may have; lines of the table may overlap.

    Returns:
        A recording of the shape (2, 128, 128) per line of the table. Times begin with 0, and labels
        too (class 1 is 0). Events that the file marks as invalid are left out.

    Raises:
        FileNotFoundError: one of the two files does not exist.
        ValueError: a file has another layout.
    """
    path = existing(path, "DVS128 Gesture")
    table = existing(labels or path.with_name(f"{path.stem}_labels.csv"), "the table of labels")
    within(path, "events", regular(path) // 8, max_events, "max_events")
    names, *lines = _lines(table)
    if [name.strip() for name in names.split(",")] != ["class", "startTime_usec", "endTime_usec"]:
        raise layout_error(
            table,
            f"the first line is {names!r}.",
            "the table of labels has the columns class,startTime_usec,endTime_usec",
        )
    parts = [_part(table, line) for line in lines if line.strip()]
    time, polarity, y, x = _aedat(path)
    if (np.diff(time) < 0).any():
        order = np.argsort(time, kind="stable")
        time, polarity, y, x = (a[order] for a in (time, polarity, y, x))
    _check_pixels(path, y, x, DVS128)
    channels = _channels(polarity, y, x, DVS128)
    ends = [slice(*np.searchsorted(time, part[1:])) for part in parts]
    total = sum(end.stop - end.start for end in ends)
    within(path, "events in its recordings", int(total), max_events, "max_events")
    return [
        Events((time[end] - start) * 1e-6, channels[end], DVS128, label - 1)
        for (label, start, _), end in zip(parts, ends, strict=True)
    ]


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text("utf-8").splitlines() or [""]
    except UnicodeDecodeError as error:
        raise layout_error(table, "this is no text.", str(error)) from error


def _part(table: Path, line: str) -> tuple[int, int, int]:
    """Class, start and end of a line."""
    try:
        label, start, end = map(int, line.split(","))
        if not (abs(label) < 2**31 and 0 <= start <= end < 2**62):
            raise ValueError
    except ValueError as error:
        raise layout_error(
            table,
            f"a line is {line[:80]!r}.",
            "a line has three whole numbers, of which the second is not after the third",
        ) from error
    return label, start, end


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


def _check_pixels(path: Path, y: np.ndarray, x: np.ndarray, shape: tuple[int, int, int]) -> None:
    _, height, width = shape
    if len(x) and (y.max() >= height or x.max() >= width):
        raise layout_error(
            path,
            f"there is an event at x = {x.max()}, y = {y.max()}.",
            f"the camera has {width} x {height} pixels",
        )


def _channels(
    polarity: np.ndarray, y: np.ndarray, x: np.ndarray, shape: tuple[int, int, int]
) -> np.ndarray:
    _, height, width = shape
    return (polarity * height + y) * width + x
