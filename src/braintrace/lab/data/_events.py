"""Events of one recording, and their counts in bins of time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..._errors import value_error


@dataclass(frozen=True, slots=True)
class Events:
    """One recording of events, such as the spikes of an artificial cochlea or of an event camera.

    Attributes:
        times: when, in seconds, (n,).
        channels: where, (n,); of a camera the flat index of (polarity, y, x).
        shape: how many channels there are, per axis: (700,), or (2, 34, 34) of a camera.
        label: the class of the recording, None if its file does not say.
    """

    times: np.ndarray
    channels: np.ndarray
    shape: tuple[int, ...]
    label: int | None = None

    def __repr__(self) -> str:
        end = f" until {self.times.max():.3g} s" if len(self.times) else ""
        label = "" if self.label is None else f", label {self.label}"
        return f"Events({len(self.times):,} in channels {self.shape}{end}{label})"


def bin_events(
    events: Events, *, steps: int, dt: float, pool: int | tuple[int, ...] = 1
) -> np.ndarray:
    """Count events in bins of time and of neighbouring channels.

    Args:
        events: a recording.
        steps: number of bins; what comes later than `steps * dt` is left out.
        dt: length of a bin in seconds. Bin `t` has the events from `t * dt` to before
            `(t + 1) * dt`.
        pool: how many neighbouring channels are counted together: a number per axis of the
            channels, or one for the last two axes (x and y of a camera). The last pool has fewer
            channels where the size of an axis is no multiple.

    Returns:
        Counts, (steps, channels); channels of several axes are flat.

    Example:
        >>> import numpy as np
        >>> from braintrace.data import Events, bin_events
        >>> events = Events(np.array([0.1, 0.2, 1.5]), np.array([0, 1, 3]), shape=(4,))
        >>> bin_events(events, steps=2, dt=1.0, pool=2).tolist()
        [[2.0, 0.0], [0.0, 1.0]]
    """
    shape = events.shape
    factors = ((1,) * len(shape) + (pool,) * 2)[-len(shape) :] if isinstance(pool, int) else pool
    if steps < 1 or not dt > 0 or len(factors) != len(shape) or min(factors) < 1:
        raise value_error(
            f"events of the shape {shape} cannot be binned with steps={steps}, dt={dt}, "
            f"pool={pool}.",
            why="there is at least one bin, its length is positive, and every axis of the channels "
            "is pooled by at least 1",
            do=f"pass positive numbers, {len(shape)} of them in `pool`, or one",
        )
    inside = (events.times >= 0) & (events.times < steps * dt)
    # Edges, not a division: a time on an edge is in the later bin whatever the rounding.
    bins = np.searchsorted(np.arange(1, steps) * dt, events.times[inside], side="right")
    channels = events.channels[inside].astype(np.int64)
    if len(channels) and not 0 <= channels.min() <= channels.max() < math.prod(shape):
        raise value_error(
            f"there are channels from {channels.min()} to {channels.max()}.",
            why=f"the shape {shape} has {math.prod(shape)} channels, from 0 on",
            do="pass the shape that the channels have to Events",
        )
    where = np.unravel_index(channels, shape)
    pooled = tuple(-(-size // factor) for size, factor in zip(shape, factors, strict=True))
    flat = np.ravel_multi_index(
        (bins, *(i // factor for i, factor in zip(where, factors, strict=True))), (steps, *pooled)
    )
    size = math.prod(pooled)
    return np.bincount(flat, minlength=steps * size).reshape(steps, size).astype(np.float32)
