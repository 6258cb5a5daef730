"""Recordings that lie: small files that declare any size, files that lead to others, wrong text."""

import os
import struct
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest

from braintrace.lab import data

rng = np.random.default_rng(0)


def write_shd(path, n=3):
    """A small file in the layout of SHD."""
    with h5py.File(path, "w") as file:
        for key, kind in (("times", np.float16), ("units", np.uint16)):
            rows = np.empty(n, object)
            for i in range(n):
                rows[i] = np.arange(4).astype(kind)
            file.create_dataset(f"spikes/{key}", data=rows, dtype=h5py.vlen_dtype(kind))
        file["labels"] = np.arange(n, dtype=np.uint16)
    return path


def peak_of(call):
    """Bytes at most that a call has allocated."""
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20e6, peak


def refused(read, path, what, **options):
    """The text of the error, which takes no memory."""

    def call():
        with pytest.raises(ValueError, match=what) as error:
            read(path, **options)
        assert "why:" in str(error.value) and "do:" in str(error.value)

    peak_of(call)


def empty(file, key, kind, shape, **options):
    """A dataset whose compressed parts were never written."""
    del file[key]
    file.create_dataset(key, shape, kind, chunks=True, compression="gzip", **options)


def test_small_file_that_declares_many_spikes_is_refused(tmp_path):
    path = write_shd(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        empty(file, "spikes/times", np.float16, (3, 5 * 10**8))
        empty(file, "spikes/units", np.uint16, (3, 5 * 10**8))
    refused(data.read_shd, path, "spikes/times is no list")


def test_small_file_that_declares_many_recordings_is_refused(tmp_path):
    path = write_shd(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        for key, kind in (("times", np.float16), ("units", np.uint16)):
            empty(file, f"spikes/{key}", h5py.vlen_dtype(kind), (10**9,))
        empty(file, "labels", np.uint16, (10**9,))
    refused(data.read_shd, path, "has 1000000000 recordings")
    refused(data.read_shd, path, "bytes say that they are", max_recordings=10**10)


@pytest.mark.parametrize("storage", [{}, {"chunks": (2,)}, {"chunks": (2,), "compression": "gzip",
                                                           "shuffle": True}])  # fmt: skip
def test_length_that_the_file_cannot_hold_is_refused(storage, tmp_path):
    """HDF5 itself takes 8 GB for it."""
    path = write_shd(tmp_path / "a.h5")
    kind = h5py.vlen_dtype(np.float16)
    with h5py.File(path, "a") as file:
        rows = file["spikes/times"][:]
        del file["spikes/times"]
        file.create_dataset("spikes/times", data=rows, dtype=kind, **storage)
    with h5py.File(path) as file:
        first, content, times = 0, None, file["spikes/times"]
        if storage:
            first, content = 2, times.id.read_direct_chunk((2,))[1]
        offset = times.id.get_chunk_info(1).byte_offset if storage else times.id.get_offset()
    assert [len(e.times) for e in data.read_shd(path)] == [4] * 3
    if "compression" in storage:
        shuffled = bytearray(zlib.decompress(content))
        shuffled[6] = 255
        with h5py.File(path, "a") as file:
            file["spikes/times"].id.write_direct_chunk((2,), zlib.compress(bytes(shuffled)))
    else:
        with open(path, "r+b") as file:
            file.seek(offset + 3)
            file.write(b"\xff")
    said = rf"recording {first} of spikes/times says it has \d{{10}} spikes"
    refused(data.read_shd, path, said)


@pytest.mark.parametrize("options", [{}, {"userblock_size": 512}, {"libver": "latest"}])
def test_recordings_of_all_lengths_are_read(options, tmp_path):
    lengths = [0, 1, 3, 2000, 0, 50_000, 7, *range(300)]
    with h5py.File(tmp_path / "a.h5", "w", **options) as file:
        for key, kind in (("times", np.float16), ("units", np.uint16)):
            rows = np.empty(len(lengths), object)
            for i, n in enumerate(lengths):
                rows[i] = (np.arange(n) % 700).astype(kind)
            file.create_dataset(f"spikes/{key}", data=rows, dtype=h5py.vlen_dtype(kind))
        file["labels"] = np.zeros(len(lengths), np.uint16)
    assert [len(e.times) for e in data.read_shd(tmp_path / "a.h5")] == lengths
    assert len(data.read_shd(tmp_path / "a.h5", [5])[0].times) == 50_000
    refused(data.read_shd, tmp_path / "a.h5", "recording 999 cannot be read", indices=[999])


def test_heap_whose_sizes_are_wrong_is_refused(tmp_path):
    """HDF5 itself would read it for ever."""
    path = write_shd(tmp_path / "a.h5")
    content = bytearray(path.read_bytes())
    at = content.index(b"GCOL") + 16
    for byte, what in ((9, "do not fit|is not where"), (0, "is not where|do not fit")):
        changed = bytearray(content)
        changed[at + byte] ^= 4
        path.write_bytes(changed)
        refused(data.read_shd, path, what)


def test_parts_that_unpack_to_much_more_are_refused(tmp_path):
    path = write_shd(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        del file["labels"]
        options = {"maxshape": (None,), "chunks": (2**29,), "compression": "gzip"}
        file.create_dataset("labels", (3,), np.uint16, **options)
    refused(data.read_shd, path, "is stored in parts of")


def test_limit_of_spikes_is_of_all_recordings(tmp_path):
    path = write_shd(tmp_path / "a.h5")
    refused(data.read_shd, path, "the file has 12 spikes", max_events=11)
    assert len(data.read_shd(path, max_events=12)) == 3
    assert len(data.read_shd(path, [1], max_events=4)) == 1


@pytest.mark.parametrize("key", ["labels", "spikes/times", "spikes"])
def test_links_to_other_files_are_refused(key, tmp_path):
    write_shd(tmp_path / "other.h5")
    path = write_shd(tmp_path / "a.h5")
    for link in (h5py.ExternalLink("other.h5", f"/{key}"), h5py.SoftLink("/nowhere")):
        with h5py.File(path, "a") as file:
            del file[key]
            file[key] = link
        refused(data.read_shd, path, f"{key} is a link")


def test_external_and_virtual_storage_are_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"abc")
    path = write_shd(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        del file["labels"]
        file.create_dataset("labels", (3,), np.uint8, external=[(str(secret), 0, 3)])
    refused(data.read_shd, path, "labels is stored in another file")
    write_shd(tmp_path / "other.h5")
    with h5py.File(path, "a") as file:
        del file["labels"]
        layout = h5py.VirtualLayout((3,), np.uint16)
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "labels", (3,))
        file.create_virtual_dataset("labels", layout)
    refused(data.read_shd, path, "labels is stored in another file")


@pytest.mark.parametrize("kind", ["S3", "f4", "O"])
def test_labels_of_another_type_are_refused(kind, tmp_path):
    path = write_shd(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        del file["labels"]
        dtype = h5py.string_dtype() if kind == "O" else kind
        file.create_dataset("labels", (3,), dtype)
    refused(data.read_shd, path, "labels has the type")


def test_damaged_hdf5_is_read_or_refused(tmp_path):
    whole, path = write_shd(tmp_path / "a.h5").read_bytes(), tmp_path / "b.h5"
    refusals = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] ^= 1 << rng.integers(0, 8)
        path.write_bytes(damaged)
        try:
            data.read_shd(path)
        except ValueError as error:
            assert "why:" in str(error)
            refusals += 1
    assert refusals > 20


# ----------------------------------------------------------------------------------- cameras


def write_gestures(path, events, lines):
    """An AEDAT 3.1 file of one packet, an event per microsecond, and its table."""
    word = np.ones(events, "<u4")
    body = np.stack([word, np.arange(events, dtype="<u4")], axis=1).tobytes()
    packet = struct.pack("<hhiiiiii", 1, 0, 8, 4, 0, events, events, events) + body
    path.write_bytes(b"#!AER-DAT3.1\r\n#!END-HEADER\r\n" + packet)
    rows = "".join(f"1,{start},{end}\n" for start, end in lines)
    table = path.with_name(f"{path.stem}_labels.csv")
    table.write_text("class,startTime_usec,endTime_usec\n" + rows)
    return path


def test_overlapping_labels_take_no_memory_and_have_a_limit(tmp_path):
    path = write_gestures(tmp_path / "a.aedat", 20_000, [(0, 20_000)] * 2000)
    with pytest.raises(ValueError, match="40000000"):
        data.read_dvs_gesture(path, max_events=10**7)
    path = write_gestures(tmp_path / "b.aedat", 20_000, [(0, 20_000)] * 20)
    recordings = data.read_dvs_gesture(path)
    assert all(np.shares_memory(recordings[0].channels, r.channels) for r in recordings)
    assert [len(r.times) for r in recordings] == [20_000] * 20


def test_events_out_of_order_are_those_of_their_interval(tmp_path):
    path = write_gestures(tmp_path / "a.aedat", 6, [(1, 4), (4, 4)])
    content = bytearray(path.read_bytes())
    content[-48:-40], content[-8:] = content[-8:], content[-48:-40]  # the first and the last
    path.write_bytes(content)
    first, second = data.read_dvs_gesture(path)
    np.testing.assert_allclose(first.times, [0, 1e-6, 2e-6])
    assert len(second.times) == 0


@pytest.mark.parametrize("line", ["1,5,4", "1,-1,4", f"1,0,{10**30}", f"{10**30},0,1", "9" * 5000])
def test_lines_of_a_table_that_mean_nothing_are_refused(line, tmp_path):
    path = write_gestures(tmp_path / "a.aedat", 6, [])
    table = tmp_path / "a_labels.csv"
    table.write_text(table.read_text() + line + "\n")
    refused(data.read_dvs_gesture, path, "a line is")


def test_huge_files_of_events_are_refused_before_they_are_read(tmp_path):
    folder = tmp_path / "Train" / "1"
    folder.mkdir(parents=True)
    path = write_gestures(tmp_path / "a.aedat", 6, [(0, 6)])
    for sparse, read in ((folder / "1.bin", data.read_nmnist), (path, data.read_dvs_gesture)):
        os.truncate(sparse, 10**10) if sparse.exists() else sparse.touch()
        os.truncate(sparse, 10**10)
        refused(read, sparse, "the file has .* events")
    refused(data.read_nmnist, tmp_path / "Train", "the file has 2000000000 events")


# -------------------------------------------------------------------------------------- text


def test_uneven_series_take_no_memory(tmp_path):
    path = tmp_path / "a.ts"
    path.write_text("@data\n" + "1," * 9999 + "1" + ":1" * 9999 + ":a\n")
    refused(data.read_ts, path, "line 2 is no series")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe1,2\n" * 5)
    refused(data.read_csv, tmp_path / "a", "is no table of text")
    refused(data.read_ts, tmp_path / "a", "is no text")
    (tmp_path / "b").write_bytes(b"1" * 200_000)
    refused(data.read_csv, tmp_path / "b", "is no table of text")


@pytest.mark.parametrize(
    "read", [data.read_shd, data.read_dvs_gesture, data.read_csv, data.read_ts, data.read_nmnist]
)
def test_pipe_is_refused_without_waiting(read, tmp_path):
    os.mkfifo(tmp_path / "a")
    (tmp_path / "a_labels.csv").write_text("class,startTime_usec,endTime_usec\n")
    refused(read, tmp_path / "a", "is a folder, a pipe or a device")
