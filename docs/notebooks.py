"""Writes `notebooks/` from the tutorials, with what the cells print: `make notebooks`.

A tutorial is the only source: its text and its blocks of Python become cells. Pictures and outputs
are left out, since the cells make them. The first cell installs the package where it is missing.
"""

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = ("own-model", "first-network", "long-sequences", "ei-network")
INSTALL = """\
# Installs the release where it is missing, as on Colab; a wheel next to this notebook goes first.
import glob
from importlib.metadata import distributions

if not [*distributions(name="braintrace-online")]:
    wheels = [f"./{wheel}" for wheel in glob.glob("braintrace_online-*.whl")]
    package = max(wheels, default="braintrace-online")
    %pip install --quiet "{package}[plot,tasks]" brainpy
"""

# How a cell is called, another name every time.
_KERNEL = re.compile(r"(?:[\w./-]*ipykernel_\d+/)?\b\d{6,}\.py(?=:\d)")
_CODE = re.compile(r"(?<!<!-- no-run -->\n)^```python\n(.*?)\n^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_PICTURE = re.compile(r"^!\[.*?\]\(.*?\)\n+", re.MULTILINE)
_SHOWN = re.compile(r"^<!-- output -->\n```text\n.*?^```\n+", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def source(name: str) -> Path:
    return ROOT / "docs" / "tutorials" / f"{name}.md"


def notebook(name: str) -> str:
    """The notebook of a tutorial, as JSON."""
    moved = lambda m: _moved(m[1])
    text = _SHOWN.sub("", _PICTURE.sub("", source(name).read_text("utf-8")))
    text = _LINK.sub(moved, _FORMULA.sub(r"$$\n\1$$", text))
    parts = _CODE.split(text)  # text and code in turn
    kinds = [("code", INSTALL)]
    kinds += [(("markdown", "code")[i % 2], part) for i, part in enumerate(parts)]
    kinds[:2] = kinds[1], kinds[0]  # the title is first
    cells = [_cell(i, kind, part) for i, (kind, part) in enumerate(kinds) if part.strip()]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    page = {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


def _moved(path: str) -> str:
    """A link of a tutorial, from the folder of the notebooks."""
    target = posixpath.normpath(posixpath.join("docs/tutorials", path))
    name = posixpath.basename(target).removesuffix(".md")
    return (
        f"{name}.ipynb"
        if target == f"docs/tutorials/{name}.md" and name in NAMES
        else f"../{target}"
    )


def _cell(number: int, kind: str, text: str) -> dict:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = text.strip().splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines, **code}


def executed(text: str) -> Any:
    """A notebook after a kernel has run it, with what its cells print and draw."""
    import nbformat
    from nbclient import NotebookClient

    page = nbformat.reads(text, as_version=4)
    NotebookClient(page, timeout=600, kernel_name="python3", record_timing=False).execute()
    page.metadata = json.loads(text)["metadata"]  # not the version of this kernel
    for cell in page.cells:
        if cell.cell_type == "code":
            told = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.outputs = [_anywhere(output) for output in told]
    return page


def _anywhere(output: Any) -> Any:
    """An output in which cells are called `cell`."""
    if output.output_type == "stream":
        output.text = _KERNEL.sub("cell", output.text)
    elif "data" in output and "text/plain" in output.data:
        output.data["text/plain"] = _KERNEL.sub("cell", output.data["text/plain"])
    return output


def without_outputs(text: str) -> str:
    """A notebook as it was before it ran."""
    page = json.loads(text)
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
    return json.dumps(page, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    import nbformat

    (ROOT / "notebooks").mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        nbformat.write(executed(notebook(name)), ROOT / "notebooks" / f"{name}.ipynb")
