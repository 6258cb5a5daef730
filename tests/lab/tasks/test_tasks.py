"""Tasks: shapes, labels, splits, and what a constant answer reaches."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.lab.cli import main
from braintrace.lab.cli._names import NEED_DATA, STREAMS, TASKS
from braintrace.lab.tasks import MAKE, _digits, _mackey_glass, _text

from ..cli.test_demo import hide
from .recordings import small_shd

KEY = jax.random.key(0)
LABELLED = [name for name in TASKS if not hasattr(MAKE[name], "judge")]  # others: test_rewards


@cache
def make(name, length=None):
    data = {"data": small_shd()} if name in NEED_DATA else {}
    return MAKE[name](length or TASKS[name].length, **data)


@cache
def sampler(task, size):
    """Training batches by key, compiled once."""
    return jax.jit(lambda key: task.batch(key, size))


def drawn(task, size, key=KEY):
    return sampler(task, size)(key)


@cache
def held_out(task, size):
    return jax.jit(lambda: task.test(size))()


@cache
def validated(task, size):
    return jax.jit(lambda: task.validation(size))()


def constant(task, answer, targets):
    """The score of one output for every step."""
    outputs = jnp.broadcast_to(answer, (*targets.shape[:2], task.outputs))
    return float(task.score(outputs, targets))


@pytest.mark.parametrize("name", LABELLED)
def test_task_has_the_shapes_it_says(name):
    task = make(name)
    for xs, ys in (drawn(task, 6), validated(task, 6), held_out(task, 6)):
        assert xs.shape == (task.length, 6, task.inputs) and jnp.issubdtype(xs.dtype, jnp.floating)
        labels = jnp.issubdtype(ys.dtype, jnp.integer)
        assert ys.shape == ((task.length, 6) if labels else (task.length, 6, task.outputs))
        assert jnp.isfinite(xs).all()
        if labels:
            assert 0 <= ys.min() and ys.max() < task.outputs
    assert task.mask.shape == (task.length,) and set(np.unique(task.mask)) <= {0, 1}
    assert task.mask.sum() > 0 and task.title
    assert make(name, TASKS[name].quick).length == TASKS[name].quick


@pytest.mark.parametrize("name", TASKS)
def test_task_batches_differ_by_key_and_tests_do_not(name):
    task = make(name)
    a, b = (drawn(task, 6, key)[0] for key in jax.random.split(KEY))
    assert (a != b).any()
    first, again = (jax.tree.map(np.asarray, task.test(6)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.testing.assert_allclose(first[0], held_out(task, 6)[0])
    assert (first[0] != validated(task, 6)[0]).any()


@pytest.mark.parametrize("name", [name for name in LABELLED if name not in STREAMS])
def test_task_chance_is_that_of_the_best_constant_answer(name):
    task = make(name)
    ys = held_out(task, 4096)[1]
    if jnp.issubdtype(ys.dtype, jnp.integer):
        counted = np.asarray(ys)[np.asarray(task.mask) == 1].ravel()
        answer = np.log(np.bincount(counted, minlength=task.outputs) + 1e-9)
    else:
        answer = ys[-1].mean()
    best = constant(task, answer, ys)
    # Bits per character: windows overlap, and the frequencies are those of training.
    near = 0.05 if name == "text" else 0.006
    assert abs(best - task.chance) < near * max(1, task.chance)
    if name != "text":
        worse = constant(task, np.roll(answer, 1) if np.ndim(answer) else answer + 1, ys)
        assert worse <= best + 1e-12 if task.higher_is_better else worse > best


def test_copy_asks_for_what_it_showed_and_holds_lists_out():
    task = make("copy")
    xs, ys = drawn(task, 2000)
    n = task.items
    np.testing.assert_array_equal(xs[:n, :, :-1].argmax(-1), ys[-n:])
    assert (xs[n:, :, :-1] == 0).all() and (xs[-n:, :, -1] == 1).all() and xs[:-n, :, -1].max() == 0
    splits = (ys, validated(task, 10**6)[1], held_out(task, 10**6)[1])
    seen, chosen, held = ({tuple(c) for c in np.asarray(y[-n:]).T} for y in splits)
    assert len(held) == len(chosen) == task.symbols**n // 8
    assert not (seen & held or seen & chosen or held & chosen)


def test_adding_adds_the_marked_numbers():
    xs, ys = drawn(make("adding"), 50)
    values, marks = xs[..., 0], xs[..., 1]
    assert (marks.sum(0) == 2).all() and (marks[:48].sum(0) == 1).all()
    np.testing.assert_allclose((values * marks).sum(0), ys[-1, :, 0])


def test_match_labels_equal_stimuli():
    task = make("match")
    xs, ys = drawn(task, 400)
    part = task.length // 6
    rates = xs.reshape(task.length, 400, 3, -1).mean(-1)
    sample, test = (
        rates[s, :, :2].sum(0).argmax(-1) for s in (slice(part), slice(-2 * part, -part))
    )
    assert ((sample == test) == (ys[-1] == 1)).mean() > 0.99
    assert set(np.unique(xs)) == {0, 1} and ys[-1].mean() == 0.5
    # Neither stimulus alone tells the answer.
    for stimulus in (sample, test):
        assert abs((stimulus == ys[-1]).mean() - 0.5) < 0.08


def test_evidence_labels_the_side_with_more_cues():
    task = make("evidence")
    xs, ys = drawn(task, 400)
    rates = xs.reshape(task.length, 400, 3, -1).mean(-1)
    period = task.length // (2 * task.cues)
    cues = rates[: task.cues * period, :, :2].reshape(task.cues, period, 400, 2).sum(1).argmax(-1)
    assert ((2 * cues.sum(0) > task.cues) == (ys[-1] == 1)).mean() > 0.97
    assert ys[-1].mean() == 0.5
    assert abs((cues[-1] == ys[-1]).mean() - 0.6875) < 0.08  # one of five cues is some evidence


def test_mackey_glass_solves_its_equation_and_keeps_the_test_apart():
    x = _mackey_glass.series()
    assert len(x) == 10400 and 0.2 < x.min() < x.max() < 1.5
    # Central differences of the samples, against the right-hand side.
    slope = (-x[36:] + 8 * x[35:-1] - 8 * x[33:-3] + x[32:-4]) / 12
    old = x[17:-19]
    right = 0.2 * old / (1 + old**10) - 0.1 * x[34:-2]
    assert np.abs(slope - right).max() < 2e-3
    task = make("mackey_glass")
    xs, ys = task.test(64)
    np.testing.assert_array_equal(xs[task.ahead :], ys[: -task.ahead])
    train, validation, test = _mackey_glass.split_series()
    assert len(train) == 6000 and len(validation) == len(test) == 2000
    assert abs(train.mean()) < 1e-9 and not np.isin(test, [*train, *validation]).any()
    assert not np.isin(validation, train).any()


def test_digits_are_split_by_class_without_overlap():
    splits = _digits.images()
    assert [len(x) for x, _ in splits.values()] == [1077, 270, 450]
    shares = np.array([np.bincount(y) / len(y) for _, y in splits.values()])
    assert np.ptp(shares, axis=0).max() < 0.005
    different = {a.tobytes() for x, _ in splits.values() for a in x}
    assert len(different) == 1797
    test, held = splits["test"]
    xs, ys = make("digits").test(450)
    np.testing.assert_allclose(xs[:, 7], test[7])
    np.testing.assert_array_equal(ys[-1], held)


def test_digits_without_scikit_learn_say_what_to_install(capsys, monkeypatch):
    _digits.images.cache_clear()
    hide(monkeypatch, "sklearn")
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "digits", "--quick"])
    assert stopped.value.code == 2
    assert "needs scikit-learn: pip install 'braintrace-online[tasks]'" in capsys.readouterr().err


def test_text_predicts_the_next_character_of_text_that_training_does_not_have():
    train, validation, test, alphabet = _text.encoded()
    assert len(alphabet) == _text.SYMBOLS - 1 and " " in alphabet and "e" in alphabet
    xs, ys = make("text").test(16)
    np.testing.assert_array_equal(xs[1:].argmax(-1), ys[:-1])
    assert len(train) + len(validation) + len(test) == len(_text.corpus())
    # No sentence-long stretch of the test occurs in training.
    whole = np.concatenate([train, validation]).astype(np.uint8).tobytes()
    held = test.astype(np.uint8).tobytes()
    pieces = [held[i : i + 100] for i in range(0, len(held) - 100, 100)]
    assert sum(piece in whole for piece in pieces) <= 0.01 * len(pieces)
