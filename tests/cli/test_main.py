"""The words of the command line: help, version, and names that must agree."""

import subprocess
import sys
from pathlib import Path

import pytest

import braintrace
from braintrace.cli import main
from braintrace.cli.commands import _compare, _names
from braintrace.cli.compare._cells import CELLS
from braintrace.cli.compare._rules import known
from braintrace.cli.compare.tasks import TASKS

COMMANDS = ("demo", "train", "compare", "explain", "bench")


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
    assert _names.TASKS == tuple(TASKS) and _names.CELLS == tuple(CELLS)
    assert set(_compare.FIRST) <= set(known())


LIGHT = """
import sys, types
package = types.ModuleType("braintrace")  # without what `import braintrace` itself imports
package.__path__ = [sys.argv[1]]
sys.modules["braintrace"] = package
from braintrace.cli import main
try:
    main(["train", "--help"])
except SystemExit:
    heavy = {"jax", "numpy", "brainstate", "matplotlib"} & set(sys.modules)
    sys.exit(", ".join(sorted(heavy)) or 0)
"""


def test_help_itself_imports_nothing_heavy():
    folder = str(Path(braintrace.__file__).parent)
    found = subprocess.run([sys.executable, "-c", LIGHT, folder], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "usage: braintrace train" in found.stdout


def test_interrupt_is_not_a_traceback(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("braintrace.cli._demo.run", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
