"""Spiking Heidelberg Digits and Spiking Speech Commands: HDF5 files of spikes of 700 channels."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..._errors import MissingExtra
from ._events import Events
from ._files import LayoutError, Name, existing, layout_error, regular, within

CHANNELS = 700
EVENTS, RECORDINGS = (
    10**9,
    10**6,
)  # limits; SSC, the larger one, has 6e8 spikes in 75,000 recordings
CHUNK = 2**26  # bytes that are unpacked at once
_KEYS = ("spikes/times", "spikes/units", "labels")


def read_shd(
    path: Name,
    indices: Sequence[int] | None = None,
    *,
    max_events: int = EVENTS,
    max_recordings: int = RECORDINGS,
) -> list[Events]:
    """Read recordings of SHD or SSC from an HDF5 file in the published layout.

    The file has `spikes/times` (seconds) and `spikes/units`, an array per recording, and `labels`.
    Spikes whose time is NaN are dropped. Nothing but the file itself is read: links to other files
    and external storage are refused.

    Args:
        path: `shd_train.h5`, for example; unpacked.
        indices: which recordings, default all.
        max_events: spikes that are read at most.
        max_recordings: recordings that the file may have.

    Returns:
        Recordings of 700 channels, with labels.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another layout, no such recording, or more than the limits.
    """
    limits = {"max_events": max_events, "max_recordings": max_recordings}
    return list(recordings(path, indices, **limits))


def recordings(
    path: Name,
    indices: Sequence[int] | None = None,
    *,
    max_events: int = EVENTS,
    max_recordings: int = RECORDINGS,
) -> Iterator[Events]:
    """One after the other: all of SHD at once takes a gigabyte."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise MissingExtra("Reading HDF5", "h5py", "data") from error
    path = existing(path, "SHD or SSC")
    size = regular(path)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise layout_error(
            path, "this is no HDF5 file.", f"h5py says: {error}; a .gz or .zip has to be unpacked"
        ) from error
    with file:
        with _readable(path, "the lists"):
            if missing := [key for key in _KEYS if not _is_there(h5py, path, file, key)]:
                present = ", ".join(sorted(file)) or "nothing"
                raise layout_error(
                    path,
                    f"the file has no {', '.join(missing)}, but {present}.",
                    f"files of SHD and SSC have {', '.join(_KEYS)}",
                )
            times, units, labels = (_dataset(h5py, path, file, key) for key in _KEYS)
        if not len(times) == len(units) == len(labels):
            raise layout_error(
                path,
                f"there are {len(times)} arrays of times, {len(units)} of units and "
                f"{len(labels)} labels.",
                "a recording has one of each",
            )
        within(path, "recordings", len(labels), max_recordings, "max_recordings")
        _check_size(path, "recordings", len(labels), size)
        heaps: dict[str, _Heap] = {}
        with _readable(path, "the lengths"):
            for key, lists in zip(_KEYS, (times, units), strict=False):
                heaps[key] = _Heap(h5py, path, lists, key, size)
        events = 0
        for i in range(len(labels)) if indices is None else indices:
            with _readable(path, f"recording {i}"):
                for heap in heaps.values():
                    heap.check(i)
                recording = times[i], units[i], int(labels[i])
            events += len(recording[0])
            within(path, "spikes", events, max_events, "max_events")
            _check_size(path, "spikes", events, size)
            yield _recording(path, i, *recording)


@contextmanager
def _readable(path: Name, what: str) -> Iterator[None]:
    """Errors of HDF5, which are of any type, as ours."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        raise layout_error(path, f"{what} cannot be read.", f"h5py says: {error}") from error


def _is_there(h5py: Any, path: Name, file: Any, key: str) -> bool:
    """Whether there is such a thing in this very file; links are refused, wherever they lead."""
    parts, links = key.split("/"), file.id.links
    for name in ("/".join(parts[: n + 1]) for n in range(len(parts))):
        if not links.exists(name.encode()):
            return False
        if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise layout_error(path, f"{name} is a link.", "it may lead to any other file")
    return True


def _check_size(path: Name, what: str, count: int, size: int) -> None:
    if count > size:
        raise layout_error(
            path, f"{size} bytes say that they are {count} {what}.", "each takes some bytes"
        )


def _dataset(h5py: Any, path: Name, file: Any, key: str) -> Any:
    """A dataset whose bytes are in this file, and whose parts have a size that can be read."""
    data = file[key]
    if not isinstance(data, h5py.Dataset) or data.ndim != 1:
        raise layout_error(path, f"{key} is no list.", "there is one entry per recording")
    if data.external or data.is_virtual:
        raise layout_error(path, f"{key} is stored in another file.", "any file could be read so")
    inner = data.dtype if key == "labels" else h5py.check_vlen_dtype(data.dtype)
    kinds = "f" if key.endswith("times") else "iu"
    if inner is None or np.dtype(inner).kind not in kinds:
        raise layout_error(
            path,
            f"{key} has the type {data.dtype}.",
            "times are floating numbers and units whole ones, an array of its own length per "
            "recording; a label is a whole number",
        )
    if data.chunks and math.prod(data.chunks) * data.dtype.itemsize > CHUNK:
        raise layout_error(
            path, f"{key} is stored in parts of {data.chunks}.", f"a part has up to {CHUNK} bytes"
        )
    return data


class _Heap:
    """Where the arrays of a list are, to look at it before HDF5 does.

    HDF5 makes room for an array before it looks whether the file has it, and may read for ever in a
    collection of arrays that do not fit into it. A reference is a length (4 bytes), the address of
    a collection, and a number in that; a collection is `GCOL`, a version, its size (8 bytes at 8),
    and from 16 on its arrays: a number (2 bytes), 6 others, a size (8 bytes), and the bytes, padded
    to 8. Number 0 is the free space at its end.
    """

    def __init__(self, h5py: Any, path: Path, data: Any, key: str, size: int):
        self.path, self.key, self.size = path, key, size
        self.item = h5py.check_vlen_dtype(data.dtype).itemsize
        step = 8 + data.file.id.get_create_plist().get_sizes()[0]
        self.first = data.file.userblock_size  # where addresses begin
        self.references = np.zeros((len(data), step), np.uint8)
        for first, raw in _references(h5py, path, data, key, step):
            part = np.frombuffer(raw, np.uint8).reshape(-1, step)[: len(data) - first]
            self.references[first : first + len(part)] = part
        self.collections: dict[int, dict[int, int]] = {}  # sizes by number, by address

    def check(self, i: int) -> None:
        """Refuse an array that the file does not have."""
        raw = self.references[i].tobytes()
        length, address, number = (
            int.from_bytes(part, "little") for part in (raw[:4], raw[4:-4], raw[-4:])
        )
        if length * self.item > self.size:
            raise layout_error(
                self.path,
                f"recording {i} of {self.key} says it has {length} spikes.",
                f"the file has {self.size} bytes",
            )
        if length and address not in self.collections:
            self.collections = {address: self._collection(address)}
        if length and self.collections[address].get(number) != length * self.item:
            raise self._wrong(f"recording {i} of {self.key} is not where it should be")

    def _collection(self, address: int) -> dict[int, int]:
        """The sizes of the arrays in a collection, by number."""
        with open(self.path, "rb") as file:
            file.seek(self.first + address)
            head = file.read(16)
            end = int.from_bytes(head[8:], "little")
            if head[:5] != b"GCOL\1" or not 16 <= end <= self.size - address:
                raise self._wrong(f"there are no arrays at byte {address}")
            sizes, at = {}, 16
            while at + 16 <= end:
                file.seek(self.first + address + at)
                head = file.read(16)
                number, size = (int.from_bytes(p, "little") for p in (head[:2], head[8:]))
                if number == 0:
                    if at + size != end:
                        raise self._wrong(f"the arrays at byte {address} do not fit")
                    break
                at += 16 + size + -size % 8
                if at > end or number in sizes:
                    raise self._wrong(f"the arrays at byte {address} do not fit")
                sizes[number] = size
        return sizes

    def _wrong(self, what: str) -> ValueError:
        return layout_error(self.path, f"{what}.", "it is damaged, or was never complete")


def _references(
    h5py: Any, path: Path, data: Any, key: str, step: int
) -> Iterator[tuple[int, bytes]]:
    """The list itself, by parts: for each array a length (4 bytes), and where its numbers are."""
    if data.chunks is None:
        offset = data.id.get_offset()
        if offset is not None:  # else nothing was ever written
            with open(path, "rb") as file:
                file.seek(offset)
                yield 0, file.read(len(data) * step)
        elif len(data) and data.id.get_storage_size():
            raise layout_error(path, f"{key} is stored in a header.", "long lists are not")
        return
    plist = data.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    if not {*filters} <= {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE}:
        raise layout_error(path, f"{key} is compressed in its own way.", "gzip can be read")
    full = data.chunks[0] * step
    for n in range(data.id.get_num_chunks()):
        (first,) = data.id.get_chunk_info(n).chunk_offset
        mask, raw = data.id.read_direct_chunk((first,))
        for i, code in reversed([*enumerate(filters)]):
            if mask >> i & 1:
                continue
            if code == h5py.h5z.FILTER_DEFLATE:
                raw = zlib.decompressobj().decompress(raw, full)
            else:
                raw = np.frombuffer(raw, np.uint8).reshape(step, -1).T.tobytes()
        yield first, raw[: len(raw) // step * step]


def _recording(path: Name, i: int, times: np.ndarray, units: np.ndarray, label: int) -> Events:
    times, units = np.asarray(times, float), np.asarray(units)
    if len(times) != len(units) or (len(units) and not 0 <= units.min() <= units.max() < CHANNELS):
        raise layout_error(
            path,
            f"recording {i} has {len(times)} times and {len(units)} units, "
            f"up to {max(units, default=0)}.",
            f"a spike has a time and one of {CHANNELS} units",
        )
    real = ~np.isnan(times)
    return Events(times[real], units[real].astype(np.int64), (CHANNELS,), label)
