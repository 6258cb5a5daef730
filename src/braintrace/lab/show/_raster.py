"""Axes to draw on, and spikes of many neurons over time."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np
import saiunit as u
from jax.typing import ArrayLike

from ..._errors import message, value_error

Axes: TypeAlias = Any  # of matplotlib
Duration: TypeAlias = float | u.Quantity


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


def axes(ax: Axes | None = None) -> Axes:
    """These axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            message(
                "braintrace.show needs matplotlib.",
                why="it is not installed: drawing is an extra",
                do="pip install 'braintrace-online[plot]'",
            ),
            name=error.name,
        ) from error
    return pyplot.subplots(layout="constrained")[1]


def times(length: int, dt: Duration | None) -> tuple[np.ndarray, str]:
    """The time after each step, and what to call it: ms if there is a duration of a step."""
    return (np.arange(1, length + 1) * _milliseconds(dt), "time (ms)" if dt is not None else "step")


def _milliseconds(dt: Duration | None) -> float:
    if dt is None:
        return 1.0
    try:
        value = float(dt.to_decimal(u.ms) if isinstance(dt, u.Quantity) else dt)
    except (TypeError, ValueError, u.UnitMismatchError):
        value = float("nan")
    if not value > 0:
        raise value_error(
            f"dt={dt!r}.",
            why="it is the duration of a step",
            do="pass a time such as 1.0 * saiunit.ms, or a positive number of milliseconds",
        )
    return value


def tidy(ax: Axes, **labels: object) -> Axes:
    """Set labels and leave out the frame at the top and the right."""
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
