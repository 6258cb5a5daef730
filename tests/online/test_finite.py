"""Losses that are not finite are reported, once, without waiting for them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace._online import LossWatch, _finite

FINE, BAD = jnp.ones(6), jnp.ones(6).at[3].set(jnp.nan)


class Computing:
    """Losses that a device computes until they are asked for."""

    def __init__(self, losses):
        self.losses, self.done, self.shape = losses, False, losses.shape
        self.is_fully_addressable = True

    def is_ready(self):
        return self.done

    def is_deleted(self):
        return False

    def __array__(self, *args, **kwargs):
        assert self.done, "nothing may wait for them"
        return np.asarray(self.losses)


def texts(calls):
    """The warnings of these calls with one watch."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        watch = LossWatch("Net")
        for losses, mask in calls:
            watch.add(losses, mask, 2)
    return [str(w.message) for w in seen]


def test_first_loss_that_is_not_finite_is_reported_once_with_its_update():
    (text,) = texts([(FINE, None), (BAD, None), (BAD, None)])
    assert text.startswith("the loss is not finite from update 5 on.\n  where: Net, losses[3] of ")
    assert "training call 2" in text and "why:" in text and "do:" in text
    assert texts([(FINE, None), (BAD.at[3].set(-jnp.inf), None)])


def test_losses_that_do_not_count_are_not_reported():
    assert texts([(BAD, jnp.ones(6).at[3].set(0))] * 2) == []
    assert texts([(BAD, jnp.ones(6).at[2].set(0))]) != []


def test_no_call_waits_for_its_losses(monkeypatch):
    late, later = Computing(BAD), Computing(FINE)
    assert texts([(late, None), (later, None)]) == []
    late.done = True
    gone = jnp.ones(6)
    gone.delete()  # by the user
    (text,) = texts([(FINE, None), (gone, None), (FINE, gone), (late, None), (later, None)])
    assert "training call 4" in text
    monkeypatch.setattr(_finite, "MANY", 1)  # after so many calls only every few seconds
    monkeypatch.setattr(_finite, "PAUSE", 60)
    assert texts([(FINE, None), (BAD, None)]) == []
    monkeypatch.setattr(_finite, "PAUSE", -1)
    assert "update 5" in texts([(FINE, None), (BAD, None)])[0]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_training_reports_it_at_the_line_of_the_user_outside_of_jit(transform):
    def step(w, h, x):
        h = 0.9 * h + w * x
        return h, h

    net, w, xs = bt.online(step), jnp.ones(1), jnp.ones((4, 1)).at[2].set(jnp.nan)
    train = transform(net.train(jnp.sum, optax.sgd(0.1)))
    carry = net.init(w, jnp.zeros(1), xs[0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(w, optax.sgd(0.1).init(w), carry, xs)[3].block_until_ready()
        train(w, optax.sgd(0.1).init(w), carry, xs)
        exec("train(w, opt, carry, xs)", dict(locals(), opt=optax.sgd(0.1).init(w)), {})
    found = [w for w in seen if "not finite" in str(w.message)]
    assert len(found) == (0 if transform is jax.jit else 1)
    assert all("update 3" in str(w.message) and w.filename == __file__ for w in found)
