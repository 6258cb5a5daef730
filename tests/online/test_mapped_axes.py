"""`psum` and its kind over the axis that a `vmap` names: in the step, and around the learner."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from braintrace import online
from braintrace.rules import snap

T, B, I, N = 4, 4, 2, 3
RNG = np.random.default_rng(0)
XS = jnp.asarray(RNG.normal(size=(T, B, I)))
PARAMS = {"w": jnp.asarray(RNG.normal(size=(I, N))), "g": jnp.asarray(RNG.normal(size=N))}
SAMPLES = "samples"


def centred_inputs(p, h, x):
    return jnp.tanh((x - lax.pmean(x, SAMPLES)) @ p["w"]) * p["g"]


def normalised(p, h, x):
    y = x @ p["w"]
    y = y - lax.pmean(y, SAMPLES)
    return jnp.tanh(y / jnp.sqrt(lax.pmean(y * y, SAMPLES) + 1e-3)) * p["g"]


def coupled(p, h, x):
    return jnp.tanh(x @ p["w"] + lax.pmean(h, SAMPLES)) * p["g"]


def gathered(p, h, x):
    return jnp.tanh(x @ p["w"] + lax.all_gather(x @ p["w"], SAMPLES).sum(0)) * p["g"]


DRIVES = [centred_inputs, normalised, coupled, gathered]
EXACT = {  # under d_rtrl; what other samples add to the trace of a sample is left out
    centred_inputs: {"w": True, "g": True},
    normalised: {"w": False, "g": True},
    coupled: {"w": False, "g": False},
    gathered: {"w": False, "g": True},
}


def step_of(drive):
    def step(p, h, x):
        h = 0.8 * h + drive(p, h, x)
        return h, h

    return step


def loss(out):
    return jnp.sum(out**2 * jnp.cos(out))


def bptt(step):
    def total(p):
        state = jnp.zeros((B, N))
        return loss(lax.scan(lambda h, x: step(p, h, x), state, XS)[1])

    return jax.grad(total)(PARAMS)


def of_batch(step):
    return lambda p, h, x: jax.vmap(step, (None, 0, 0), axis_name=SAMPLES)(p, h, x)


def learned_around(drive, rule, **options):
    """Learners of one sample each, under a `vmap` with a name."""
    net = online(step_of(drive), rule, **options)

    def total(p):
        def one(xs):
            carry = net.init(p, jnp.zeros(N), xs[0])
            return loss(net.scan(p, carry, xs)[1])

        return jax.vmap(one, axis_name=SAMPLES)(jnp.moveaxis(XS, 1, 0)).sum()

    return jax.grad(total)(PARAMS), net


def learned(step, rule, **options):
    net = online(step, rule, **options)
    carry = net.init(PARAMS, jnp.zeros((B, N)), XS[0])
    return jax.grad(lambda p: loss(net.scan(p, carry, XS)[1]))(PARAMS), net


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), a, b)


@pytest.mark.parametrize("drive", DRIVES)
def test_windows_and_rtrl_of_mapped_learners_are_backpropagation(drive):
    want = bptt(of_batch(step_of(drive)))
    close(learned_around(drive, "rtrl")[0], want)
    close(learned_around(drive, "d_rtrl", window=T)[0], want)


@pytest.mark.parametrize(
    ("drive", "rule"),
    [*((drive, "d_rtrl") for drive in DRIVES), (normalised, snap(3)), (coupled, snap(3))],
)
def test_certificate_of_mapped_learners_leaves_out_what_samples_add(drive, rule):
    got, net = learned_around(drive, rule)
    want = bptt(of_batch(step_of(drive)))
    exact = {path[-1]: p.exact for path, p in net.report.parameters.items()}
    if rule == "d_rtrl":
        assert exact == EXACT[drive]
    close(*({k: v for k, v in g.items() if exact[k]} for g in (got, want)))


def test_mapped_axis_in_the_step_is_a_sum_over_the_batch():
    step = of_batch(step_of(normalised))
    close(learned(step, "rtrl")[0], bptt(step))
    close(learned(step, "d_rtrl", window=T)[0], bptt(step))


def parts(divided):
    weight = divided == "inputs"

    def of_device(x, w):
        y = x @ w
        return jnp.tanh(lax.psum(y, "d") if weight else y)

    specs = (P(None, "d"), P("d")) if weight else (P("d"), P())
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P() if weight else P("d"))


@pytest.mark.parametrize("divided", ["samples", "inputs"])
def test_weights_in_a_shard_map_are_exact(divided):
    def step(p, h, x):
        h = 0.8 * h + parts(divided)(x, p["w"]) * p["g"]
        return h, h

    got, net = learned(step, "d_rtrl")
    close(got, bptt(step))
    assert all(p.exact for p in net.report.parameters.values())


def test_weights_in_a_shard_map_of_two_devices_are_exact():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "map_are_exact and inputs"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
