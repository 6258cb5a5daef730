"""Axes to draw on, and their time axis."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import saiunit as u

from .._errors import message, value_error

Axes: TypeAlias = Any  # of matplotlib
Duration: TypeAlias = float | u.Quantity


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
                do="pip install 'braintrace[plot]'",
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
