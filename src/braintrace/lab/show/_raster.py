"""Axes to draw on, and spikes of many neurons over time."""

from __future__ import annotations

from collections.abc import Mapping
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
    psth: bool = False,
    ax: Axes | None = None,
    color: str | None = None,
) -> Axes:
    """Draw a raster plot: a mark for every spike, neurons from bottom to top.

    Args:
        spikes: an array (T, N), or (T, B, N) of several samples; what is not zero is a spike.
        dt: the duration of a step, a time or a number of milliseconds; default counts steps.
        sample: which sample to draw, of several.
        psth: whether to draw the rate over time below, see `rates`: over all samples.
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
    after, label = times(np.arange(1, len(array) + 1), dt)
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
    tidy(ax, ylabel="neuron", xlim=ends(after), ylim=(-0.6, max(array.shape[1], 1) - 0.4))
    if not psth:
        return tidy(ax, xlabel=label)
    below = _below(ax)
    ax.tick_params(labelbottom=False)
    rates(spikes, dt=dt, ax=below)
    return ax


def _below(ax: Axes, gap: float = 0.1, height: float = 0.7) -> Axes:
    """Axes of so many inches under others, as wide as they are.

    As a part of these they keep the width that axes in the same column have. In inches, since a
    layout that makes room for them by shrinking the others must not shrink them as well.
    """
    from matplotlib import transforms

    start = transforms.ScaledTranslation(0, 0, ax.transAxes)
    inches = ax.figure.dpi_scale_trans + start
    place = transforms.blended_transform_factory(ax.transAxes, inches)
    return ax.inset_axes((0, -gap - height, 1, height), transform=place, sharex=ax)


def rates(
    spikes: ArrayLike,
    *,
    dt: Duration | None = None,
    width: Duration | None = None,
    groups: Mapping[str, Any] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw firing rates over time, in bins: the mean over neurons, and over samples (a PSTH).

    `dt`, `ax` and the result are those of `raster`.

    Args:
        spikes: an array (T, N), or (T, B, N) of several samples.
        width: of a bin: a time or a number of milliseconds, without `dt` a number of steps;
            default a fortieth of the whole.
        groups: names of populations, and the indices or the slice of their neurons; default one
            of all neurons.

    Raises:
        ValueError: the shape, `dt` or `width` does not fit.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> ax = braintrace.show.rates(jnp.eye(8), dt=0.5, groups={"E": slice(6), "I": [6, 7]})
        >>> ax.get_ylabel()
        'rate (Hz)'
    """
    array = all_samples(spikes).mean(1)
    after, label = times(np.arange(1, len(array) + 1), dt)
    step = milliseconds(dt)
    whole = max(1, -(-len(array) // 40)) if width is None else _steps(width, dt, step)
    starts = np.arange(0, len(array), whole)
    counts = np.diff([*starts, len(array)])
    edges = step * np.array([*starts, len(array)]) + step / 2
    ax = axes(ax)
    for name, neurons in ({"all": slice(None)} if groups is None else groups).items():
        mean = array[:, neurons].mean(1)
        binned = np.add.reduceat(mean, starts) / counts if len(array) else mean
        ax.stairs(binned * (1.0 if dt is None else 1e3 / step), edges, label=name, linewidth=1.2)
    if groups is not None:
        ax.legend(frameon=False, fontsize="x-small")
    name = "spikes per step" if dt is None else "rate (Hz)"
    return tidy(ax, xlabel=label, ylabel=name, xlim=ends(after))


def _steps(width: Duration, dt: Duration | None, step: float) -> int:
    """The steps of a bin."""
    if dt is None and isinstance(width, u.Quantity):
        raise value_error(
            f"width={width!r} without dt.",
            why="the duration of a step is not known, so a bin is a number of steps",
            do="pass dt as well, or a number of steps",
        )
    return max(1, round(milliseconds(width, "width") / step))


def all_samples(array: ArrayLike) -> np.ndarray:
    """An array (T, B, N); of (T, N) it is that of one sample."""
    array = np.asarray(jax.device_get(u.get_mantissa(array)))
    return array if array.ndim == 3 else one_sample(array, None)[:, None]


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


def times(steps: np.ndarray, dt: Duration | None) -> tuple[np.ndarray, str]:
    """The time after these steps, and what to call it: ms if there is a duration of a step."""
    return np.asarray(steps) * milliseconds(dt), "time (ms)" if dt is not None else "step"


def ends(after: np.ndarray) -> tuple[float, float]:
    """From where to where axes of these times go: the same for all plots of one recording."""
    return (0.0, float(after[-1] + after[0])) if len(after) else (0.0, 1.0)


def milliseconds(dt: Duration | None, name: str = "dt") -> float:
    """A duration as a number of milliseconds; 1 for none."""
    if dt is None:
        return 1.0
    try:
        value = float(dt.to_decimal(u.ms) if isinstance(dt, u.Quantity) else dt)
    except (TypeError, ValueError, u.UnitMismatchError):
        value = float("nan")
    if not value > 0:
        raise value_error(
            f"{name}={dt!r}.",
            why="it is the duration of a step" if name == "dt" else "it is a duration",
            do="pass a time such as 1.0 * saiunit.ms, or a positive number of milliseconds",
        )
    return value


def tidy(ax: Axes, **labels: object) -> Axes:
    """Set labels and leave out the frame at the top and the right."""
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
