"""States, eligibility traces and learning signals of a recording, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import saiunit as u

from ..._errors import dotted, value_error
from ._raster import Axes, Duration, axes, ends, one_sample, tidy, times
from ._recording import Name, Recording, lookup, path_of

Lines = Mapping[str, jax.Array | np.ndarray]


def traces(
    recording: Recording,
    weight: Name | None = None,
    *,
    dt: Duration | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw eligibility traces over time: the length of each, or the recorded entries of one.

    `dt`, `ax` and the result are those of `raster`.

    Args:
        recording: what `record` returned.
        weight: the path of a parameter, as a tuple or a name with dots; default all, by length.

    Raises:
        ValueError: the recording has no trace of this parameter.
    """
    after, label = times(recording.after, dt)
    if weight is None:
        if not recording.traces:
            raise _nothing("traces", "no parameter has one, or `weights` was empty")
        lines: Lines = {dotted(path): trace.norm for path, trace in recording.traces.items()}
        return _curves(axes(ax), after, lines, label, "length of the trace")
    trace = lookup(recording.traces, weight, "trace of")
    lines = dict(zip(trace.labels, np.asarray(trace.entries).T, strict=True))
    ax = _curves(axes(ax), after, lines, label, "trace")
    ax.set_title(f"eligibility trace of {dotted(path_of(weight))}", fontsize="medium")
    return ax


def signals(
    recording: Recording,
    state: Name | None = None,
    *,
    dt: Duration | None = None,
    sample: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw learning signals `∂L_t/∂h_t` over time: the length of each, or one by neuron.

    `dt`, `sample`, `ax` and the result are those of `raster`.

    Args:
        recording: what `record` returned, with a `step_fn`.
        state: the path of a state, as a tuple or a name with dots: a map of its neurons (red pushes
            the loss up, blue down). Default all states, by length.

    Raises:
        ValueError: the recording has no signal of this state.
    """
    after, label = times(recording.after, dt)
    if state is None:
        if not recording.signals:
            raise _nothing("learning signals", "made without a step_fn, or `states` was empty")
        lines = {
            dotted(path): np.linalg.norm(np.asarray(a).reshape(len(after), -1), axis=1)
            for path, a in recording.signals.items()
        }
        return _curves(axes(ax), after, lines, label, "length of ∂L/∂h")
    array = one_sample(lookup(recording.signals, state, "learning signal of"), sample)
    ax = axes(ax)
    most = float(np.abs(array).max()) or 1.0
    step = after[1] - after[0] if len(after) > 1 else 1.0
    half = step / 2
    image = ax.imshow(
        array.T,
        aspect="auto",
        origin="lower",
        interpolation="none",
        cmap="RdBu_r",
        vmin=-most,
        vmax=most,
        extent=(after[0] - half, after[-1] + half, -0.5, array.shape[1] - 0.5),
    )
    # Beside the axes, so that these keep the width that axes above and below them have.
    ax.figure.colorbar(image, cax=ax.inset_axes((1.01, 0, 0.015, 1)), label="∂L/∂h")
    ax.set_title(f"learning signal at {dotted(path_of(state))}", fontsize="medium")
    return tidy(ax, xlabel=label, ylabel="neuron", xlim=ends(after))


def states(
    recording: Recording,
    state: Name,
    *,
    neurons: int | Sequence[int] = 5,
    dt: Duration | None = None,
    sample: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a state, such as a membrane potential, over time.

    `dt`, `sample`, `ax` and the result are those of `raster`.

    Args:
        recording: what `record` returned.
        state: the path of a state, as a tuple or a name with dots.
        neurons: how many to draw, the first ones; or their indices.

    Raises:
        ValueError: the recording has no such state.
    """
    after, label = times(recording.after, dt)
    values = lookup(recording.states, state, "state")
    unit = u.get_unit(values)
    array = one_sample(values, sample)
    indices = range(min(neurons, array.shape[1])) if isinstance(neurons, int) else neurons
    lines = {f"neuron {i}": array[:, i] for i in indices}
    name = dotted(path_of(state))
    if not unit.is_unitless:
        name = f"{name} ({unit})"
    return _curves(axes(ax), after, lines, label, name)


def _curves(ax: Axes, after: np.ndarray, lines: Lines, xlabel: str, ylabel: str) -> Axes:
    for name, values in lines.items():
        ax.plot(after, np.asarray(values), label=name, linewidth=1.2)
    if len(lines) > 1 or (lines and "[" not in next(iter(lines))):
        ax.legend(frameon=False, fontsize="x-small", ncols=1 + len(lines) // 9)
    return tidy(ax, xlabel=xlabel, ylabel=ylabel, xlim=ends(after))


def _nothing(what: str, why: str) -> ValueError:
    return value_error(
        f"the recording has no {what}.",
        why=why,
        do="record again: see braintrace.show.record",
    )
