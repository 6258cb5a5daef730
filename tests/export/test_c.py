"""A learner in C is the learner in JAX: 200 updates in double, every single step in float."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import error_of_steps, kept_of, named, steps_of
from compiled import build, difference, needs, run
from networks import DRAWING, NETWORKS, RULES, loss, stream

import braintrace
from braintrace.program import words_of

OPTIMIZERS = {
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "adam": optax.adam(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)),
}


def exported(path, name, rule, optimizer, dtype, steps):
    """A learner, what it needs to start, and its folder."""
    step, params, state = NETWORKS[name](dtype)
    xs, ys = stream(dtype, name, steps)
    net = braintrace.online(step, rule, **{**RULES, **DRAWING}[rule])
    carry = net.init(params, state, xs[0])
    extra = {"modulator": np.asarray(0.7, dtype)} if rule == "three_factor" else {}
    done = net.export_c(
        params, carry, xs[0], ys[0], loss=loss, optimizer=optimizer, path=path, extra=extra
    )
    told = {"x": xs, "target": ys, "modulator": np.full(steps, 0.7, dtype)}
    return net, params, carry, done, told


def trained(net, params, carry, optimizer, told, rule):
    """What `train` makes of it: losses, and all that is kept, in the order of the slots."""
    opt = optimizer.init(params)
    more = {"modulator": jnp.asarray(told["modulator"])} if rule == "three_factor" else {}
    train = net.train(loss, optimizer)
    params, opt, carry, losses = train(params, opt, carry, told["x"], told["target"], **more)
    kept = jax.tree.leaves((params, opt, carry.state, carry.traces, carry.steps))
    return losses, [words_of(a) for a in kept]


CASES = [
    ("lif", "d_rtrl", "adam"),
    ("mingru", "pp_prop", "rmsprop"),
    ("rtu", "d_rtrl", "clipped"),
    ("batched", "snap", "sgd"),
    ("lif", "three_factor", "sgd"),
    ("lif", "eprop", "adam"),
    ("lif", "ottt", "sgd"),
    ("lif", "otpe", "sgd"),
    ("lif", "rflo", "sgd"),
    ("mingru", "no_trace", "adam"),
    ("noisy", "d_rtrl", "sgd"),
    ("noisy", "uoro", "sgd"),
    ("lif", "kf_rtrl", "adam"),
]


@pytest.mark.parametrize(("name", "rule", "how"), CASES)
def test_200_updates_in_double_are_those_of_train(name, rule, how, tmp_path):
    optimizer = OPTIMIZERS[how]
    net, params, carry, done, told = exported(tmp_path, name, rule, optimizer, np.float64, 200)
    found = run(done, build(done), told)
    losses, kept = trained(net, params, carry, optimizer, told, rule)
    assert difference(found.losses, losses) < 1e-10
    assert np.ptp(losses) > 0.01
    update = net._update(
        params, carry, told["x"][0], told["target"][:1], loss, optimizer, None, extra_of(rule, told)
    )
    saved, truth = (
        done.unpack(found.saved[0]),
        named(kept_of(update), kept, done.unpack(done.pack())),
    )
    for key in saved:
        assert difference(saved[key], truth[key]) < 1e-10, key
    assert {"lif": "u", "mingru": "w", "rtu": "nu", "batched": "u", "noisy": "u"}[name] in saved
    assert done.sizes.scratch <= 1.5 * done.sizes.live


@pytest.mark.parametrize(("name", "rule", "how"), CASES)
def test_each_step_in_float_is_that_of_jax(name, rule, how, tmp_path):
    optimizer = OPTIMIZERS[how]
    net, params, carry, done, told = exported(tmp_path, name, rule, optimizer, np.float32, 20)
    example = told["x"][0], (told["target"][0],), loss, optimizer, None, extra_of(rule, told)
    starts, truths = steps_of(net._update(params, carry, *example), done, told)
    program = build(done, flags=["-std=c99", "-O3"])
    assert error_of_steps(done, program, told, starts, truths) < 1e-5


def extra_of(rule, told):
    return {"modulator": told["modulator"][0]} if rule == "three_factor" else {}


@pytest.mark.parametrize("name", ["rtu", "noisy"])
def test_compilers_agree(name, tmp_path):
    needs("clang")
    _, _, _, done, told = exported(tmp_path, name, "d_rtrl", OPTIMIZERS["adam"], np.float64, 30)
    first, other = (run(done, build(done, compiler), told) for compiler in ("gcc", "clang"))
    assert difference(other.losses, first.losses) < 1e-12


def test_steps_that_nothing_is_learned_from_advance_state_and_traces(tmp_path):
    """`learner_advance`: what comes after them is what `scan` and then `train` do."""
    net, params, carry, done, told = exported(
        tmp_path, "lif", "d_rtrl", OPTIMIZERS["sgd"], np.float64, 12
    )
    program = build(done)
    text = (tmp_path / "driver.c").read_text()
    skipping = text.replace(
        "double loss = learner_learn", "double loss = t < 5 ? 0 : learner_learn"
    )
    (tmp_path / "driver.c").write_text(skipping)
    again = build_again(tmp_path, program)
    found = run(done, again, told)
    carry, _ = net.scan(params, carry, told["x"][:5])
    opt = OPTIMIZERS["sgd"].init(params)
    train = net.train(loss, OPTIMIZERS["sgd"])
    *_, losses = train(params, opt, carry, told["x"][5:], told["target"][5:])
    assert difference(found.losses[5:], losses) < 1e-12
    assert not found.losses[:5].any()


def build_again(folder, program):
    import subprocess

    from compiled import SAFE, STRICT

    files = [folder / "learner.c", folder / "driver.c"]
    subprocess.run(["gcc", *STRICT, *SAFE, "-o", program, *files, "-lm"], check=True)
    return program


def test_example_runs_as_the_page_says(tmp_path):
    import subprocess

    exported(tmp_path, "mingru", "d_rtrl", OPTIMIZERS["adam"], np.float32, 1)
    page = (tmp_path / "README.md").read_text()
    assert len(page.splitlines()) <= 10
    (command,) = [part for part in page.split("`") if part.startswith("cc ")]
    ran = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0 and len(lines) == 20
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-1]))
    assert last < first


def test_parameters_may_stand_in_a_file(tmp_path):
    import subprocess

    step, params, state = NETWORKS["mingru"](np.float32)
    xs, ys = stream(np.float32, "mingru", 1)
    net = braintrace.online(step, "d_rtrl")
    carry = net.init(params, state, xs[0])
    how = dict(loss=loss, optimizer=optax.sgd(0.1))
    outputs = []
    for initial in ("source", "file"):
        net.export_c(params, carry, xs[0], ys[0], path=tmp_path / initial, initial=initial, **how)
        command = "gcc -std=c99 learner.c main.c -lm && ./a.out"
        ran = subprocess.run(
            command, shell=True, cwd=tmp_path / initial, capture_output=True, text=True
        )
        outputs.append(ran.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 20
    assert "first_w" not in (tmp_path / "file" / "learner.c").read_text()


def test_saved_bytes_are_checked(tmp_path):
    _, _, _, done, told = exported(tmp_path, "mingru", "d_rtrl", OPTIMIZERS["sgd"], np.float64, 3)
    program, good = build(done), done.pack()
    damaged = good[:40] + bytes([good[40] ^ 1]) + good[41:]
    other = good[:8] + b"\x00\x00\x00\x00" + good[12:]
    for data, code in ((damaged, 3), (other, 2)):
        with pytest.raises(AssertionError, match=rf"\({code}, "):
            run(done, program, told, data)
        with pytest.raises(ValueError, match="not of this learner"):
            done.unpack(data)
    assert run(done, program, told, good).losses.shape == (3,)
