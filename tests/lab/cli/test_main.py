"""The words of the command line: help, version, and names that must agree."""

import os
import signal
import subprocess
import sys

import pytest

import braintrace
from braintrace.lab.cli import _commands, _main, _names, main
from braintrace.lab.cli._names import TASKS
from braintrace.lab.cli._network import CELLS
from braintrace.lab.comparison._rules import BASELINES
from braintrace.lab.tasks import MAKE
from braintrace.rules import BY_NAME as RULES

COMMANDS = ("demo", "train", "compare", "explain", "plan", "bench")


def printed(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command(capsys):
    shown = printed(capsys, "--help")
    assert "usage: braintrace" in shown and all(f"\n    {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(command, capsys):
    shown = printed(capsys, command, "--help")
    assert f"usage: braintrace {command}" in shown
    assert f"examples:\n  braintrace {command}" in shown


def test_version(capsys):
    assert printed(capsys, "--version") == f"braintrace {braintrace.__version__}\n"


def test_names_in_help_are_those_that_there_are():
    assert tuple(TASKS) == tuple(MAKE) and tuple(_names.CELLS) == tuple(CELLS)
    assert {*_commands.COMPARED} <= {*_names.RULES}
    assert {*_names.RULES, *_names.ALIASES} == {*BASELINES, *RULES}
    assert all(any(RULES[a] is RULES[n] for n in RULES if n != a) for a in _names.ALIASES)


LIGHT = """
import sys
from braintrace.lab.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stopped:
    print("heavy:", *sorted({"jax", "numpy", "brainstate", "matplotlib"} & set(sys.modules)))
    sys.exit(stopped.code)
"""


@pytest.mark.parametrize(
    "words, status",
    [("--help", 0), ("train --help", 0), ("train copy --rule magic", 2), ("compare --nothing", 2)],
)
def test_help_and_mistakes_do_not_wait_for_jax(words, status):
    found = subprocess.run([sys.executable, "-c", LIGHT, *words.split()], capture_output=True)
    assert found.returncode == status
    assert found.stdout.decode().splitlines()[-1] == "heavy:", found.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "braintrace: name a command: demo, train, compare, explain, plan, bench"),
        ("trian copy", "braintrace: there is no command 'trian': did you mean train?"),
        ("--verson", "braintrace: there is no option '--verson': did you mean --version?"),
        ("demo --sede 3", "braintrace demo: there is no option '--sede': did you mean --seed?"),
        # The word after an unknown option is not taken for the task.
        ("train --upadtes 5 copy", "there is no option '--upadtes': did you mean --updates?"),
        ("train copy --mesh data=x", "'data=x' is not a mesh such as data=4 or data=4,model=2"),
        ("train copy --mesh rows=2", "'rows=2' is not a mesh such as data=4 or data=4,model=2"),
        ("train coyp", "argument TASK: there is no task 'coyp': did you mean copy?"),
        ("train copy --cell gur", "argument --cell: there is no cell 'gur': did you mean gru?"),
        ("train copy --rule d_rtl", "there is no rule 'd_rtl': did you mean d_rtrl?"),
        ("train copy adding", "braintrace train: unexpected argument 'adding'"),
        ("train", "braintrace train: the following arguments are required: TASK"),
        ("compare", "braintrace compare: name a task: copy, adding,"),
        ("compare copy,juggling", "there is no task 'juggling': choose from copy, adding,"),
        ("compare copy --rules bptt,eporp", "there is no rule 'eporp': did you mean eprop?"),
        (
            "compare copy --rules d_rtrl:widow=3",
            "d_rtrl 'widow': did you mean window?",
        ),
        (
            "bench --memry-limit 4",
            "'--memry-limit': did you mean --memory-limit?",
        ),
        ("bench --memory-limit 0", "--memory-limit: '0' is not a positive number"),
    ],
)
def test_mistake_is_told_in_two_lines_with_what_may_be_meant(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    error, usage = capsys.readouterr().err.splitlines()
    assert said in error
    assert usage.startswith("usage: braintrace") and usage.endswith("--help says more")


def parsed(words):
    """The options of a command that is not run."""
    return {**vars(_main.parser().parse_args(words.split())), "parser": None}


@pytest.mark.parametrize(
    "old, new",
    [
        ("demo --steps 7", "demo --updates 7"),
        ("train copy --steps 7", "train copy --updates 7"),
        ("compare --task copy adding --quick", "compare copy adding --quick"),
        ("compare --quick --task copy", "compare --quick copy"),
        ("bench --most 2.5", "bench --memory-limit 2.5"),
    ],
)
def test_old_spellings_work_and_are_not_shown(old, new, capsys):
    command, spelling = old.split()[0], next(w for w in old.split() if w in OLD)
    assert parsed(old) == parsed(new)
    assert spelling not in printed(capsys, command, "--help")


OLD = ("--steps", "--task", "--most")


def test_help_of_train_shows_the_defaults(capsys):
    shown = printed(capsys, "train", "--help")
    for text in ("default: d_rtrl", "default: 100", "default: 0", "out/train_TASK"):
        assert text in " ".join(shown.split())
    for name, task in TASKS.items():
        values = (task.cell, task.length, task.units, task.batch, task.updates, task.lr)
        assert f"{name} {' '.join(map(str, values))}" in " ".join(shown.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, command, "--help").splitlines()
    assert [x for x in lines if len(x) > 80 and not x.startswith("  braintrace explain")] == []


def test_a_command_that_is_terminated_ends_as_one_that_is_interrupted(capsys, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "braintrace.lab.cli._demo.run", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert main(["demo"]) == 130 and signal.getsignal(signal.SIGTERM) is before


def test_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("braintrace.lab.cli._demo.run", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
