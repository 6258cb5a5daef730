"""Version, changelog, citation file and classifiers say the same, and what was tested."""

import re
import tomllib
from pathlib import Path

import braintrace

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TESTED = (ROOT / "docs" / "compatibility.md").read_text("utf-8")


def test_changelog_and_citation_have_the_version_and_its_date():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest, date = re.search(r"^## ([\d.]+) - (\d{4}-\d\d-\d\d)$", changes, re.M).groups()
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert newest == braintrace.__version__
    assert f"\nversion: {newest}\n" in citation
    assert f'\ndate-released: "{date}"\n' in citation
    assert f"name: {PROJECT['authors'][0]['name']}\n" in citation


def test_classifiers_are_the_versions_that_were_tested():
    promised = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \|", TESTED, re.M)
    assert set(rows) == promised
    assert f">={min(promised, key=lambda v: int(v[2:]))}" == PROJECT["requires-python"]


def test_oldest_jax_and_brainstate_that_are_allowed_were_tested():
    least = dict(re.findall(r"(jax|brainstate)>=([\d.]+)", " ".join(PROJECT["dependencies"])))
    cells = [[c.strip() for c in row.split("|")] for row in TESTED.splitlines() if row[:3] == "| 3"]
    assert any(c[2].startswith(least["jax"]) and c[3] == least["brainstate"] for c in cells)
