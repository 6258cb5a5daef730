"""Every example runs alone, is short, and says what it shows."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
ids = lambda path: path.stem


@pytest.mark.parametrize("path", EXAMPLES, ids=ids)
def test_example_runs(path, alone, monkeypatch, capsys, tmp_path):
    if "import torch" in path.read_text("utf-8"):
        pytest.importorskip("snntorch", reason="PyTorch is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--small"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir()), "it writes files without being asked"


@pytest.mark.parametrize("path", EXAMPLES, ids=ids)
def test_example_is_short_and_says_what_it_shows(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 120
    told = ast.get_docstring(ast.parse(text))
    assert told and len(told.split()) > 40


def test_the_example_of_torch_is_thirty_lines():
    text = (FOLDER / "torch_spiking_digits.py").read_text("utf-8")
    told = re.sub(r'"""[\s\S]*?"""', "", text)
    assert len([line for line in told.splitlines() if line.strip()]) <= 30


def test_examples_are_listed():
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert EXAMPLES
    assert not [path.name for path in EXAMPLES if f"`{path.name}`" not in listed]
