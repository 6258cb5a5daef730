"""Training from the command line: stopped and resumed runs end where whole ones do."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from braintrace.checkpoint._container import Container
from braintrace.lab.cli import _session, _source, _train, main

from .test_demo import hide

SMALL = ["--cell", "mingru", "--units", "3", "--batch", "2", "--length", "16", "--seed", "3"]


def train(out, *words):
    """The exit status of a small run; SystemExit as its code."""
    try:
        return main(["train", "adding", "--out", str(out), *words])
    except SystemExit as stopped:
        return stopped.code


def values(out):
    """Everything in a checkpoint that training depends on, by name."""
    with Container(out / "train.ckpt") as file:
        found, extra = file.read(), dict(file.header["extra"]["dict"])
    return {**found, "losses": found[extra["losses"]["numpy"]], "step": file.header["step"]}


def assert_identical(one, two):
    assert one.keys() == two.keys() and len(one) > 10
    for name, a in one.items():
        assert np.array_equal(a, two[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four updates that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert train(out, *SMALL, "--updates", "4") == 0
    return out


def test_train_leaves_checkpoint_record_and_figure(whole):
    record = json.loads((whole / "train.json").read_text())
    assert len(record["losses"]) == 4 and record["at"] == [0, 1, 2, 3, 4]
    assert record["scores"][0] != record["scores"][-1] and record["metric"] == "squared error"
    assert record["settings"]["units"] == 3 and record["settings"]["rule"] == "d_rtrl"
    assert (whole / "train.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in whole.iterdir()} == {
        "settings.json",
        "train.ckpt",
        "train.json",
        "train.png",
    }
    assert record["seconds_per_update"] > 0


def test_resumed_run_that_is_finished_changes_nothing_and_says_so(whole, capsys, monkeypatch):
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in whole.iterdir()}
    record = json.loads((whole / "train.json").read_text())
    monkeypatch.setattr(_session, "Compiled", None)  # nothing is compiled
    assert train(whole, "--resume") == 0
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in whole.iterdir()} == before
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Nothing to do: all 4 updates of the run in {whole} are done.")
    assert last == result(record, whole)


def result(record, folder):
    return (
        f"Result: held-out squared error {record['scores'][-1]:.4f} (chance level: 0.1667), "
        f"loss {record['losses'][-1]:.4f}, saved in {folder}"
    )


def test_train_shows_the_score_of_the_update_that_it_shows(tmp_path, capsys):
    assert train(tmp_path, *SMALL, "--updates", "50") == 0  # scored at every third update
    shown = capsys.readouterr()
    record = json.loads((tmp_path / "train.json").read_text())
    scores, losses = dict(zip(record["at"], record["scores"], strict=True)), record["losses"]
    assert list(scores) == [*range(0, 50, 3), 50]
    compiling, *lines = shown.err.splitlines()
    assert re.fullmatch(r"compiling… \d+\.\d s", compiling)
    assert lines == [
        f"update {n}/50  squared error {scores[n]:.4f}, loss {losses[n - 1]:.4f}"
        for n in (*range(6, 50, 6), 50)
    ]
    assert shown.out.splitlines()[-1] == result(record, tmp_path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that SIGTERM stopped in its second update, and what it said."""
    out = tmp_path_factory.mktemp("stopped")
    advance = _session.Session.advance

    def terminated(self):
        if self.done == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_session.Session, "advance", terminated)
        status = train(out, *SMALL, "--updates", "4")
    return out, status


def test_stopped_run_goes_on_bit_for_bit(whole, stopped, capsys, monkeypatch):
    out, status = stopped
    assert status == 128 + signal.SIGTERM and values(out)["step"] == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    hide(monkeypatch, "matplotlib", "tqdm")
    assert train(out, "--resume", "--checkpoint-every", "1") == 0
    shown = capsys.readouterr()
    assert "4 updates, on from 2\n" in shown.out and "update 4/4  squared error" in shown.err
    assert "No figure without matplotlib: pip install 'braintrace-online[plot]'" in shown.err
    assert_identical(values(out), values(whole))
    records = [json.loads((d / "train.json").read_text()) for d in (out, whole)]
    assert records[0]["scores"] == records[1]["scores"]


PROCESS = """
import sys
import brainstate
from braintrace.lab.cli import main
brainstate.environ.set(precision=64)
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_leaves_a_checkpoint_and_the_command_that_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ["train", "adding", *SMALL, "--updates", "100000", "--checkpoint-every", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, *words, "--out", str(out)],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "train.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "stopping after this update" in errors
    done = int(re.search(r"Stopped after update (\d+) of 100000", said).group(1))
    assert done == values(out)["step"]
    command = shlex.split(re.search(r"^To continue: (.*)$", said, re.MULTILINE).group(1))
    assert command[0] == "braintrace"
    assert main([*command[1:], "--updates", str(done + 2)]) == 0
    assert train(tmp_path / "whole", *SMALL, "--updates", str(done + 2)) == 0
    assert_identical(values(out), values(tmp_path / "whole"))


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "there is a run in {out} already (settings.json, train.ckpt). Add --resume"),
        (["--resume", "--units", "7", "--lr", "0.5"], "units is 7 and was 3"),
        (["--resume", "--units", "7", "--lr", "0.5"], "lr is 0.5 and was 0.01"),
        (["--resume", "--out", "{out}/nowhere"], "there is nothing to resume in {out}/nowhere"),
        (["--out", "{out}/new", "--rule", "bptt"], "--rule d_rtrl:window=96"),
        (["--out", "{out}/new", "--rule", "d_rtrl,pp_prop"], "takes one rule"),
        (["--out", "{out}/new", "--rule", "magic"], "there is no rule 'magic'"),
        (["--out", "{out}/new", "--length", "1"], "adding needs at least"),
        (["--out", "{out}/new", "--updates", "0"], "'0' is not a positive whole number"),
        (["--out", "{out}/new", "--cell", "prison"], "there is no cell 'prison'"),
        (["--out", "{out}/new", "--lr", "nan"], "'nan' is not a positive number"),
        (["--out", "{out}/new", "--seed", "1" * 20], "is not a whole number from 0 to"),
        (["--out", "{out}/new", "--devices", "4096"], "the mesh has 4096 devices, and there are"),
        (["--out", "{out}/new", "--devices", "1", "--mesh", "data=1"], "leave out one of them"),
        (["--resume", "--updates", "2"], "--updates 2: the run in {out} has made 4 updates."),
    ],
)
def test_wrong_training_exits_with_2(words, said, whole, capsys):
    before = values(whole)
    assert train(whole, *(word.format(out=whole) for word in words)) == 2
    shown = capsys.readouterr().err
    assert "usage: braintrace train" in shown and said.format(out=whole) in shown
    assert_identical(values(whole), before)
    assert not (whole / "new").exists()


def test_damaged_checkpoint_is_a_failure_without_traceback(whole, tmp_path, capsys):
    for name in ("settings.json", "train.ckpt"):
        data = (whole / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-40] if name == "train.ckpt" else data)
    assert train(tmp_path, "--resume") == 1
    assert "its checksum is wrong" in capsys.readouterr().err
    (tmp_path / "train.ckpt").unlink()
    assert train(tmp_path, "--resume", "--updates", "1") == 0
    assert "No checkpoint in" in capsys.readouterr().err
    (tmp_path / "settings.json").write_text("{")
    assert train(tmp_path, "--resume") == 2
    assert "settings.json is damaged" in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_told_after_one_update(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file", *SMALL, "--updates", "1000000") == 1
    assert f"{tmp_path / 'file'} cannot be written: " in capsys.readouterr().err


def test_rule_that_needs_more_than_a_loss_is_refused_and_leaves_nothing(tmp_path, capsys):
    words = ["--rule", "three_factor", "--updates", "1"]
    assert train(tmp_path / "new", *SMALL, *words) == 1
    assert "modulator" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_score_of_the_metrics_is_in_the_unit_of_its_name():
    session = SimpleNamespace(
        settings=SimpleNamespace(score_every=1, updates=5),
        done=1,
        losses=[2.0],
        task=SimpleNamespace(measure=SimpleNamespace(name="accuracy (%)", scale=100)),
        score=lambda: 0.25,
        timed_advance=lambda: 0.1,
    )
    seen = []
    _train._advance(session, [], lambda *call: seen.append(call))
    assert seen == [(1, {"loss": 2.0, "accuracy (%)": 25.0})]
    session.losses, session.settings.lr = [float("nan")], 3.0
    with pytest.raises(_train.Diverged, match="update 1 is not finite") as error:
        _train._advance(session, [], lambda *call: seen.append(call))
    assert "with --lr 3;" in str(error.value) and "do:" in str(error.value)
    assert len(seen) == 1


def test_function_of_the_user_is_called_for_every_update(tmp_path, capsys):
    log = tmp_path / "log.py"
    log.write_text(
        "def log(step, metrics):\n"
        "    with open(__file__ + '.txt', 'a') as file:\n"
        "        print(step, sorted(metrics), file=file)\n"
        "def bad(step, metrics):\n"
        "    1 / 0\n"
    )
    words = [*SMALL, "--updates", "2"]
    assert train(tmp_path / "a", *words, "--on-update", f"{log}:log") == 0
    lines = (tmp_path / "log.py.txt").read_text().splitlines()
    assert lines == [f"{step} ['loss', 'squared error']" for step in (1, 2)]
    capsys.readouterr()
    assert train(tmp_path / "b", *words, "--on-update", f"{log}:other") == 2
    assert "has no function other" in capsys.readouterr().err
    with pytest.raises(_source.Failure, match="ZeroDivisionError") as error:
        _train._hook(f"{log}:bad")(1, {})
    assert f"{log}:5 (bad)" in str(error.value)
