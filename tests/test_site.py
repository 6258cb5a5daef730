"""What the site adds to the documents: links that work in both places, every name, no network."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]

spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
assert spec is not None and spec.loader is not None
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def links(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [m["path"] for m in hooks._LINK.finditer(text)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_to_files_of_the_repository(path):
    gone = [link for link in links(path) if not (path.parent / link).exists()]
    assert not gone


@pytest.mark.parametrize(
    "text, home, expected",
    [
        ("[r](docs/rules.md)", "", "[r](rules.md)"),
        ("![m](docs/memory.png)", "", "![m](memory.png)"),
        ("[c](CONTRIBUTING.md#layers)", "", "[c](contributing.md#layers)"),
        ("[r](../README.md)", "docs", "[r](readme.md)"),
        ("[c](../../CONTRIBUTING.md)", "docs/how-to", "[c](../contributing.md)"),
        ("[r](../rules.md#rules)", "docs/how-to", "[r](../rules.md#rules)"),
        ("[w](https://semver.org/) [h](#here)", "", "[w](https://semver.org/) [h](#here)"),
    ],
)
def test_links_are_turned_to_where_the_site_has_the_page(text, home, expected):
    assert hooks.linked(text, home) == expected


@pytest.mark.parametrize("module", hooks.MODULES)
def test_exported_names_are_the_public_ones(module):
    package = importlib.import_module(module)
    known = {n for n in hooks.exported(module) if not n.startswith("_")}
    assert known and all(hasattr(package, name) for name in known)
    homed = {n for n, v in vars(package).items() if getattr(v, "__module__", None) == module}
    assert {n for n in homed if not n.startswith("_")} <= known


def test_a_name_without_an_entry_is_found():
    entries = "".join(
        f'<h2 id="{module}.{name}">' for module in hooks.MODULES for name in hooks.exported(module)
    )
    assert hooks.missing({"all.html": entries}) == []
    less = entries.replace('id="braintrace.nn.Linear"', 'id="other"')
    assert hooks.missing({"all.html": less}) == ["braintrace.nn.Linear"]


@pytest.mark.parametrize(
    "html, count",
    [
        ('<script src="https://cdn.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example/css">', 1),
        ('<link rel="canonical" href="https://example.org/">', 0),
        ('<script src="assets/x.js"></script><a href="https://example.org">there</a>', 0),
    ],
)
def test_what_a_page_loads_from_the_network_is_found(html, count):
    assert len(hooks.loads({"page.html": html})) == count
