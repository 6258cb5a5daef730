"""Progress: a bar of one line on a terminal, a few lines elsewhere, and what compiles is named."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from braintrace.lab.comparison import _progress
from braintrace.lab.comparison._progress import progress_bar, stage

from ..cli.test_demo import hide

# The longest that `train` and `demo` show.
TEXTS = ("bits per character 2.123 at 1050, loss 1.2345", "D-RTRL 0.123, BPTT 0.123")


@pytest.mark.parametrize("text", TEXTS)
def test_bar_and_score_fit_into_80_columns(text, monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        bar = progress_bar(1500, done=1000)
        for _ in range(10):
            bar.set_postfix_str(text, refresh=False)
            bar.update(10)
        bar.close()
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as screen:
        while part := screen.read(1000):  # Linux says EIO at the end
            shown += part
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown.decode()) if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("update 1100/1500") and lines[-1].endswith(text)


def test_bar_in_a_pipe_is_a_few_lines(capsys):
    bar = progress_bar(600, "running")
    for n in range(600):
        bar.set_postfix_str(f"loss {n + 1}", refresh=False)
        bar.update(1)
    bar.close()
    lines = [f"running {n}/600  loss {n}" for n in range(120, 601, 120)]
    assert capsys.readouterr().err.splitlines() == lines and len(lines) == _progress.LINES


def test_terminal_without_tqdm_has_lines(capsys, monkeypatch):
    hide(monkeypatch, "tqdm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = progress_bar(10)
    bar.update(2)
    assert type(bar) is _progress.Bar and capsys.readouterr().err == "update 2/10\n"


def test_stage_says_what_takes_time_and_how_long(capsys):
    with stage("compiling"):
        assert capsys.readouterr().err == "compiling… "
    assert re.fullmatch(r"\d+\.\d s\n", capsys.readouterr().err)
    with pytest.raises(ValueError), stage("compiling"):
        raise ValueError
    assert capsys.readouterr().err == "compiling… \n"
