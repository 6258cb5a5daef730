"""Version, changelog, citation file and classifiers say the same, and what was tested."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_links_of_the_readme_lead_somewhere_on_pypi(monkeypatch):
    plugin = ModuleType("hatchling.metadata.plugin.interface")
    plugin.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)  # needed to build, not to test
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)

    def of_environment(repository):
        monkeypatch.setenv("BRAINTRACE_REPOSITORY", repository)
        metadata = {}
        build.CustomMetadataHook.update(SimpleNamespace(root=str(ROOT)), metadata)
        return metadata

    text = (ROOT / "README.md").read_text("utf-8")
    assert of_environment("")["readme"]["text"] == text and not of_environment("")["urls"]
    there = of_environment("https://example.org/o/n/")
    assert there["urls"]["Source"] == "https://example.org/o/n"
    links = re.findall(r"\]\(([^)\s]+)\)", there["readme"]["text"])
    assert links and all(re.match("https?://|#", link) for link in links)
    assert build.absolute("![p](a.png) [t](b.md#c) [w](https://x.y) [h](#h)", "R", "v1") == (
        "![p](R/raw/v1/a.png) [t](R/blob/v1/b.md#c) [w](https://x.y) [h](#h)"
    )


def test_workflows_run_targets_that_there_are():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    files = sorted(ROOT.glob(".github/workflows/*.yml"))
    run = re.findall(r"\bmake ([a-z][\w-]*)", "".join(f.read_text("utf-8") for f in files))
    assert len(files) == 4 and {"docs", "package", "test-all", "test-jax"} <= set(run) <= targets
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
