"""Runs that are disturbed: other files in the folder, closed streams, hooks that leave."""

import json
import os
import subprocess
import sys

import pytest

from braintrace._files import only_run
from braintrace.lab.cli import _session, main

SMALL = ["--cell", "mingru", "--units", "3", "--batch", "2", "--length", "16"]


def train(out, *words):
    """The exit status of a small run; SystemExit as its code."""
    try:
        return main(["train", "adding", "--out", str(out), *words])
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs of two updates, with the seeds 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in ("1", "2"):
        assert train(folder / seed, *SMALL, "--seed", seed, "--updates", "2") == 0
    return folder


def test_checkpoint_of_another_run_is_refused_with_the_difference(runs, capsys):
    data = (runs / "2" / "train.ckpt").read_bytes()
    own = (runs / "1" / "train.ckpt").read_bytes()
    (runs / "1" / "train.ckpt").write_bytes(data)
    capsys.readouterr()
    assert train(runs / "1", "--resume", "--updates", "3") == 1
    text = capsys.readouterr().err
    assert "is the checkpoint of another run" in text and "do:" in text
    assert "seed: 2 in the checkpoint, 1 in settings.json" in text
    assert (runs / "1" / "train.ckpt").read_bytes() == data
    (runs / "1" / "train.ckpt").write_bytes(own)
    assert train(runs / "1", "--resume", "--updates", "3") == 0


def test_second_run_in_a_folder_is_refused(runs, capsys):
    with only_run(runs / "2"):
        assert train(runs / "2", "--resume", "--updates", "3") == 2
        assert f"process {os.getpid()}, since" in capsys.readouterr().err
    assert not (runs / "2" / ".running").exists()


BAD = [
    ("units", "3"), ("units", 10**12), ("units", 0), ("seed", -1), ("seed", 2**32), ("batch", 2.0),
    ("lr", "x"), ("lr", float("inf")), ("updates", True), ("x64", 1), ("task", ["adding"]),
    ("cell", "GRU"), ("rule", None),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD)
def test_settings_that_are_none_are_refused(name, value, tmp_path, capsys, monkeypatch):
    good = _session.Settings("adding", "d_rtrl", "gru", 16, 3, 2, 0.1, 0, 2, 1, True)
    content = {f: getattr(good, f) for f in good.__slots__} | {name: value}
    (tmp_path / "settings.json").write_text(json.dumps(content))
    monkeypatch.setattr(_session, "Compiled", None)  # nothing is compiled
    assert train(tmp_path, "--resume") == 2
    text = capsys.readouterr().err
    assert "settings.json is damaged" in text and f"{name} = " in text


def test_hook_that_exits_stops_the_run_and_says_so(tmp_path, capsys):
    hook = tmp_path / "hook.py"
    hook.write_text("import sys\ndef leave(step, metrics):\n    step == 3 and sys.exit(0)\n")
    words = [*SMALL, "--updates", "6", "--on-update", f"{hook}:leave"]
    assert train(tmp_path / "a", *words) == 1
    text = capsys.readouterr().err
    assert "sys.exit(0), after update 3 of 6" in text
    assert f"braintrace train adding --out {tmp_path / 'a'} --resume" in text
    assert train(tmp_path / "a", "--resume") == 0
    assert len(json.loads((tmp_path / "a" / "train.json").read_text())["losses"]) == 6


PROCESS = """
import sys
import brainstate
from braintrace.lab.cli import main
brainstate.environ.set(precision=64)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("end", ["2>&-", "| head -1", ">&- 2>&-"])
def test_run_whose_words_nobody_reads_writes_its_result(end, tmp_path):
    words = ["train", "adding", *SMALL, "--updates", "2", "--out", str(tmp_path)]
    line = f'set -o pipefail; exec "$@" {end}' if "|" not in end else f'set -o pipefail; "$@" {end}'
    environ = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONUNBUFFERED": "1"}
    call = ["bash", "-c", line, "bash", sys.executable, "-c", PROCESS, *words]
    done = subprocess.run(call, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "train.json").read_text())["settings"]["units"] == 3
    assert (tmp_path / "train.ckpt").read_bytes().startswith(b"braintrace")
