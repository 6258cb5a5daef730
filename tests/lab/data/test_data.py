"""Readers and binning, on small files written here in the real layouts, from their definitions."""

import struct
import sys

import h5py
import numpy as np
import pytest

from braintrace import data
from braintrace._errors import MissingExtra

rng = np.random.default_rng(0)


def counted(times, channels, steps, dt, size):
    """The counts by numpy's histogram."""
    edges = np.arange(steps + 1) * dt, np.arange(size + 1) - 0.5
    return np.histogram2d(times, channels, bins=edges)[0]


def write_shd(path, recordings, *, classes=20):
    """HDF5 in the published layout: arrays of different lengths, float16 times, uint16 units."""
    with h5py.File(path, "w") as file:
        for key, kind, column in (("times", np.float16, 0), ("units", np.uint16, 1)):
            rows = np.empty(len(recordings), object)
            for i, recording in enumerate(recordings):
                rows[i] = np.asarray(recording[column], kind)
            type_ = h5py.vlen_dtype(kind)
            file.create_dataset(f"spikes/{key}", data=rows, dtype=type_)
        file["labels"] = np.array([recording[2] for recording in recordings], np.uint16)
        file["extra/keys"] = np.array([b"zero"] * classes)
    return path


def spikes(n, label, channels=700):
    return np.sort(rng.uniform(0, 1.2, n)), rng.integers(0, channels, n), label


def test_shd_counts_are_those_of_a_histogram_and_nan_is_dropped(tmp_path):
    recordings = [spikes(300, 4), spikes(0, 0), spikes(500, 19)]
    recordings[0][0][[3, 7]] = np.nan
    events = data.read_shd(write_shd(tmp_path / "shd_test.h5", recordings))
    assert [e.label for e in events] == [4, 0, 19] and len(events[0].times) == 298
    for e, (times, units, _) in zip(events, recordings, strict=True):
        real = ~np.isnan(times)
        times, units = times[real].astype(np.float16).astype(float), units[real]
        binned = data.bin_events(e, steps=25, dt=0.04)
        np.testing.assert_array_equal(binned, counted(times, units, 25, 0.04, 700))
        pooled = data.bin_events(e, steps=25, dt=0.04, pool=5)
        np.testing.assert_array_equal(pooled, binned.reshape(25, 140, 5).sum(-1))
    second = data.read_shd(tmp_path / "shd_test.h5", [2])
    np.testing.assert_array_equal(second[0].channels, events[2].channels)


def write_nmnist(path, x, y, polarity, time):
    path.parent.mkdir(parents=True)
    words = [int(a) << 32 | int(b) << 24 | int(p) << 23 | int(t)
             for a, b, p, t in zip(x, y, polarity, time, strict=True)]  # fmt: skip
    path.write_bytes(b"".join(word.to_bytes(5, "big") for word in words))


def camera_events(n, side, last):
    x, y = rng.integers(0, side, (2, n))
    return x, y, rng.integers(0, 2, n), np.sort(rng.integers(0, last, n))


def test_nmnist_counts_are_those_of_a_histogram(tmp_path):
    x, y, polarity, time = camera_events(400, 34, 1 << 23)
    write_nmnist(tmp_path / "Train" / "7" / "00001.bin", x, y, polarity, time)
    write_nmnist(tmp_path / "Train" / "2" / "00009.bin", *camera_events(3, 34, 1000))
    both = data.read_nmnist(tmp_path / "Train")
    assert [e.label for e in both] == [2, 7] and both[1].shape == (2, 34, 34)
    (events,) = data.read_nmnist(tmp_path / "Train" / "7" / "00001.bin")
    channels = np.ravel_multi_index((polarity, y, x), (2, 34, 34))
    binned = data.bin_events(events, steps=30, dt=0.1)
    np.testing.assert_array_equal(binned, counted(time * 1e-6, channels, 30, 0.1, 2 * 34 * 34))
    assert 0 < binned.sum() < 400  # what is later than 3 s is left out
    pooled = data.bin_events(events, steps=30, dt=0.1, pool=2)
    blocks = binned.reshape(30, 2, 17, 2, 17, 2).sum((3, 5)).reshape(30, -1)
    np.testing.assert_array_equal(pooled, blocks)
    single = data.bin_events(events, steps=30, dt=0.1, pool=(2, 34, 34))
    np.testing.assert_array_equal(single[:, 0], binned.sum(1))


def test_nmnist_times_go_on_after_an_overflow(tmp_path):
    path = tmp_path / "9" / "a.bin"
    write_nmnist(path, [1, 0, 2, 0, 3], [4, 240, 5, 240, 6], [0, 0, 1, 0, 1], [10, 9, 20, 9, 30])
    (events,) = data.read_nmnist(path)
    np.testing.assert_allclose(events.times, [10e-6, 8212e-6, 16414e-6])
    expected = np.ravel_multi_index(([0, 1, 1], [4, 5, 6], [1, 2, 3]), (2, 34, 34))
    np.testing.assert_array_equal(events.channels, expected)


def packet(kind, body, count, overflow=0, size=8):
    return struct.pack("<hhiiiiii", kind, 1, size, 4, overflow, count, count, count) + body


def write_aedat(path, x, y, polarity, time, valid):
    """AEDAT 3.1, with a packet of another type between those of pixels."""
    assert time.max() >> 31 == time.min() >> 31
    word = x << 17 | y << 2 | polarity << 1 | valid
    low = time & 0x7FFFFFFF
    body = np.stack([word, low], axis=1).astype("<u4")
    overflow, half = int(time[0] >> 31), len(x) // 2
    path.write_bytes(
        b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#!END-HEADER\r\n"
        + packet(1, body[:half].tobytes(), half, overflow)
        + packet(0, bytes(16), 2)
        + packet(1, body[half:].tobytes(), len(x) - half, overflow)
    )
    return path


def test_dvs_gesture_is_cut_by_its_labels(tmp_path):
    x, y, polarity, time = camera_events(600, 128, 2_000_000)
    time = time + (1 << 31)  # past the overflow of the time stamps
    valid = rng.integers(0, 10, 600) > 0
    path = write_aedat(tmp_path / "user01_led.aedat", x, y, polarity, time, valid)
    start, end = time[100] + 1, time[400]
    table = f"class,startTime_usec,endTime_usec\n3,{start},{end}\n11, {end}, {time[-1] + 1}\n\n"
    (tmp_path / "user01_led_labels.csv").write_text(table)
    first, second = data.read_dvs_gesture(path)
    assert (first.label, second.label) == (2, 10)
    part = valid & (time >= start) & (time < end)
    channels = np.ravel_multi_index((polarity, y, x), (2, 128, 128))[part]
    expected = counted((time[part] - start) * 1e-6, channels, 40, 0.05, 2 * 128 * 128)
    binned = data.bin_events(first, steps=40, dt=0.05)
    np.testing.assert_array_equal(binned, expected)
    assert binned.sum() == part.sum() == len(first.times)
    assert len(second.times) == (valid & (time >= end)).sum()


def test_bins_hold_their_first_edge_whatever_the_rounding():
    times = np.arange(30) * 0.1
    events = data.Events(times, np.zeros(30, int), (1,))
    assert (data.bin_events(events, steps=30, dt=0.1) == 1).all()
    odd = data.Events(np.zeros(7), np.arange(7), (7,))
    assert data.bin_events(odd, steps=1, dt=1.0, pool=3).tolist() == [[3, 3, 1]]


def test_csv_streams_by_name_and_by_number(tmp_path):
    path = tmp_path / "demand.csv"
    path.write_text("time,demand,heat\n2014-01-01 00:00,3.5,1\n\n2014-01-01 01:00,-2e1,2\n")
    np.testing.assert_array_equal(data.read_csv(path, ["heat", "demand"]), [[1, 3.5], [2, -20]])
    path.write_text("1,0.5\n2,0.25,\n")  # some programs end lines with a comma
    np.testing.assert_array_equal(data.read_csv(path), [[1, 0.5], [2, 0.25]])
    np.testing.assert_array_equal(data.read_csv(path, [1]), [[0.5], [0.25]])


def test_ts_series_have_their_own_lengths(tmp_path):
    path = tmp_path / "Tiny_TRAIN.ts"
    path.write_text("#about\n@problemName Tiny\n@timeStamps false\n@data\n1,2,3:4,5,6:a\n7:8:b\n")
    series, labels = data.read_ts(path)
    assert labels == ["a", "b"]
    np.testing.assert_array_equal(series[0], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(series[1], [[7, 8]])


def test_batches_have_every_sequence_once_with_its_mask():
    sequences = [np.full((n, 2), n, np.float32) for n in (3, 1, 4, 2, 5)]
    labels, seen = [3, 1, 4, 2, 5], []
    for xs, ys, mask in data.batches(sequences, labels, 2, seed=1):
        assert xs.shape == (5, len(ys), 2) and xs.dtype == np.float32
        np.testing.assert_array_equal(mask.sum(0), ys)
        np.testing.assert_array_equal(xs, (mask * ys)[..., None] * np.ones(2))
        seen += ys.tolist()
    assert sorted(seen) == [1, 2, 3, 4, 5] != seen
    again = [y for _, ys, _ in data.batches(sequences, labels, 2, seed=1) for y in ys]
    assert again == seen
    assert [y for _, ys, _ in data.batches(sequences, labels, 3) for y in ys] == labels


def test_padding_goes_to_the_end_or_to_the_front():
    x = np.arange(1, 5.0)[:, None]
    for front, short, long in ((False, [1, 2, 3, 4, 0], [1, 2]), (True, [0, 1, 2, 3, 4], [3, 4])):
        values, mask = data.pad([x], 5, front=front)
        np.testing.assert_array_equal(values[:, 0, 0], short)
        np.testing.assert_array_equal(mask[:, 0], np.array(short) > 0)
        np.testing.assert_array_equal(data.pad([x], 2, front=front)[0][:, 0, 0], long)


TS = "@timeStamps false\n@data\n"
HEAD = b"#!AER-DAT3.1\r\n#!END-HEADER\r\n"
WRONG = {
    "plain": (data.read_shd, "a.h5", b"no hdf5", "no HDF5 file"),
    "5 bytes": (data.read_nmnist, "a.bin", bytes(7), "has 7 bytes"),
    "pixels": (data.read_nmnist, "a.bin", bytes([40, 0, 0, 0, 0]), "at x = 40"),
    "folder": (data.read_nmnist, "empty/", b"", "does not exist"),
    "version": (data.read_dvs_gesture, "a.aedat", b"#!AER-DAT2.0\r\n", "begins with"),
    "header": (data.read_dvs_gesture, "a.aedat", b"#!AER-DAT3.1\r\n", "header does not end"),
    "cut": (data.read_dvs_gesture, "a.aedat", HEAD + packet(1, bytes(8), 2), "not complete"),
    "head cut": (data.read_dvs_gesture, "a.aedat", HEAD + b"\1\0", "not complete"),
    "size": (data.read_dvs_gesture, "a.aedat", HEAD + packet(1, bytes(4), 1, size=4), "broken"),
    "column": (data.read_csv, "a.csv", b"1,2", "no column 'heat'"),
    "number": (data.read_csv, "a.csv", b"heat\n1\nx\n", "line 3 has 'x' in column 'heat'"),
    "short": (data.read_csv, "a.csv", b"demand,heat\n1\n", "line 2 has nothing"),
    "long": (data.read_csv, "a.csv", b"heat\n\n1\n2,5\n", "line 4 has 2 columns"),
    "empty": (data.read_csv, "a.csv", b"", "no numbers"),
    "only a header": (data.read_csv, "a.csv", b"heat\n", "no numbers"),
    "no data": (data.read_ts, "a.ts", b"1,2:a", "no line @data"),
    "stamps": (data.read_ts, "a.ts", b"@timeStamps true\n@data\n", "time stamps"),
    "uneven": (data.read_ts, "a.ts", f"{TS}1,2:3:a".encode(), "line 3 is no series"),
    "missing": (data.read_ts, "a.ts", f"{TS}1,?:3,4:a".encode(), "line 3 is no series"),
    "no label": (data.read_ts, "a.ts", f"{TS}1,2".encode(), "line 3 is no series"),
}  # fmt: skip


def has_four_parts(error, *, where=True):
    text = str(error.value)
    return "  why:" in text and "  do:" in text and ("  where:" in text or not where)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_layout_is_named(case, tmp_path):
    read, name, content, what = WRONG[case]
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(content)
        (tmp_path / "a_labels.csv").write_text("class,startTime_usec,endTime_usec\n")
    arguments = (["heat"],) if read is data.read_csv else ()
    with pytest.raises((ValueError, FileNotFoundError), match=what) as error:
        read(path, *arguments)
    assert has_four_parts(error, where=not name.endswith("/"))


@pytest.mark.parametrize(
    "read", [data.read_shd, data.read_nmnist, data.read_dvs_gesture, data.read_csv, data.read_ts]
)
def test_a_missing_file_is_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist") as error:
        read(tmp_path / "nowhere")
    assert has_four_parts(error, where=False)


@pytest.mark.parametrize("table, what", [("label\n", "first line"), ("1,x,3\n", "1,x,3")])
def test_a_wrong_table_of_gestures_is_named(table, what, tmp_path):
    path = tmp_path / "a.aedat"
    path.write_bytes(HEAD)
    with pytest.raises(FileNotFoundError, match=r"a_labels\.csv"):
        data.read_dvs_gesture(path)
    head = "" if what == "first line" else "class,startTime_usec,endTime_usec\n"
    (tmp_path / "a_labels.csv").write_text(head + table)
    with pytest.raises(ValueError, match=what) as error:
        data.read_dvs_gesture(path)
    assert has_four_parts(error)


def test_hdf5_of_another_layout_is_named(tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["spikes/times"] = [1.0]
    with pytest.raises(ValueError, match="spikes/units, labels") as error:
        data.read_shd(path)
    assert has_four_parts(error)
    write_shd(path, [([0.5], [3, 4], 0)])
    with pytest.raises(ValueError, match="recording 0"):
        data.read_shd(path)
    write_shd(path, [([0.5], [700], 0)])
    with pytest.raises(ValueError, match="up to 700"):
        data.read_shd(path)
    with h5py.File(path, "a") as file:
        del file["labels"]
        file["labels"] = [1, 2]
    with pytest.raises(ValueError, match="2 labels"):
        data.read_shd(path)


def test_hdf5_without_h5py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r"h5py.*pip install 'braintrace-online\[data\]'"):
        data.read_shd("any.h5")


@pytest.mark.parametrize(
    "call, what",
    [
        (lambda e: data.bin_events(e, steps=0, dt=1.0), "cannot be binned"),
        (lambda e: data.bin_events(e, steps=2, dt=0.0), "cannot be binned"),
        (lambda e: data.bin_events(e, steps=2, dt=1.0, pool=0), "cannot be binned"),
        (lambda e: data.bin_events(e, steps=2, dt=1.0, pool=(1, 2)), "cannot be binned"),
        (lambda e: data.bin_events(e, steps=2, dt=1.0), "channels from 5 to 5"),
        (lambda e: data.pad([]), "do not fit"),
        (lambda e: data.pad([np.zeros((2, 3)), np.zeros((2, 4))]), "do not fit"),
        (lambda e: data.pad([np.zeros(2)]), "do not fit"),
        (lambda e: data.batches([np.zeros((2, 3))], [1, 2], 1), "make no batches"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, what):
    with pytest.raises(ValueError, match=what) as error:
        call(data.Events(np.array([0.5]), np.array([5]), (4,)))
    assert has_four_parts(error, where=False)


def test_events_say_how_many_they_are():
    events = data.Events(np.linspace(0, 1.5, 2000), np.zeros(2000, int), (700,), 3)
    assert repr(events) == "Events(2,000 in channels (700,) until 1.5 s, label 3)"
    assert repr(data.Events(np.zeros(0), np.zeros(0, int), (4,))) == "Events(0 in channels (4,))"
