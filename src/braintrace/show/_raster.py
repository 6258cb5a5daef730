"""Spikes of many neurons over time."""

from __future__ import annotations

import jax
import numpy as np
import saiunit as u
from jax.typing import ArrayLike

from .._errors import value_error
from ._axes import Axes, Duration, axes, tidy, times


def raster(
    spikes: ArrayLike,
    *,
    dt: Duration | None = None,
    sample: int | None = None,
    ax: Axes | None = None,
    color: str | None = None,
) -> Axes:
    """Draw a raster plot: a mark for every spike, neurons from bottom to top.

    Args:
        spikes: an array (T, N), or (T, B, N) of several samples; what is not zero is a spike.
        dt: the duration of a step, a time or a number of milliseconds; default counts steps.
        sample: which sample to draw, of several.
        ax: axes to draw on; default those of a new figure.
        color: colour of the marks.

    Returns:
        the axes.

    Raises:
        ValueError: the shape, `sample` or `dt` does not fit.
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> ax = braintrace.show.raster(jnp.eye(5), dt=0.5)
        >>> ax.get_xlabel()
        'time (ms)'
    """
    array = one_sample(spikes, sample)
    after, label = times(len(array), dt)
    step, neuron = np.nonzero(array)
    ax = axes(ax)
    height = ax.get_window_extent().height * 72 / ax.figure.dpi  # of the axes, in points
    size = max(2.5, min(12.0, 0.8 * height / max(array.shape[1], 1)))
    ax.plot(
        after[step],
        neuron,
        linestyle="none",
        marker="|",
        markersize=size,
        markeredgewidth=1.1,
        color="black" if color is None else color,
    )
    ends = (after[0] - after[0], after[-1] + after[0]) if len(after) else (0.0, 1.0)
    return tidy(
        ax, xlabel=label, ylabel="neuron", xlim=ends, ylim=(-0.6, max(array.shape[1], 1) - 0.4)
    )


def one_sample(array: ArrayLike, sample: int | None) -> np.ndarray:
    """An array (T, N), or (T, B, N) without its axis of samples."""
    array = np.asarray(jax.device_get(u.get_mantissa(array)))
    if array.ndim not in (2, 3):
        raise value_error(
            f"an array of shape {array.shape}.",
            why="expected one of steps and neurons (T, N), or with samples between (T, B, N)",
            do="choose the axes to draw first",
        )
    if array.ndim == 2:
        if sample is not None:
            raise value_error(
                f"sample={sample} of an array of shape {array.shape}.",
                why="it has no axis of samples",
                do="leave it out",
            )
        return array
    if sample is None and array.shape[1] == 1:
        return array[:, 0]
    if sample is None or not 0 <= sample < array.shape[1]:
        raise value_error(
            f"sample={sample} of {array.shape[1]} samples.",
            why="one sample is drawn",
            do=f"choose sample=0 to {array.shape[1] - 1}",
        )
    return array[:, sample]
