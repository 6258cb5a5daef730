"""Several processes: one learner, one checkpoint, on any number of devices and processes."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import braintrace
from braintrace.checkpoint._container import Container
from braintrace.checkpoint._processes import fetched

SAMPLES, UNITS, DEVICES = 4, 4, 2  # devices of a process
XS = np.random.default_rng(0).standard_normal((12, SAMPLES, 3))


class Leaky(braintrace.nn.ValinaRNNCell):
    def _next(self, x, h):
        return 0.8 * h + super()._next(x, h)


def learner_of(seed=0, **where):
    brainstate.random.seed(seed)
    cell = Leaky(3, UNITS, activation="tanh")
    return braintrace.compile(cell, "d_rtrl", XS[0], batch_size=SAMPLES, **where)


def places(learner):
    own = ("model4compile", "etraces")
    plain = lambda n: (*n[:-1], n[-1].partition(" @")[0])  # the shapes of a batch are in the rest
    states = {plain(n): s.value for n, s in learner.states().items() if n[0] in own}
    return jax.tree.map(lambda a: a.sharding, states)


def gradient(learner, xs=XS):
    step = lambda x: jnp.mean(learner(x) ** 2)
    return flat(learner.etrace_grad(xs, step_fn=step, block_size=3))


def trained(learner, optimizer, xs=XS):
    step = lambda x: jnp.mean(learner(x) ** 2)
    return flat(learner.etrace_train(xs, step_fn=step, optimizer=optimizer, update_every=2))


def flat(tree):
    return np.concatenate([np.ravel(fetched(a)) for a in jax.tree.leaves(tree)])


def main(rank, port, folder):
    """One of two processes: notes what it computes, and the second one dies before a save."""
    rank, folder = int(rank), Path(folder)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    heartbeat = {"heartbeat_timeout_seconds": 10}  # not every version of JAX has it
    known = inspect.signature(jax.distributed.initialize).parameters
    options = {k: v for k, v in heartbeat.items() if k in known}
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, **options)
    mesh = Mesh(np.array(jax.devices()).reshape(2, DEVICES), ("samples", "units"))
    learner = learner_of(mesh=mesh, batch="samples", units="units")
    optimizer, split = optax.adam(0.1), NamedSharding(mesh, PartitionSpec(None, "samples"))
    own = np.split(XS, 2, axis=1)[rank]  # of its own samples; or each process has all of them
    seen = {"gradient": gradient(learner, jax.make_array_from_process_local_data(split, own))}
    seen["before"] = trained(learner, optimizer)
    learner.save(folder / "two", step=12, extra={"rank": rank})
    seen["after"] = trained(learner, optimizer)

    where, optimizer = places(learner), optax.adam(0.1)
    assert sum(not p.is_fully_addressable for p in jax.tree.leaves(where)) > 4
    saved = learner.load(folder / "two", optimizer=optimizer)
    assert saved.step == 12 and saved.extra == {"rank": 0} and places(learner) == where
    seen["resumed"] = trained(learner, optimizer)
    learner.load(folder / "one")
    seen["resumed from one"] = trained(learner, optimizer)
    learner.reset(batch_size=2)
    assert places(learner) == where
    try:
        learner.save(folder)
    except OSError as error:
        seen["refusal"] = np.array(f"{type(error).__name__} {error}")
    np.savez(folder / f"seen{rank}.npz", **seen)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        learner.save(folder / "two", step=13)  # needs what the other process has
    except OSError as error:
        (folder / "lost").write_text(f"{time.monotonic() - started:.1f}\n{error}")
    finally:
        os._exit(0)


# -------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def alone():
    """A learner of one process and one device: gradient, losses before and after the save."""
    learner, optimizer = learner_of(), optax.adam(0.1)
    return learner, optimizer, gradient(learner), trained(learner, optimizer)


@pytest.fixture(scope="module")
def ran(alone, tmp_path_factory):
    """The folder of two processes of two devices each, that one process saved in before."""
    folder = tmp_path_factory.mktemp("processes")
    alone[0].save(folder / "one", step=12)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environ = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    words = [sys.executable, __file__]
    both = [
        subprocess.Popen([*words, str(rank), str(port), str(folder)], env=environ)
        for rank in range(2)
    ]
    try:
        assert both[1].wait(120) == -signal.SIGKILL
        assert both[0].wait(60) == 0
    finally:
        for process in both:
            process.kill()
            process.wait()
    return folder, [dict(np.load(folder / f"seen{rank}.npz")) for rank in range(2)]


def test_processes_have_the_gradient_and_the_losses_of_one(alone, ran):
    _, _, grads, losses = alone
    for seen in ran[1]:
        np.testing.assert_allclose(seen["gradient"], grads, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(seen["before"], losses, rtol=1e-6, atol=1e-12)
    assert np.abs(grads).max() > 1e-3 and losses[-1] < losses[0]


def test_processes_go_on_from_their_checkpoint_bit_for_bit(ran):
    for seen in ran[1]:
        assert np.array_equal(seen["resumed"], seen["after"])
        assert not np.array_equal(seen["resumed"], seen["before"])


def test_checkpoint_is_for_any_number_of_processes(alone, ran):
    learner, optimizer, *_ = alone
    folder, (first, second) = ran
    after = trained(learner, optimizer)
    assert np.array_equal(first["resumed from one"], second["resumed from one"])
    np.testing.assert_allclose(first["resumed from one"], after, rtol=1e-6, atol=1e-12)
    saved = learner.load(folder / "two")
    assert saved.step == 12
    np.testing.assert_allclose(trained(learner, optimizer), first["after"], rtol=1e-6, atol=1e-12)


def test_process_that_dies_leaves_the_last_checkpoint_whole(ran):
    folder, _ = ran
    with Container(folder / "two") as file:
        assert file.read() and file.header["step"] == 12
    files = {"one", "two", "seen0.npz", "seen1.npz", "lost"}
    assert {p.name for p in folder.iterdir()} == files


def test_process_that_dies_is_named_by_the_others_soon(ran):
    seconds, *text = (ran[0] / "lost").read_text().splitlines()
    assert float(seconds) < 20
    assert text[0] == "process 0 of 2 has lost another one."
    assert str(ran[0] / "two") in text[1] and "learner.load(path)" in text[-1]


def test_failure_of_the_writer_is_an_error_in_every_process(ran):
    folder, (first, second) = ran
    assert str(first["refusal"]).startswith(f"IsADirectoryError '{folder}' is a folder.")
    assert str(second["refusal"]).startswith(f"OSError {folder} was not saved.")


if __name__ == "__main__":
    brainstate.environ.set(precision=64)
    main(*sys.argv[1:])
