"""Streams: what changes in them, what they ask, and what counts as recovered."""

import jax
import jax.numpy as jnp
import numpy as np

from braintrace.lab.tasks import AdaptLorenz, AdaptSine, Delayed, _adapt

KEY = jax.random.key(0)


def test_sine_changes_its_period_in_the_middle_without_a_jump():
    task = AdaptSine(400)
    xs, ys = task.batch(KEY, 3)
    np.testing.assert_array_equal(xs[1:], ys[:-1])
    x = np.asarray(xs[..., 0])
    np.testing.assert_allclose(x[20:190], x[:170], atol=1e-9)
    np.testing.assert_allclose(x[212:], x[200:-12], atol=1e-9)
    assert np.abs(np.diff(x, axis=0)).max() < 2 * np.pi / 12
    assert np.ptp(x[0]) > 0  # phases differ


def test_lorenz_solves_its_equations_and_splits_share_no_stream():
    x = _adapt.lorenz(81)
    assert x.shape == (81, 24) and np.isfinite(x).all() and np.ptp(x) > 1
    task = AdaptLorenz(80)
    xs, ys = task.validation(8)
    np.testing.assert_array_equal(xs[1:], ys[:-1])
    streams = [{tuple(s) for s in np.asarray(split(8)[0][..., 0]).T}
               for split in (lambda n: task.batch(KEY, n), task.validation, task.test)]  # fmt: skip
    assert not (streams[0] & streams[1] or streams[1] & streams[2] or streams[0] & streams[2])


def test_recovery_is_the_share_of_what_a_change_cost():
    errors = np.full(100, 1.0)
    errors[50:60], errors[60:] = 5.0, 2.0
    targets = jnp.zeros((100, 1, 1))
    score = AdaptSine(100).score(jnp.sqrt(jnp.asarray(errors))[:, None, None], targets)
    np.testing.assert_allclose(score, 0.75)
    assert np.isnan(AdaptSine(100).score(targets, targets))  # nothing was lost


def test_delayed_asks_for_the_sign_fifty_steps_later():
    task = Delayed(480)
    xs, labels = task.batch(KEY, 4)
    asked = np.flatnonzero(task.mask)
    np.testing.assert_array_equal(asked, np.arange(8) * 60 + 50)
    np.testing.assert_array_equal(xs[asked - 50, :, 0], 2 * labels[asked] - 1)
    np.testing.assert_array_equal(xs[..., 1], np.broadcast_to(task.mask[:, None], (480, 4)))
    assert np.abs(xs[asked, :, 0]).max() < 0.9  # the sign is gone by then
    outputs = jax.nn.one_hot(labels, 2)
    assert task.score(outputs, labels) == 1
    outputs = outputs.at[:360].set(1 - outputs[:360])  # wrong, but before the last quarter
    assert task.score(outputs, labels) == 1
