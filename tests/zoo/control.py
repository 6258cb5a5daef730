"""Choices and loops inside `update`: makers of models, and the checks of all of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison, online_grad
from interpret import computed
from oracle import dense, rule_on

from .zoo import (
    TIGHT,
    Draw,
    T,
    squares,
    targets,
)

KINDS = {"d_rtrl": bt.D_RTRL, "pp_prop": bt.pp_prop, "snap": bt.SnAp, "rtrl": bt.RTRL}
OPTIONS = {name: {"decay_or_rank": 0.9} if name == "pp_prop" else {} for name in KINDS}


def case(registry: dict, shape: tuple[int, ...] = (3,), **options):
    """Register a maker of a model: `maker(draw)`, fed with T random inputs of a shape."""

    def register(make: Callable) -> Callable:
        registry[make.__name__] = (make, shape, options)
        return make

    return register


def made(registry: dict, name: str):
    make, shape, options = registry[name]
    draw = Draw(name)
    return make(draw), inputs(draw, *shape), options


def inputs(draw, *shape):
    """T inputs whose first number changes sign at every step and from sample to sample."""
    x = draw(T, *shape, scale=1.0)
    sign = (-1.0) ** np.indices(x.shape[:-1]).sum(0)
    return x.at[..., 0].set(sign * jnp.abs(x[..., 0]))


def assert_equal(found, truth, tolerance=TIGHT):
    result = comparison(found, truth)
    assert result.max_error <= tolerance, f"\n{result}"


def learner_of(kind, model, x0, **options):
    learner = kind(model, **options)
    learner.compile_graph(x0)
    return learner


def gradients(model, x_seq, *learners, step_fn=squares):
    """Summed gradients of single-step learners, then BPTT's."""
    sequences = (x_seq, targets(model, x_seq[0]))

    def run():
        found = [online_grad(learner, step_fn, *sequences) for learner in learners]
        return [*found, bptt_grad(model, step_fn, *sequences)]

    return computed(run)


def check_crossing(model, x_seq):
    """SnAp is its definition, RTRL is BPTT."""
    snaps = [learner_of(bt.SnAp, model, x_seq[0], n=n) for n in (1, 2)]
    *found, rtrl, bptt = gradients(model, x_seq, *snaps, learner_of(bt.RTRL, model, x_seq[0]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, rtrl, bptt)))
    assert_equal(rtrl, bptt)
    seen = dense(model, squares, x_seq, targets(model, x_seq[0]))
    for n, grads in enumerate(found, 1):
        assert_equal(grads, rule_on(seen, "snap", n=n))


def relax(h, y, tolerance=0.3):
    """Adaptive relaxation of h towards y, each unit by itself; the number of turns is decided
    by all of them."""
    return lax.while_loop(
        lambda c: (jnp.abs(c[1] - jnp.tanh(y)).max() > tolerance) & (c[0] < 20),
        lambda c: (c[0] + 1, c[1] + 0.3 * (jnp.tanh(y) - c[1])),
        (0, h),
    )[1]
