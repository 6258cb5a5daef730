"""Files that lie, and loads that are stopped: what is refused changes nothing."""

import copy
import hashlib
import json
import os
import random
import resource
import signal
import struct

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace.checkpoint import _container

EXTRA = {"losses": np.arange(3.0), "at": [1, (2.5, None)], 3: 1j, "length": 2.0 * u.mV, "t": True}


def learner_of(seed=0, rule="uoro"):
    brainstate.random.seed(seed)
    learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), rule, jnp.zeros(3))
    learner.init_optimizer(optax.adam(0.1))
    return learner


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A learner that has moved on since its checkpoint, and the parts of that."""
    path = tmp_path_factory.mktemp("hostile") / "a.ckpt"
    learner = learner_of()
    learner.save(path, step=3, extra=EXTRA)
    learner(jnp.ones(3))
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data, 16)[0]
    at = 24 + length
    return learner, path, json.loads(data[24:at]), data[at + 32 : -32]


def forged(path, header, body):
    """A file with this header and right checksums."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<14sHQ", _container.MAGIC, _container.VERSION, len(text)) + text
    head += hashlib.sha256(head).digest()
    data = head + bytes(-len(head) % _container.ALIGN) + body
    path.write_bytes(data + hashlib.sha256(data).digest())
    return path


def unpadded(saved):
    """The arrays of the file, without the padding before the first."""
    _, path, _, body = saved
    start = len(path.read_bytes()) - 32 - len(body)
    return body[-start % _container.ALIGN :]


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value is after[name] or np.array_equal(value, after[name], equal_nan=True), name


def assert_refused(learner, path, what="is not a checkpoint|belongs to another learner"):
    before = learner.named_arrays()
    with pytest.raises(ValueError, match=what) as error:
        learner.load(path)
    assert "why:" in str(error.value) and "do:" in str(error.value)
    after = learner.named_arrays()
    assert_same(before, after)
    return str(error.value)


def test_forged_copy_of_the_file_itself_is_read(saved, tmp_path):
    found = learner_of(seed=1).load(forged(tmp_path / "a", saved[2], unpadded(saved)))
    assert found.step == 3 and found.extra["at"] == [1, (2.5, None)]
    assert found.extra[3] == 1j and found.extra["length"] == 2.0 * u.mV and found.extra["t"] is True


JUNK = [None, True, -1, 10**12, 2**70, 1e300, "", "x", "\x1b[2J", [], {}, [[]], {"a": 1}, ["dict"]]
JUNK += [
    {"list": 3},
    {"jax": "x"},
    {"key": ["extra/0", "x"]},
    {"value": 0},
    "float32",
    "object",
    "V8",
    [3, -1],
    [2**40] * 3,
    [0, 2**62],
]


def places(value, path=()):
    """The path of every value in the header."""
    yield path
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from places(inner, (*path, key))


def changed(header, path, new):
    header = copy.deepcopy(header)
    if not path:
        return new
    inner = header
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return header


def test_no_forged_header_raises_a_raw_error_or_changes_anything(saved, tmp_path):
    """Every entry replaced by three of the values above."""
    learner, _, header, _ = saved
    body, draw, accepted = unpadded(saved), random.Random(0), []
    free = ("step", "braintrace")  # any number, any text
    everywhere = list(places(header))
    for path in everywhere:
        for junk in draw.sample(JUNK, 3):
            try:
                learner.load(forged(tmp_path / "a", changed(header, path, junk), body))
            except ValueError as error:
                text = str(error)
                assert "is not a checkpoint" in text or "belongs to another learner" in text, path
                assert "why:" in text and "\x1b" not in text
            else:
                accepted.append((path, junk))
    assert len(everywhere) > 150
    same = lambda path, junk: changed(header, path, junk) == header
    told = lambda path: path[0] in free or path[:1] == ("extra",)
    assert not [(p, j) for p, j in accepted if not (told(p) or same(p, j))]


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda h: json.dumps(h)[:-1] + ', "step": 4}', "is there twice"),
        (lambda h: json.dumps(h)[:-1] + ', "more": 4}', "too many"),
        (lambda h: json.dumps({k: v for k, v in h.items() if k != "step"}), "entries are missing"),
        (lambda h: json.dumps({k: v for k, v in h.items() if k != "values"}), "values"),
        (lambda h: "[" * 100_000, "recursion depth exceeded"),
        (lambda h: json.dumps({**h, "step": float("nan")}), "of another type"),
        (lambda h: "\udc80", "can't decode"),
    ],
)
def test_missing_unknown_and_double_entries_are_refused(make, what, saved, tmp_path):
    text = make(saved[2]).encode("utf-8", "surrogateescape")
    assert what in assert_refused(saved[0], forged(tmp_path / "a", text, unpadded(saved)))


def test_values_of_extra_are_used_once_and_all(saved, tmp_path):
    header, body = copy.deepcopy(saved[2]), unpadded(saved)
    header["extra"] = {"list": []}
    text = assert_refused(saved[0], forged(tmp_path / "a", header, body))
    assert "nowhere in it" in text
    header["extra"] = {"list": [{"numpy": "extra/0"}] * 2}
    assert_refused(saved[0], forged(tmp_path / "a", header, body))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_huge_sizes_take_no_memory(saved, tmp_path):
    learner, _, header, _ = saved
    name = next(n for n, spec in header["values"].items() if spec.get("shape"))
    before = peak()
    for shape in ([2**28], [2**40], [2**20, 2**20]):  # 2 GB to 8 TB
        lying = changed(header, ("values", name, "shape"), shape)
        assert_refused(learner, forged(tmp_path / "a", lying, unpadded(saved)))
    for head in (b"no magic", _container.MAGIC + struct.pack("<HQ", _container.VERSION, 2**31)):
        with open(tmp_path / "sparse", "wb") as file:
            file.write(head)
            file.truncate(3 << 30)
        assert_refused(learner, tmp_path / "sparse", "is not a checkpoint")
    assert peak() - before < 200_000  # kB


def test_pipe_device_and_folder_are_refused_without_waiting(saved, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        assert_refused(saved[0], path, "is not a checkpoint")


def test_an_exception_at_any_assignment_leaves_everything(saved, monkeypatch):
    """Also Ctrl-C: KeyboardInterrupt is raised in place of every assignment in turn."""
    learner, path, *_ = saved
    before = learner.named_arrays()
    real, stopped = brainstate.State.value.fset, 0
    for moment in range(1, 200):
        calls = 0

        def put(state, value, moment=moment):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            real(state, value)

        monkeypatch.setattr(brainstate.State, "value", property(brainstate.State.value.fget, put))
        try:
            learner.load(path)
        except KeyboardInterrupt:
            stopped += 1
            monkeypatch.undo()
            after = learner.named_arrays()
            assert_same(before, after)
        else:
            break
        finally:
            monkeypatch.undo()
    assert stopped > 8
    learner.assign(before)  # for the tests that follow


def test_interrupt_during_a_load_comes_after_it(saved, monkeypatch):
    learner, path, *_ = saved
    learner(jnp.ones(3))
    before, real, sent = learner.named_arrays(), brainstate.State.value.fset, []

    def put(state, value):
        if len(sent) < 3:
            sent.append(signal.raise_signal(signal.SIGINT))
        real(state, value)

    # A shell lets its background jobs ignore Ctrl-C.
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(brainstate.State, "value", property(brainstate.State.value.fget, put))
    try:
        with pytest.raises(KeyboardInterrupt):
            learner.load(path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before_test)
    after = learner.named_arrays()
    moved = [name for name, value in before.items() if np.any(value != after[name])]
    assert len(sent) == 3 and "states/model/h" in moved
    fresh = learner_of(seed=5)
    fresh.load(path)
    assert_same(fresh.named_arrays(), after)  # all of the file, nothing of before


def test_file_of_an_older_format_is_refused_with_what_to_do(saved, tmp_path):
    data = saved[1].read_bytes()
    (tmp_path / "a").write_bytes(data[:14] + struct.pack("<H", 1) + data[16:])
    text = assert_refused(saved[0], tmp_path / "a")
    assert "its format is version 1, this one reads 2" in text and "to_pytree" in text


def test_bytes_in_another_order_are_the_same_numbers(tmp_path, saved):
    learner = saved[0]
    learner.save(tmp_path / "a", extra=np.arange(3, dtype=">f4"))
    assert learner.load(tmp_path / "a").extra.tolist() == [0, 1, 2]
