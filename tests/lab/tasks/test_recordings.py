"""Tasks on real recordings: what is in their splits, and what they say without their files."""

import jax
import numpy as np
import pytest

from braintrace import data
from braintrace.lab.cli import main
from braintrace.lab.tasks import SHD, BasicMotions, Electricity, JapaneseVowels, Pixels, _archive

from .recordings import small_shd


def test_vowels_end_with_their_last_frame_and_keep_the_archives_test():
    path = _archive.archived("JapaneseVowels/JapaneseVowels_TEST.ts", "vowels")
    series, names = data.read_ts(path)
    task = JapaneseVowels(32)
    xs, labels = (np.asarray(a) for a in task.test(1000))
    np.testing.assert_array_equal(labels[-1] + 1, [int(name) for name in names])
    scale = (series[5][-1] - series[5][0]) / (xs[-1, 5] - xs[-len(series[5]), 5])
    assert (scale > 0).all()  # one standardisation for all, of training
    for i in (0, 5, 369):
        steps = len(series[i])
        moved = (series[i] - series[i][0]) / scale
        np.testing.assert_allclose(xs[-steps:, i] - xs[-steps, i], moved, atol=1e-9)
        assert (xs[:-steps, i] == 0).all()
    short = np.asarray(JapaneseVowels(7).test(1000)[0])
    np.testing.assert_array_equal(short, xs[-7:])


@pytest.mark.parametrize(
    "make, counts",
    [
        (lambda: JapaneseVowels(32), [198, 72, 370]),
        (lambda: BasicMotions(100), [28, 12, 40]),
        (lambda: SHD(16, small_shd()), [72, 8, 40]),
    ],
)
def test_splits_share_no_recording_and_have_every_class(make, counts):
    task = make()
    splits = task.splits.values()
    assert [len(labels) for _, labels in splits] == counts
    recordings = [{x[:, i].tobytes() for i in range(x.shape[1])} for x, _ in splits]
    assert sum(map(len, recordings)) == len(set.union(*recordings)) == sum(counts)
    if task.name != "shd":
        assert all(len(set(labels)) == task.outputs for _, labels in splits)
        train = task.splits["train"][0]
        assert task.name == "vowels" or abs(train.mean()) < 1e-9


def test_few_held_out_sequences_are_of_all_classes():
    assert sorted(np.asarray(BasicMotions(10).validation(4)[1][-1])) == [0, 1, 2, 3]


def test_pixels_are_the_rows_of_the_digits_one_by_one():
    from sklearn.datasets import load_digits

    images = {image.tobytes() for image in load_digits().images}
    xs, _ = Pixels(64).test(20)
    assert all((np.asarray(xs[:, i]).reshape(8, 8) * 16).tobytes() in images for i in range(20))
    with pytest.raises(ValueError, match="64 steps"):
        Pixels(8)


def test_electricity_predicts_the_next_reading_and_every_stream_has_a_change():
    task, length = Electricity(400), 400
    windows = np.lib.stride_tricks.sliding_window_view(_archive.electricity(), length)
    draws = (lambda: task.batch(jax.random.key(0), 6), lambda: task.validation(6),
             lambda: task.test(6))  # fmt: skip
    for draw, change, (begin, end) in zip(draws, _archive.CHANGES, _archive.PARTS, strict=True):
        xs, ys = (np.asarray(a)[..., 0].T for a in jax.jit(draw)())
        np.testing.assert_array_equal(xs[:, 1:], ys[:, :-1])
        for x, y in zip(xs, ys, strict=True):
            (start,) = np.flatnonzero((windows == x).all(axis=1))
            assert begin <= start and start + length < end
            assert y[-1] == windows[start + 1, -1]
            assert length // 4 <= change - start <= 3 * length // 4


def test_electricity_at_its_longest_stays_within_its_parts():
    for length in (8, 2000, Electricity.longest):
        task = Electricity(length)
        for split, (begin, end) in enumerate(_archive.PARTS):
            first, last = task._starts(split)
            assert begin <= first <= last <= end - length - 1
            assert first < _archive.CHANGES[split] < last + length


def test_shd_has_the_counts_of_its_spikes():
    task = SHD(28, small_shd())
    events = data.read_shd(small_shd() / "shd_test.h5")
    xs, labels = jax.jit(lambda: task.test(40))()
    for i in (0, 17, 39):
        edges = np.arange(29) * 0.05, np.arange(141) * 5 - 0.5
        counts = np.histogram2d(events[i].times, events[i].channels, bins=edges)[0]
        np.testing.assert_array_equal(xs[:, i], counts)
        assert (labels[:, i] == events[i].label).all()


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_shd_without_its_files_says_what_to_do(capsys, tmp_path):
    text = refused(capsys, "shd", "--quick")
    assert "the task shd has no data" in text and "do:    name the folder" in text
    assert "shd_train.h5 does not exist" in refused(capsys, "shd", "--data", str(tmp_path))
    assert "--data is for the task shd" in refused(capsys, "copy", "--data", str(tmp_path))


def test_shd_is_compared_on_the_users_files(capsys, tmp_path):
    words = "compare shd --quick --rules no_trace --cell rnn --length 4 --updates 2 --data".split()
    assert main([*words, str(small_shd()), "--out", str(tmp_path)]) == 0
    assert "no_trace" in capsys.readouterr().out and (tmp_path / "compare_shd.json").is_file()


def test_recordings_without_their_package_say_what_to_install(capsys, monkeypatch):
    _archive.labelled.cache_clear()
    monkeypatch.setattr(_archive, "find_spec", lambda name: None)
    assert "needs sktime: pip install 'braintrace-online[data]'" in refused(
        capsys, "vowels", "--quick"
    )
