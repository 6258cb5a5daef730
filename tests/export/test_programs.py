"""Random step programs (`fuzz/programs.py`) as C: right, or refused in four parts."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import build, difference, run

import braintrace

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from judge import ALLOWED, is_four_part
from programs import Program, random_program, sequences

RULES = {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}, "no_trace": {}, "snap": {"n": 2}}
OPTIMIZERS = [
    optax.sgd(1e-2, momentum=0.9, nesterov=True),
    optax.adan(1e-3),
    optax.optimistic_gradient_descent(1e-3),
]


def loss(out, y):
    return sum(jnp.mean((o - jnp.mean(y)) ** 2) for o in jax.tree.leaves(out))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of weights whose gradient is zero
@pytest.mark.parametrize("seed", range(60))
def test_program_in_c_is_that_of_train(seed, tmp_path):
    (xs, ys), rule = sequences(), list(RULES)[seed % 4]
    xs, ys = jnp.concatenate([xs, 0.7 * xs[::-1]]), jnp.concatenate([ys, 0.3 * ys[::-1]])
    optimizer = OPTIMIZERS[seed % 3]
    model = Program(random_program(seed))
    try:
        learner = braintrace.compile(model, rule, xs[0], **RULES[rule])
        done = learner.export_c(xs[0], ys[0], loss=loss, optimizer=optimizer, path=tmp_path)
    except ALLOWED as error:
        assert is_four_part(error), error
        return
    found = run(done, build(done), {"x": xs, "target": ys})
    losses = np.asarray(learner.train(loss, optimizer)(xs, ys))
    assert done.sizes.scratch <= 1.5 * done.sizes.live
    if np.isfinite(losses).all() and np.abs(losses).max() < 1e8:
        assert difference(found.losses, losses) < 1e-9
