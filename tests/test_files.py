"""The writer of files: whole or not at all, whoever else writes, whatever lies in the folder."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from braintrace._files import only_run, replace_file

KILLED = """
import os, signal, sys
from braintrace._files import replace_file

path, names = sys.argv[1], ("open", "write", "fsync", "close", "replace")
real = {name: getattr(os, name) for name in names}

def save(version):
    replace_file(path, [bytes([version]), bytes([version]) * 999, b"end"])

def read():
    data = open(path, "rb").read()
    assert data == data[:1] * 1000 + b"end", data
    return data[0]

def killed_at(moment, half):
    calls = 0
    def hooked(name):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == moment:
                if half and name == "write":
                    real["write"](args[0], args[1][: len(args[1]) // 2])
                elif half:
                    real[name](*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args)
        return call
    for name in names:
        setattr(os, name, hooked(name))
    save(2)

save(1)
seen = []
for half in (False, True):
    for moment in range(1, 100):
        save(1)
        child = os.fork()
        if child == 0:
            killed_at(moment, half)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        seen.append(read())
        if not os.WIFSIGNALED(status):
            break
    else:
        raise AssertionError("never ran to the end")
assert len(seen) > 15 and seen.count(1) > 8 and seen.count(2) > 4, seen
save(3)
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
print("beside:", len(seen), flush=True)
while True:  # until somebody kills this
    save(4)
"""


def test_killed_writer_leaves_the_old_or_the_new_file_and_no_litter(tmp_path):
    path = tmp_path / "a.ckpt"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        time.sleep(0.2)
        writer.send_signal(signal.SIGKILL)
    assert line.startswith("beside:") and writer.returncode == -signal.SIGKILL
    assert path.read_bytes()[0] in (3, 4)
    replace_file(path, [b"5"])
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    replace_file(path, [b"1"])

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, [b"2"])
    monkeypatch.undo()
    assert path.read_bytes() == b"1" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    order = []
    for name in ("write", "fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: (order.append(n), r(*a))[1])
    replace_file(tmp_path / "new" / "a", [b"one", b"", b"two"])
    assert order == ["write", "write", "fsync", "replace", "fsync"]


def test_writers_at_once_all_succeed(tmp_path):
    path, failures = tmp_path / "a", []

    def write(n):
        try:
            for _ in range(60):
                replace_file(path, [bytes([n]) * 5000])
        except OSError as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not path.exists() or len(set(path.read_bytes())) == 1
    assert not failures and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_writer_is_not_tidied_up_before_it_has_its_lock_or_its_name(tmp_path, monkeypatch):
    """Another writer of the same file comes between any two of its steps."""
    path = tmp_path / "a"
    for name in ("open", "fsync", "replace", "close", "fstat"):
        real = getattr(os, name)

        def step(*args, name=name, real=real, **options):
            monkeypatch.undo()
            before = real(*args, **options) if name == "open" else None
            replace_file(path, [b"other"])
            return real(*args, **options) if name != "open" else before

        monkeypatch.setattr(os, name, step)
        replace_file(path, [b"one"])
        monkeypatch.undo()
        assert path.read_bytes() in (b"one", b"other")
        assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_links_are_replaced_and_never_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (tmp_path / "a").symlink_to(precious)
    (tmp_path / ".a.tmp").symlink_to(precious)  # names that a writer may have had
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))
    (tmp_path / f".a.{bytes(8).hex()}.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "a", [b"new"])
    monkeypatch.undo()
    replace_file(tmp_path / "a", [b"new"])
    assert precious.read_bytes() == b"mine"
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_bytes() == b"new"


def test_mode_of_the_replaced_file_stays(tmp_path):
    path = tmp_path / "a"
    replace_file(path, [b"1"])
    umask = os.umask(0)
    os.umask(umask)
    mode = lambda: stat.S_IMODE(path.stat().st_mode)
    assert mode() == 0o666 & ~umask
    for wanted in (0o600, 0o664, 0o640):
        path.chmod(wanted)
        replace_file(path, [b"2"])
        assert mode() == wanted


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, kind, what in (
        (tmp_path / "pipe", OSError, "is a pipe, a socket or a device"),
        (Path("/dev/null"), OSError, "is a pipe, a socket or a device"),
        (tmp_path, IsADirectoryError, "is a folder"),
        (tmp_path / ("x" * 256), OSError, "has 256 bytes"),
        (tmp_path / ("é" * 128), OSError, "has 256 bytes"),
    ):
        with pytest.raises(kind, match=what) as error:
            replace_file(name, [b""])
        assert "why:" in str(error.value) and "do:" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
    replace_file(tmp_path / ("x" * 255), [b"long"])
    replace_file(tmp_path / ("é" * 127), [b"long"])
    assert len(list(tmp_path.iterdir())) == 3


RUN = """
import sys, time
from braintrace._files import only_run
with only_run(sys.argv[1]):
    print("in", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_second_run_in_a_folder_is_refused_with_the_process_of_the_first(tmp_path):
    words = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen([*words, "60"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "in\n"
        with pytest.raises(ValueError, match="there is a run in") as error, only_run(tmp_path):
            pass
        text = str(error.value)
        assert f"process {first.pid}, since {time.strftime('%Y-')}" in text and "do:" in text
        first.kill()
    with only_run(tmp_path):  # what was killed left its file, and no lock on it
        assert re.match(f"process {os.getpid()}, ", (tmp_path / ".running").read_text())
    assert list(tmp_path.iterdir()) == []
