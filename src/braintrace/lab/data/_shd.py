"""Spiking Heidelberg Digits and Spiking Speech Commands: HDF5 files of spikes of 700 channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..._errors import MissingExtra
from ._events import Events
from ._files import Name, existing, layout_error

CHANNELS = 700
_KEYS = ("spikes/times", "spikes/units", "labels")


def read_shd(path: Name, indices: Sequence[int] | None = None) -> list[Events]:
    """Read recordings of SHD or SSC from an HDF5 file in the published layout.

    The file has `spikes/times` (seconds) and `spikes/units`, an array per recording, and `labels`.
    Spikes whose time is NaN are dropped.

    Args:
        path: `shd_train.h5`, for example; unpacked.
        indices: which recordings, default all.

    Returns:
        Recordings of 700 channels, with labels.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another layout.
    """
    return list(recordings(path, indices))


def recordings(path: Name, indices: Sequence[int] | None = None) -> Iterator[Events]:
    """One after the other: all of SHD at once takes a gigabyte."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise MissingExtra("Reading HDF5", "h5py", "data") from error
    path = existing(path, "SHD or SSC")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise layout_error(
            path, "this is no HDF5 file.", f"h5py says: {error}; a .gz or .zip has to be unpacked"
        ) from error
    with file:
        if missing := [key for key in _KEYS if key not in file]:
            present = ", ".join(sorted(file)) or "nothing"
            raise layout_error(
                path,
                f"the file has no {', '.join(missing)}, but {present}.",
                f"files of SHD and SSC have {', '.join(_KEYS)}",
            )
        times, units, labels = (file[key] for key in _KEYS)
        if not len(times) == len(units) == len(labels):
            raise layout_error(
                path,
                f"there are {len(times)} arrays of times, {len(units)} of units and "
                f"{len(labels)} labels.",
                "a recording has one of each",
            )
        chosen = range(len(labels)) if indices is None else indices
        for i in chosen:
            yield _recording(path, i, times[i], units[i], int(labels[i]))


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
