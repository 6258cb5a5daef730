"""A small SHD: two files in the published layout, whose spikes depend on the label."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from ..data.test_data import write_shd


@cache
def small_shd():
    """Their folder."""
    rng, folder = np.random.default_rng(0), Path(tempfile.mkdtemp())
    for half, count in (("train", 80), ("test", 40)):
        recordings = []
        for i in range(count):
            label = i * 7 % 20
            times = np.sort(rng.uniform(0, 1.3, 60))
            units = np.clip(35 * label + rng.integers(-20, 21, 60), 0, 699)
            recordings.append((times, units, label))
        write_shd(folder / f"shd_{half}.h5", recordings)
    return folder
