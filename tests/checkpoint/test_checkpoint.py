"""Checkpoints: training goes on bit for bit, files are whole or refused, other learners too."""

import hashlib
import json
import math
import os
import re
import struct
import subprocess
import sys
from typing import NamedTuple

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace

SIZE = 2
XS = jnp.asarray(np.random.default_rng(0).standard_normal((10, SIZE, 3)))


class Net(brainstate.nn.Module):
    """Noise, a running mean and a counter beside a cell and a read-out."""

    def __init__(self, units=4):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(3, units)
        self.readout = braintrace.nn.Linear(units, 2)
        self.units = units

    def init_state(self, batch_size=None, **kwargs):
        self.mean = brainstate.LongTermState(jnp.zeros(self.units))
        self.calls = brainstate.LongTermState(jnp.zeros((), jnp.int32))

    def update(self, x):
        h = self.cell(x)
        self.calls.value = self.calls.value + 1
        self.mean.value = 0.9 * self.mean.value + 0.1 * jax.lax.stop_gradient(
            h.reshape(-1, h.shape[-1]).mean(0)
        )
        kept = brainstate.random.bernoulli(0.5, size=h.shape)
        return self.readout(jnp.where(kept, 2 * h, 0) - self.mean.value)


def learner_of(rule="d_rtrl", units=4, seed=0, **options):
    brainstate.random.seed(seed)
    return braintrace.compile(Net(units), rule, XS[0], batch_size=SIZE, **options)


def everything(learner, optimizer=None):
    """All numbers that training depends on, by name."""
    from braintrace.checkpoint._optimizer import states_under

    found = learner.named_arrays()
    if optimizer is not None:
        states = states_under(optimizer, {id(s) for s in learner.states().values()})
        for path, state in states.items():
            for key, leaf in jax.tree_util.tree_flatten_with_path(state.value)[0]:
                found[(*path, jax.tree_util.keystr(key))] = leaf
    return found


def assert_identical(one, two):
    assert one.keys() == two.keys()
    for name, a in one.items():
        b = two[name]
        a, b = (x.mantissa if isinstance(x, u.Quantity) else x for x in (a, b))
        if isinstance(a, int | float):
            a, b = np.asarray(a), np.asarray(b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True), name


def trained(learner, optimizer, xs):
    """An update at every step; states and traces run on from call to call."""
    step = lambda x: jnp.mean(learner(x) ** 2)
    return np.asarray(learner.etrace_train(xs, step_fn=step, optimizer=optimizer))


def scheduled():
    return braintools.optim.Adam(braintools.optim.StepLR(base_lr=0.1, step_size=2))


RESUMED = {
    "optax": ({}, lambda: optax.adam(0.1)),
    "braintools, mapped": ({"vmap": True}, scheduled),
    "random signs": ({"rule": "uoro"}, lambda: optax.sgd(0.1)),
}


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_training_is_bit_for_bit(case, tmp_path):
    options, make = RESUMED[case]
    learner, optimizer = learner_of(**options), make()
    first = trained(learner, optimizer, XS[:5])
    learner.save(tmp_path / "at", optimizer=optimizer, step=5, extra={"losses": first})
    rest = trained(learner, optimizer, XS[5:])
    wanted = everything(learner, optimizer if case.startswith("braintools") else None)

    again, optimizer = learner_of(**options, seed=1), make()
    found = again.load(tmp_path / "at", optimizer=optimizer)
    assert found.step == 5 and np.array_equal(found.extra["losses"], first)
    assert np.array_equal(trained(again, optimizer, XS[5:]), rest)
    assert_identical(
        everything(again, optimizer if case.startswith("braintools") else None), wanted
    )


RESUME = """
import runpy, sys
import brainstate, jax, numpy as np, optax
brainstate.environ.set(precision=64)
tests = runpy.run_path(sys.argv[1])
learner, optimizer = tests["learner_of"](seed=3), optax.adam(0.1)
learner.load(sys.argv[2], optimizer=optimizer)
np.save(sys.argv[3], tests["trained"](learner, optimizer, tests["XS"][5:]))
learner.save(sys.argv[2])
"""


def test_resumed_training_is_bit_for_bit_in_another_process(tmp_path):
    learner, optimizer = learner_of(), optax.adam(0.1)
    trained(learner, optimizer, XS[:5])
    learner.save(tmp_path / "at")  # the optimizer of etrace_train by default
    rest = trained(learner, optimizer, XS[5:])
    words = [RESUME, __file__, tmp_path / "at", tmp_path / "losses.npy"]
    environ = {**os.environ, "JAX_ENABLE_X64": "1"}
    subprocess.run([sys.executable, "-c", *map(str, words)], check=True, env=environ)
    assert np.array_equal(np.load(tmp_path / "losses.npy"), rest)
    wanted = everything(learner)
    learner.load(tmp_path / "at")
    assert_identical(everything(learner), wanted)


# ------------------------------------------------------------------------------------- values


class Pair(NamedTuple):
    a: object
    b: object


def odd_values():
    weak = jnp.asarray(2.5)
    assert weak.weak_type
    return {
        "bfloat16": jnp.asarray([1.5, -0.1], jnp.bfloat16),
        "float16": jnp.asarray([[1e-7, jnp.nan]], jnp.float16),
        "complex": jnp.asarray([1 + 2j, -3j], jnp.complex64),
        "bool": jnp.asarray([True, False]),
        "int8": jnp.asarray([-7, 100], jnp.int8),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
        "old key": jax.random.PRNGKey(5),
        "quantity": u.Quantity(jnp.asarray([1.0, 2.0]), unit=u.mV / u.ms),
        "pair": Pair(None, {"deep": (jnp.arange(3), None)}),
        "weak": weak,
        "host": np.arange(4.0, dtype=np.float32)[::2],
        "python": (float("nan"), -0.0, 1e-320, 2**70, True, 1 - 2j, "text"),
    }


def assert_same(a, b):
    assert type(a) is type(b) or (isinstance(a, jax.Array) and isinstance(b, jax.Array))
    if isinstance(a, u.Quantity):
        assert a.unit == b.unit
        a, b = a.mantissa, b.mantissa
    if isinstance(a, jax.Array):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.weak_type == b.weak_type
    if isinstance(a, jax.Array | np.ndarray):
        assert a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert repr(a) == repr(b)


def test_checkpoint_holds_every_kind_of_value(tmp_path):
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.odd = brainstate.LongTermState(odd_values())

    def learner_of():
        return braintrace.compile(Odd(), "d_rtrl", XS[0], batch_size=SIZE)

    learner, other, leaf = learner_of(), learner_of(), lambda a: isinstance(a, u.Quantity)
    extra = {**odd_values(), 3: [1, (2.0, None)], ("a", 1): "x"}
    del extra["pair"], extra["weak"]  # a file has no named tuples; its arrays have a firm type
    state = tuple(jnp.full(3, float(n)) for n in range(2))
    learner.save(tmp_path / "a", extra=extra, optimizer=Pair(*state))
    for name in ("bfloat16", "key", "quantity"):
        other.model4compile.odd.value[name] = jax.tree.map(
            lambda a: a[::-1] if a.ndim else jax.random.key(0), odd_values()[name]
        )
    found = other.load(tmp_path / "a", optimizer=Pair(*map(jnp.zeros_like, state)))
    one, two = (jax.tree.leaves(n.model4compile.odd.value, is_leaf=leaf) for n in (learner, other))
    assert len(one) == len(two) == 20
    for a, b in zip(one, two, strict=True):
        assert_same(a, b)
    assert list(found.extra) == list(extra)
    trees = [jax.tree.flatten([*e.values()], is_leaf=leaf) for e in (extra, found.extra)]
    assert trees[0][1] == trees[1][1]
    for a, b in zip(trees[0][0], trees[1][0], strict=True):
        assert_same(a, b)
    assert isinstance(found.optimizer, Pair) and found.optimizer.b.tolist() == [1, 1, 1]


def test_checkpoint_holds_the_synthesizer_of_dni(tmp_path):
    def learner_of(seed):
        learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "dni", XS[0, 0])
        if seed is not None:
            shapes = learner.group_signal_shapes()
            learner.attach_synthesizer(braintrace.SyntheticGradient(shapes, scale=1.0, seed=seed))
        return learner

    one, two = learner_of(0), learner_of(1)
    one.save(tmp_path / "a")
    two.load(tmp_path / "a")
    for a, b in zip(*(n.synthesizer.states_dict().values() for n in (one, two)), strict=True):
        assert np.array_equal(a.value, b.value)
    assert "synthesizer/w.0: only in the file" in refused(learner_of(None), tmp_path / "a")


def test_values_return_to_the_devices_they_were_on(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    learner = learner_of()
    learner.save(tmp_path / "a")
    state = learner.model4compile.cell.h
    state.value = jax.device_put(state.value + 1, spread)
    learner.load(tmp_path / "a")
    assert state.value.sharding == spread and not state.value.any()


def test_file_describes_itself(tmp_path):
    learner = learner_of()
    learner.save(tmp_path / "a", step=3)
    data = (tmp_path / "a").read_bytes()
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]
    magic, version, length = struct.unpack_from("<14sHQ", data)
    assert magic == b"braintrace\r\n\x1a\0" and version == 2
    at = 24 + length
    assert hashlib.sha256(data[:at]).digest() == data[at : at + 32]
    header, found = json.loads(data[24:at]), {}
    assert header["step"] == 3 and header["learner"]["rule"] == "d_rtrl"
    at += 32
    for name, spec in header["values"].items():
        if "dtype" not in spec:
            continue
        at, count = -(-at // 64) * 64, math.prod(spec["shape"])
        found[name] = np.frombuffer(data, spec["dtype"], count, at).reshape(spec["shape"])
        at += found[name].nbytes
    assert at == len(data) - 32
    np.testing.assert_array_equal(found["states/model/mean"], learner.model4compile.mean.value)
    weight = learner.model4compile.readout.weight.value["weight"]
    np.testing.assert_array_equal(found["weights/model/readout/weight/weight"], weight)
    groups = {tuple(name.split("/")[1:3]) for name in found}
    assert {("learner", "etraces"), ("random", "default [threefry2x32]")} <= groups
    assert b"pickle" not in data


# ----------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A learner and its checkpoint, with an optimizer."""
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    learner = learner_of()
    learner.init_optimizer(optax.adam(0.1))
    learner.save(path)
    return learner, path


def refused(learner, path, **options):
    before = everything(learner)
    with pytest.raises(ValueError) as error:
        learner.load(path, **options)
    assert_identical(everything(learner), before)
    text = str(error.value)
    assert "why:" in text and "do:" in text
    return text


def test_checkpoint_of_another_model_is_refused_with_all_differences(saved):
    class Other(Net):
        def __init__(self):
            super().__init__()
            self.more = brainstate.LongTermState(u.Quantity(jnp.zeros(2), unit=u.mV))
            self.readout = braintrace.nn.Linear(4, 3)

        def init_state(self, batch_size=None, **kwargs):
            self.mean = brainstate.LongTermState(jnp.zeros(4, jnp.float32))

        def update(self, x):
            return self.readout(self.cell(x))

    other = braintrace.compile(
        Other(), "pp_prop", XS[0], batch_size=SIZE, decay_or_rank=0.9, vjp_method="multi-step"
    )
    text = refused(other, saved[1], optimizer=False)
    for line in (
        "option rule: 'd_rtrl' in the file, 'pp_prop' here",
        "option vjp_method: 'single-step' in the file, 'multi-step' here",
        "option trace_factorization: 'per_param' in the file, 'io_factorized' here",
        "weights/model/readout/weight/weight: float64[4, 2] in the file, float64[4, 3] here",
        "states/model/mean: float64[4] in the file, float32[4] here",
        "states/model/more [mV]: not in the file",
        "states/model/calls: only in the file",
    ):
        assert f"    {line}\n" in text, text
    trace = r"    states/learner/etraces/cell.Wz.weight\S* @\w+/weight: only in the file\n"
    assert re.search(trace, text), text


@pytest.mark.parametrize(
    "saving, loading, line",
    [
        ({"rule": "uoro"}, {"rule": "uoro", "projection_key": 7}, "option key: "),
        (
            {"rule": "eprop", "kappa_filter_decay": 0.9},
            {"rule": "eprop", "kappa_filter_decay": 0.8},
            "option kappa: 0.9 in the file, 0.8 here",
        ),
        ({"rule": "rflo"}, {"rule": "rflo", "random_feedback_key": 1}, "option feedback key: "),
        (
            {"rule": "otpe", "leak": 0.9, "trace_clip_abs": float("inf")},
            {"rule": "otpe", "leak": 0.9, "trace_clip_abs": 2.0},
            "option trace_clip_abs: 'inf' in the file, 2.0 here",
        ),
        ({}, {"vmap": True}, "option vmap: None in the file, 2 here"),
    ],
)
def test_checkpoint_of_other_options_is_refused(saving, loading, line, tmp_path):
    learner_of(**saving).save(tmp_path / "a")
    assert line in refused(learner_of(**loading), tmp_path / "a")


def test_other_unit_is_refused(tmp_path):
    class Leaky(brainstate.nn.Module):
        def __init__(self, unit):
            super().__init__()
            self.linear = braintrace.nn.Linear(3, 4)
            self.unit = unit

        def init_state(self, batch_size=None, **kwargs):
            self.v = brainstate.HiddenState(u.Quantity(jnp.zeros(4), unit=self.unit))

        def update(self, x):
            self.v.value = 0.9 * self.v.value + self.linear(x) * self.unit
            return self.v.value / self.unit

    one, two = (braintrace.compile(Leaky(unit), "d_rtrl", jnp.zeros(3)) for unit in (u.mV, u.volt))
    one.save(tmp_path / "a")
    one.load(tmp_path / "a")
    assert "states/model/v [V]: not in the file" in refused(two, tmp_path / "a")


def test_optimizer_must_be_given_as_it_was_saved(saved, tmp_path):
    learner, path = saved
    fresh = learner_of()
    assert "holds an optimizer." in refused(fresh, path)
    assert fresh.load(path, optimizer=False).optimizer is None
    assert "optimizer/0/trace" in refused(fresh, path, optimizer=optax.sgd(0.1, momentum=0.9))
    assert int(fresh.load(path, optimizer=optax.adam(0.1)).optimizer[0].count) == 0
    assert fresh.load(path).optimizer[0].mu.keys() == learner.optimizer_state.value[0].mu.keys()
    learner.save(tmp_path / "without", optimizer=False)
    text = refused(learner_of(), tmp_path / "without", optimizer=scheduled())
    assert "holds no optimizer, one is passed." in text
    with pytest.raises(ValueError, match="optimizer"):
        learner.save(tmp_path / "a", optimizer=optax.adam(0.1))
    assert not (tmp_path / "a").exists()


def test_damaged_file_is_refused(saved, tmp_path):
    learner, path = saved
    data = path.read_bytes()
    cut, changed = tmp_path / "cut", tmp_path / "changed"
    for size in (0, 1, 13, 24, 40, 500, len(data) // 2, len(data) - 32, len(data) - 1):
        cut.write_bytes(data[:size])
        assert "is not a checkpoint." in refused(learner, cut)
    for at in (0, 20, 30, len(data) // 2, len(data) - 40, len(data) - 1):
        changed.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert "is not a checkpoint." in refused(learner, changed)
    changed.write_bytes(data + b"more")
    assert "cut short or changed" in refused(learner, changed)
    changed.write_bytes(data[:14] + b"\1" + data[15:])
    assert "version 1, this one reads 2" in refused(learner, changed)
    with pytest.raises(FileNotFoundError, match=r"(?s)no file .*do:"):
        learner.load(tmp_path / "none")


def test_what_cannot_be_saved_is_refused(saved, tmp_path):
    learner, path = saved
    unready = braintrace.D_RTRL(Net())
    for act in (unready.save, unready.load):
        with pytest.raises(ValueError, match=r"(?s)before it is compiled.*do:.*compile_graph"):
            act(tmp_path / "a")
    for extra, name in (
        (lambda: 0, "function"),
        ({1, 2}, "set"),
        (Pair(1, 2), "Pair"),
        ({b"key": 1}, "bytes"),
        (np.array([None]), "ndarray"),
    ):
        with pytest.raises(TypeError, match=name):
            learner.save(tmp_path / "a", extra=extra)
    with pytest.raises(IsADirectoryError, match=r"(?s)folder.*do:.*file"):
        learner.save(tmp_path)
    with pytest.raises(TypeError, match="step has type float"):
        learner.save(tmp_path / "a", step=1.5)

    for act in (lambda: learner.save(tmp_path / "a"), lambda: learner.load(path)):

        @brainstate.transform.jit
        def inside(x, act=act):
            learner(x)
            act()

        with pytest.raises(ValueError, match="transformation"):
            inside(XS[0])
    assert list(tmp_path.iterdir()) == []
