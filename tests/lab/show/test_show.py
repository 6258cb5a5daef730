"""The pictures: what is drawn is what was recorded, on the axes that were asked for."""

import sys
from dataclasses import replace

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import saiunit as u

from braintrace import show

matplotlib.use("Agg")
from matplotlib import pyplot

T, N = 6, 4
SPIKES = np.zeros((T, N))
SPIKES[[0, 2, 5], [1, 3, 0]] = 1


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


@pytest.fixture
def recording():
    t = np.arange(T, dtype=float)
    signal = jnp.asarray(np.stack([t, -2 * t], 1))
    trace = show.TraceRecord(jnp.asarray(t), jnp.asarray(np.stack([t, t**2], 1)), ("w[0]", "w[1]"))
    other = show.TraceRecord(jnp.asarray(2 * t), jnp.zeros((T, 1)), ("w[0]",))
    return show.Recording(
        length=T,
        outputs=None,
        states={("cell", "v"): signal * u.mV, ("r",): jnp.stack([signal, -signal], 1)},
        groups=((("cell", "v"),), (("r",),)),
        traces={("cell", "w"): trace, ("w2",): other},
        losses=jnp.zeros(T),
        signals={("cell", "v"): signal, ("r",): jnp.stack([signal, -signal], 1)},
        gradients={},
    )


def points(ax):
    return sorted(zip(*ax.lines[0].get_data(), strict=True))


def test_raster_marks_every_spike_at_its_time():
    assert points(show.raster(SPIKES)) == [(1, 1), (3, 3), (6, 0)]
    ax = show.raster(jnp.asarray(SPIKES), dt=0.5 * u.ms)
    assert points(ax) == [(0.5, 1), (1.5, 3), (3, 0)] and ax.get_xlabel() == "time (ms)"
    assert points(show.raster(SPIKES, dt=0.002 * u.second)) == [(2, 1), (6, 3), (12, 0)]
    assert show.raster(SPIKES).get_xlabel() == "step"


def test_raster_draws_one_sample():
    both = np.stack([SPIKES, 0 * SPIKES], 1)
    assert points(show.raster(both, sample=0)) == [(1, 1), (3, 3), (6, 0)]
    assert points(show.raster(both, sample=1)) == []
    assert len(points(show.raster(both[:, :1]))) == 3
    for bad in (None, 2, -1):
        with pytest.raises(ValueError, match=f"sample={bad}(.|\n)*sample=0"):
            show.raster(both, sample=bad)
    with pytest.raises(ValueError, match="no axis of samples"):
        show.raster(SPIKES, sample=0)
    with pytest.raises(ValueError, match=r"\(6,\)"):
        show.raster(SPIKES[:, 0])


@pytest.mark.parametrize("dt", [0, -1.0, 2 * u.mV, "1 ms", float("nan")])
def test_dt_must_be_a_duration(dt):
    with pytest.raises(ValueError, match="duration of a step"):
        show.raster(SPIKES, dt=dt)


def test_rates_are_means_over_neurons_samples_and_bins():
    ax = show.rates(SPIKES, width=2)
    (stairs,) = ax.patches
    np.testing.assert_allclose(stairs.get_data().values, [1 / 8, 1 / 8, 1 / 8])
    assert stairs.get_data().edges.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert ax.get_ylabel() == "spikes per step"
    groups = {"E": slice(2), "I": [2, 3]}
    both = np.stack([SPIKES, 0 * SPIKES], 1)
    ax = show.rates(both, dt=0.5 * u.ms, width=2 * u.ms, groups=groups)
    values = [p.get_data().values for p in ax.patches]
    np.testing.assert_allclose(values, [[1000 / 8, 1000 / 4], [1000 / 8, 0]])  # of 4 and 2 steps
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["E", "I"]
    assert len(show.rates(np.ones((400, 1))).patches[0].get_data().values) == 40
    for bad, text in ((0.0, "width=0.0"), (2 * u.ms, "without dt")):
        with pytest.raises(ValueError, match=text):
            show.rates(SPIKES, width=bad)


def test_raster_has_the_rate_below():
    ax = show.raster(SPIKES, dt=1.0, psth=True)
    (below,) = ax.child_axes
    assert below.get_ylabel() == "rate (Hz)" and below.get_xlim() == ax.get_xlim()
    assert below.patches[0].get_data().values.sum() == pytest.approx(750)


def test_axes_in_a_column_are_aligned(recording):
    figure, columns = pyplot.subplots(4, layout="constrained")
    drawn = [
        show.raster(SPIKES, dt=1.0, psth=True, ax=columns[0]),
        show.traces(recording, "cell.w", dt=1.0, ax=columns[1]),
        show.signals(recording, "cell.v", dt=1.0, ax=columns[2]),
        show.states(recording, "cell.v", dt=1.0, ax=columns[3]),
    ]
    figure.canvas.draw()
    assert len({(ax.get_position().x0, ax.get_position().x1) for ax in drawn}) == 1
    assert {ax.get_xlim() for ax in drawn} == {(0.0, 7.0)}


def test_records_of_training_are_at_their_steps(recording):
    thin = replace(recording, steps=np.arange(10, 70, 10))
    line = show.states(thin, "cell.v", neurons=1, dt=0.5).lines[0]
    assert line.get_xdata().tolist() == [5, 10, 15, 20, 25, 30]
    image = show.signals(thin, "cell.v").images[0]
    assert image.get_extent() == [5, 65, -0.5, 1.5]


def test_traces_are_drawn_by_length_or_one_by_its_entries(recording):
    ax = show.traces(recording)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert drawn == {"cell.w": [0, 1, 2, 3, 4, 5], "w2": [0, 2, 4, 6, 8, 10]}
    ax = show.traces(recording, "cell.w", dt=2)
    assert ax.lines[1].get_xydata().tolist() == [[2 * t + 2, t**2] for t in range(T)]
    assert [line.get_label() for line in ax.lines] == ["w[0]", "w[1]"]
    with pytest.raises(ValueError, match=r"'nothing'.\n.*cell.w, w2"):
        show.traces(recording, "nothing")


def test_signals_are_drawn_by_length_or_one_as_a_map(recording):
    ax = show.signals(recording)
    lengths = {line.get_label(): line.get_ydata() for line in ax.lines}
    np.testing.assert_allclose(lengths["cell.v"], np.sqrt(5) * np.arange(T))
    np.testing.assert_allclose(lengths["r"], np.sqrt(10) * np.arange(T))
    ax = show.signals(recording, ("cell", "v"))
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), recording.signals["cell", "v"].T)
    assert image.get_clim() == (-10, 10)  # zero is white
    ax = show.signals(recording, "r", sample=1)
    np.testing.assert_array_equal(ax.images[0].get_array(), -recording.signals["cell", "v"].T)


def test_states_are_drawn_with_their_unit(recording):
    ax = show.states(recording, "cell.v", neurons=[1])
    assert ax.get_ylabel() == "cell.v (mV)"
    assert ax.lines[0].get_ydata().tolist() == [-2.0 * t for t in range(T)]
    assert len(show.states(recording, "r", sample=0).lines) == 2


def test_pictures_are_drawn_on_the_given_axes(recording):
    figure, (a, b, c, d) = pyplot.subplots(4)
    assert show.raster(SPIKES, ax=a) is a
    assert show.traces(recording, ax=b) is b
    assert show.signals(recording, ax=c) is c
    assert show.states(recording, "cell.v", ax=d) is d
    assert pyplot.get_fignums() == [figure.number]


def test_empty_recordings_say_what_is_missing(recording):
    empty = show.Recording(T, None, {}, (), {}, None, {}, {})
    with pytest.raises(ValueError, match="made without a step_fn"):
        show.signals(empty)
    with pytest.raises(ValueError, match="no parameter has one"):
        show.traces(empty)


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'braintrace-online\[plot\]'"):
        show.raster(SPIKES)
