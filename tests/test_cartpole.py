"""The equations of examples/cartpole.py are those of gymnasium's CartPole-v1."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "cartpole.py"

# States of gymnasium 1.4.0 from this one, in float64, after every fourth of these pushes.
START, PUSHES = [0.01, -0.02, 0.03, 0.04], [1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1]
STATES = [
    [0.02395795968820654, 0.3687690101747617, 0.010918284757949377, -0.5129163478026587],
    [0.03784127348687273, 0.3686907609605089, -0.006509983816711174, -0.5111242205294209],
    [0.09077397311163216, 1.1505482720127942, -0.0830556220542414, -1.7158909687234352],
]


def test_cart_and_pole_move_as_those_of_gymnasium():
    push = runpy.run_path(str(EXAMPLE))["push"]
    _, (worlds, fell) = jax.lax.scan(
        lambda world, action: (push(world, action)[0], push(world, action)),
        jnp.array(START),
        jnp.array(PUSHES),
    )
    np.testing.assert_allclose(worlds[3::4], STATES, rtol=1e-12)
    assert not fell.any()
    for world in ([2.41, 0, 0, 0], [0, 0, -0.21, 0]):  # the track ends, the pole lies
        assert push(jnp.array(world, float), 0)[1]
