"""The notebooks are the tutorials, and a kernel runs them."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

from test_readme import NUMBER

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
assert spec is not None and spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


def path(name: str) -> Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebook_is_its_tutorial(name):
    text = path(name).read_text("utf-8")
    kept, made = (
        json.loads(t) for t in (notebooks.without_outputs(text), notebooks.notebook(name))
    )
    for page in (kept, made):
        for cell in page["cells"]:
            cell["source"] = "".join(cell["source"])
    assert kept == made, "make notebooks writes it anew"
    nbformat.validate(json.loads(text))


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_has_the_outputs_of_its_cells(name):
    cells = nbformat.read(path(name), as_version=4).cells
    told = [cell.outputs for cell in cells if cell.cell_type == "code" and "print(" in cell.source]
    assert told and all(told), "make notebooks writes it anew"
    assert "ipykernel" not in path(name).read_text("utf-8")


def test_notebooks_are_these():
    assert sorted(p.stem for p in path("").parent.glob("*.ipynb")) == sorted(notebooks.NAMES)


def test_a_notebook_runs_in_a_fresh_kernel():
    """One of them: their programs are those of the tutorials, which test_readme.py runs."""
    page = notebooks.executed(notebooks.notebook("own-model"))
    code = [cell for cell in page.cells if cell.cell_type == "code"]
    assert len(code) > 3 and all(cell.execution_count for cell in code)
    printed = lambda p: "".join(o.get("text", "") for c in p.cells for o in c.get("outputs", []))
    kept = printed(nbformat.read(path("own-model"), as_version=4))
    assert NUMBER.sub("#", printed(page)) == NUMBER.sub("#", kept)  # some are rounding errors


def test_text_code_and_links_of_a_tutorial_become_cells(monkeypatch, tmp_path):
    text = (
        "# T\n\n[f](first-network.md#a) [r](../rules.md)\n\n```python\na = 1\n```\n\n"
        "![p](../p.png)\n\n<!-- output -->\n```text\n1\n```\n\n"
        "<!-- no-run -->\n```python\nb\n```\n\n```math\nx\n```\n"
    )
    (tmp_path / "t.md").write_text(text, "utf-8")
    monkeypatch.setattr(notebooks, "source", lambda name: tmp_path / f"{name}.md")
    cells = json.loads(notebooks.notebook("t"))["cells"]
    first, install, code, last = ("".join(cell["source"]) for cell in cells)
    assert first == "# T\n\n[f](first-network.ipynb#a) [r](../docs/rules.md)"
    assert "%pip install" in install and code == "a = 1"
    assert last == "<!-- no-run -->\n```python\nb\n```\n\n$$\nx\n$$"


def test_first_cell_installs_the_release_or_the_wheel_beside_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    cell = notebooks.INSTALL.replace("%pip install", "installed = f").replace(" --quiet ", "")
    cell = cell.replace('" brainpy', '"')
    names: dict = {}
    exec(cell, names)
    assert names["installed"] == "braintrace-online[plot,tasks]"
    (tmp_path / "braintrace_online-0.3.0-py3-none-any.whl").touch()
    exec(cell, names)
    assert names["installed"] == "./braintrace_online-0.3.0-py3-none-any.whl[plot,tasks]"
