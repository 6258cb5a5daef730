"""Attack files and processes: damaged, forged, raced, killed, interrupted, starved, and readers.

Every fault is survived or not. A file that is wrong must be refused by a ValueError in four parts
(or be what it was), and a refusal must leave the learner as it is; a file that is written must be
the old one or the new one, whole, and nothing else may be left in its folder for long. Faults are
drawn from a seed, by kind; `--faults 5000` is the run of which docs/faults.md has the counts. What
was not survived is printed, with the seed that draws it again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from braintrace.checkpoint import _container

Fault = Callable[[random.Random, Path], str]  # what was survived; AssertionError if it was not
SHARES = {"killed": 3, "raced": 2, "starved": 3, "damaged": 10, "forged": 15, "interrupted": 4,
          "recordings": 10, "words": 3}  # fmt: skip
LIMIT_S = 60.0  # of a process


# ------------------------------------------------------------------------------------- writers


def write(path: Path, number: int, size: int = 5000) -> None:
    """A checkpoint of which every number is `number`."""
    _container.write(path, {"number": number}, {"a": np.full(size, number), "b": np.arange(3)})


def whole(path: Path) -> int:
    """The number of a checkpoint that is whole."""
    with _container.Container(path) as file:
        number, values = file.header["number"], file.read()
    assert (values["a"] == number).all() and (values["b"] == np.arange(3)).all()
    return number


@contextlib.contextmanager
def child(run: Callable[[], None]) -> Iterator[int]:
    """A fork that runs this, killed and waited for at the end."""
    process = os.fork()
    if not process:
        status = 1
        try:
            signal.alarm(int(LIMIT_S))
            run()
            status = 0
        finally:
            os._exit(status)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def killed(draw: random.Random, folder: Path) -> str:
    """A process that saves again and again is killed at any moment."""
    path = folder / "a"
    write(path, 1)

    def saving() -> None:
        for number in range(2, 10_000):
            write(path, number)

    with child(saving):
        time.sleep(draw.uniform(0, 0.03))
    number = whole(path)
    left = [p.name for p in folder.iterdir() if p != path]
    assert len(left) <= 1, left
    write(path, number + 1)
    assert [p.name for p in folder.iterdir()] == ["a"]
    return "in a save" if left else "between saves"


def raced(draw: random.Random, folder: Path) -> str:
    """Three processes save to one file at once."""
    path, seeds = folder / "a", [draw.random() for _ in range(3)]

    def saving(seed: float) -> None:
        own = random.Random(seed)
        for _ in range(10):
            write(path, own.randrange(1000), own.choice([0, 100, 100_000]))

    with contextlib.ExitStack() as processes:
        children = [processes.enter_context(child(lambda s=s: saving(s))) for s in seeds]
        statuses = [os.waitpid(process, 0)[1] for process in children]
    assert statuses == [0] * 3, statuses
    whole(path)
    assert [p.name for p in folder.iterdir()] == ["a"]
    return "30 saves"


def starved(draw: random.Random, folder: Path) -> str:
    """A save without room on the disk, or without a file to open."""
    path, kind = folder / "a", draw.choice(["room", "files"])
    write(path, 1)
    limit = draw.randrange(0, 45_000)

    def saving() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if kind == "room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        else:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            write(path, 2)
        except OSError:
            os._exit(3)

    with child(saving) as process:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, 3) and whole(path) == (1 if status else 2), status
    assert [p.name for p in folder.iterdir()] == ["a"]
    return f"no {kind}" if status else "enough"


# ------------------------------------------------------------------------------------ learners


class Saved:
    """A learner that has moved on since its checkpoint."""

    def __init__(self, folder: Path):
        import brainstate
        import jax.numpy as jnp
        import optax

        import braintrace

        brainstate.random.seed(0)
        self.learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), "uoro", jnp.zeros(3))
        self.learner.init_optimizer(optax.adam(0.1))
        self.path = folder / "saved"
        extra = {"losses": np.arange(3.0), "at": [1, (2.5, None)], 3: 1j}
        self.learner.save(self.path, step=3, extra=extra)
        self.file = {k: np.asarray(v) for k, v in self.learner.named_arrays().items()}
        self.data = self.path.read_bytes()
        self.start = 24 + struct.unpack_from("<Q", self.data, 16)[0]
        self.header = json.loads(self.data[24 : self.start])
        self.arrays = self.data[self.start + 32 : -32][-(self.start + 32) % 64 :]
        self.learner(jnp.ones(3))
        self.before = self.now()

    def now(self) -> dict[str, np.ndarray]:
        """Copies of all arrays of the learner."""
        return {k: np.array(v) for k, v in self.learner.named_arrays().items()}

    def load(self, path: Path) -> str:
        """What became of a file: read, or refused without a trace."""
        try:
            self.learner.load(path)
        except ValueError as error:
            assert_parts(error)
            assert equal(self.now(), self.before), "a refused file has changed the learner"
            return "refused"
        self.learner.assign(self.before)
        return "read"


def equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    """Whether arrays are the same, bit for bit."""
    return one.keys() == two.keys() and all(one[k].tobytes() == two[k].tobytes() for k in one)


def assert_parts(error: ValueError) -> None:
    """An error is ours, and does nothing to a terminal."""
    text = str(error)
    assert "why:" in text and "do:" in text, repr(error)
    assert "\x1b" not in text and len(text) < 100_000


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Bytes that are changed, cut, moved, doubled or filled."""
    new = bytearray(data)
    at, size = draw.randrange(len(new) + 1), draw.choice([1, 4, 64, 1000])
    match draw.randrange(6):
        case 0 | 1:
            for _ in range(draw.randint(1, 4)):
                new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
        case 2:
            del new[at:]
        case 3:
            new[at : at + size] = bytes(min(size, len(new) - at))
        case 4:
            new[at:at] = new[at : at + size]
        case 5:
            new[at : at + size] = draw.randbytes(size)
    return bytes(new)


def damaged(saved: Saved) -> Fault:
    """A checkpoint whose bytes have changed."""

    def fault(draw: random.Random, folder: Path) -> str:
        data = mutated(draw, saved.data)
        (folder / "a").write_bytes(data)
        end = saved.load(folder / "a")
        assert end == "refused" or data == saved.data
        return end

    return fault


JUNK = [None, True, -1, 10**12, 2**70, 1e300, "", "\x1b[2J", [], {}, [[]], {"list": 3}, "float32"]
JUNK += [
    "object",
    [3, -1],
    [2**40] * 3,
    [0, 2**62],
    {"value": 0},
    {"jax": "x"},
    {"dict": [[[], 1]]},
]


def forged(saved: Saved) -> Fault:
    """A checkpoint whose header lies, with right checksums."""

    def fault(draw: random.Random, folder: Path) -> str:
        header = copy.deepcopy(saved.header)
        for _ in range(draw.randint(1, 2)):
            inside, key = header, draw.choice(list(header))
            while isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.8:
                inside = inside[key]
                key = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
            if draw.random() < 0.2:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(draw.choice(JUNK))
            if not header:
                break
        text = json.dumps(header).encode()
        head = struct.pack("<14sHQ", _container.MAGIC, _container.VERSION, len(text)) + text
        head += hashlib.sha256(head).digest()
        data = head + bytes(-len(head) % _container.ALIGN) + saved.arrays
        (folder / "a").write_bytes(data + hashlib.sha256(data).digest())
        end = saved.load(folder / "a")
        assert end == "refused" or of_learner(header) == of_learner(saved.header), header
        return end

    return fault


def of_learner(header: dict[str, Any]) -> tuple[Any, ...]:
    """What of a header has to be right; version, step and extra are anybody's."""
    values = {k: v for k, v in header["values"].items() if not k.startswith("extra/")}
    learner = {k: v for k, v in header["learner"].items() if v is not None}  # not there is None
    return values, learner, header["optimizer"]


def interrupted(saved: Saved) -> Fault:
    """An exception from a signal at any moment of a load."""

    def fault(draw: random.Random, folder: Path) -> str:
        def stop(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, stop)
        end = "in time"
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, 0.012))
            saved.learner.load(saved.path)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            end = "interrupted"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        now = saved.now()
        old = equal(now, saved.before)
        assert old or equal(now, saved.file), "a mixture of old and new values"
        saved.learner.assign(saved.before)
        return f"{end}, {'old' if old else 'new'}"

    return fault


# ------------------------------------------------------------------------------------- readers


def templates(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], Any]]]:
    """A small file of every format, and its reader."""
    import h5py

    from braintrace.lab import data

    with h5py.File(folder / "shd", "w") as file:
        for key, kind in (("times", np.float16), ("units", np.uint16)):
            rows = np.empty(3, object)
            for i in range(3):
                rows[i] = np.arange(4).astype(kind)
            file.create_dataset(f"spikes/{key}", data=rows, dtype=h5py.vlen_dtype(kind))
        file["labels"] = np.arange(3, dtype=np.uint16)
    events = np.stack([np.ones(20, "<u4"), np.arange(20, dtype="<u4")], axis=1).tobytes()
    packet = struct.pack("<hhiiiiii", 1, 0, 8, 4, 0, 20, 20, 20) + events
    table = folder / "table.csv"
    table.write_text("class,startTime_usec,endTime_usec\n1,0,9\n2,9,30\n")
    aedat = b"#!AER-DAT3.1\r\n#!END-HEADER\r\n" + packet * 2
    return {
        "hdf5": ((folder / "shd").read_bytes(), data.read_shd),
        "aedat": (aedat, lambda path: data.read_dvs_gesture(path, table)),
        "labels": (table.read_bytes(), lambda path: gestures(data, path, aedat)),
        "nmnist": (bytes(range(30)) * 10, data.read_nmnist),
        "csv": (b"a,b\n1,2.5\n-3,nan\n" * 3, data.read_csv),
        "ts": (b"@timeStamps false\n@data\n1,2,3:4,5,6:a\n7:8:b\n", data.read_ts),
    }


def gestures(data: Any, path: Path, aedat: bytes) -> Any:
    """Recordings by a table of labels."""
    session = path.with_suffix(".aedat")
    session.write_bytes(aedat)
    return data.read_dvs_gesture(session, path)


def recordings(files: dict[str, tuple[bytes, Callable[[Path], Any]]]) -> Fault:
    """A recording whose bytes have changed, in a process of 1 GB: HDF5 is a library of C."""

    def fault(draw: random.Random, folder: Path) -> str:
        name = draw.choice(list(files))
        content, read = files[name]
        (folder / "a").write_bytes(mutated(draw, content))

        def reading() -> None:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))
            try:
                read(folder / "a")
            except ValueError as error:
                assert_parts(error)
                os._exit(3)

        with child(reading) as process:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, 3), f"{name}: status {status}"
        return f"{name} {'refused' if status else 'read'}"

    return fault


WORDS = "train --rule --cell --units --seed --out --resume --updates adding gru d_rtrl -1 0 1e400"
WORDS += " 10000000000000 nan snap:n=2 a=b , [] --help=3 -- \x1b[2J"


def words(draw: random.Random, folder: Path) -> str:
    """A command line of random words, in a process without anything to compile."""
    from braintrace.lab.cli import _train, main  # before the fork: it takes a second

    line = [draw.choice(WORDS.split(" ")) for _ in range(draw.randint(0, 6))]

    def calling() -> None:
        os.chdir(folder)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _train.Session = None  # what comes as far as to train is a valid line
        try:
            status = main(line)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except TypeError as error:
            status = 4 if "NoneType" in str(error) else 1
        os._exit(status)

    with child(calling) as process:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    text = (folder / "log").read_text() if (folder / "log").exists() else ""
    assert status in (0, 2, 4) and "Traceback" not in text, (line, status, text[-500:])
    return {0: "answered", 2: "refused", 4: "would train"}[status]


# --------------------------------------------------------------------------------------- all


def run() -> int:
    """Print the counts of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="about how many, of all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=SHARES, action="append", help="only these")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*fork.*")
    started, failures = time.perf_counter(), 0
    total = sum(SHARES.values())
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        # Those that fork go first: JAX has started no threads yet.
        makers: dict[str, Callable[[], Fault]] = {
            "killed": lambda: killed,
            "raced": lambda: raced,
            "starved": lambda: starved,
            "recordings": lambda: recordings(templates(base)),
            "words": lambda: words,
        }
        saved: list[Saved] = []

        def with_saved(make: Callable[[Saved], Fault]) -> Callable[[], Fault]:
            return lambda: make(saved[0] if saved else saved.append(Saved(base)) or saved[0])

        makers |= {
            kind: with_saved(make)
            for kind, make in (
                ("damaged", damaged),
                ("forged", forged),
                ("interrupted", interrupted),
            )
        }
        for kind, make in makers.items():
            if options.kind and kind not in options.kind:
                continue
            counts, fault, wrong = Counter[str](), make(), 0
            count = max(1, options.faults * SHARES[kind] // total)
            for n in range(count):
                seed = f"{kind} {options.seed} {n}"
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    try:
                        counts[fault(random.Random(seed), Path(folder))] += 1
                    except Exception as error:
                        wrong += 1
                        print(f"NOT survived, seed {seed!r}: {error!r}"[:2000], flush=True)
            failures += wrong
            ends = ", ".join(f"{n} {end}" for end, n in sorted(counts.items()))
            print(f"{kind:12} {count - wrong} of {count} survived: {ends}", flush=True)
    print(f"{failures} not survived; {time.perf_counter() - started:.0f} s, seed {options.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run())
