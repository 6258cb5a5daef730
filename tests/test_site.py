"""What the site adds to the documents: rewritten links, formulas, every name, no network."""

import importlib.util
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

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
    broken = [link for link in links(path) if not (path.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize(
    "text, home, expected",
    [
        ("[r](docs/rules.md)", "", "[r](rules.md)"),
        ("![m](docs/bench.svg)", "", "![m](bench.svg)"),
        ("[c](CONTRIBUTING.md#layers)", "", "[c](contributing.md#layers)"),
        ("[r](../README.md)", "docs", "[r](readme.md)"),
        ("[c](../../CONTRIBUTING.md)", "docs/how-to", "[c](../contributing.md)"),
        ("[r](../rules.md#rules)", "docs/how-to", "[r](../rules.md#rules)"),
        ("[w](https://semver.org/) [h](#here)", "", "[w](https://semver.org/) [h](#here)"),
    ],
)
def test_links_are_rewritten_for_the_site(text, home, expected):
    assert hooks.linked(text, home) == expected


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_inline_formulas_have_nothing_that_markdown_changes(path):
    """GitHub reads Markdown first: an escape loses its backslash, `}_` may open emphasis."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`]*`", "", path.read_text("utf-8"), flags=re.M | re.S)
    formulas = re.findall(r"\$([^$]+)\$", text)
    assert text.count("$") == 2 * len(formulas)
    assert not [f for f in formulas if re.search(r"\\[^a-zA-Z]|}_|[*|<>\n]|^ | $", f)]


@pytest.mark.parametrize(
    "page, parts",
    [
        (r'a <span class="arithmatex">\(h_t\)</span> b', ["a <math", 'display="inline"', " b"]),
        ('<div class="arithmatex">a &lt; b</div>', ['<div class="formula"><math', "&#x0003C;"]),
        (r'<span class="arithmatex">\(\bar y\)</span>', ["<mi>y</mi>", "&#x0203E;"]),
        ("<code>$h$</code>", ["<code>$h$</code>"]),
    ],
)
def test_latex_becomes_mathml(page, parts):
    assert all(part in hooks.typeset(page) for part in parts)


def test_a_notebook_opens_in_colab_where_the_repository_is_known():
    (link,) = hooks.colab("https://github.com/a/b.c.git", "n.ipynb")
    assert link.endswith(
        "(https://colab.research.google.com/github/a/b.c/blob/main/notebooks/n.ipynb)"
    )
    assert hooks.colab("", "n.ipynb") == hooks.colab("https://example.org/a/b", "n.ipynb") == []


def test_pictures_follow_the_colours_of_their_page(tmp_path):
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], color="#222222", marker="o", mfc="white")
    hooks.svg.write(figure, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert "prefers-color-scheme:dark" in text and "currentColor" in text
    assert "#222222" not in text and "fill: var(--paper)" in text
    page = hooks.svg.inlined('<p><img alt="b &amp; c" src="a.svg" /></p>', tmp_path)
    assert page.startswith('<p><svg class="figure" role="img" aria-label="b &amp; c" ')
    assert "<style" not in page, "a style would be that of the whole page"
    hooks.svg.write(figure, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text("utf-8") == text, "the same figure is the same file"


@pytest.mark.parametrize("latex", [r"\begin{aligned} a &amp;= b \end{aligned}", r"\nonsense"])
def test_latex_that_is_not_supported_is_an_error(latex):
    with pytest.raises(ValueError, match="does not support"):
        hooks.typeset(f'<div class="arithmatex">{latex}</div>')


def test_the_font_of_formulas_is_installed():
    assert hooks.math_font().exists()


@pytest.mark.parametrize("module", hooks.MODULES)
def test_exported_names_are_the_public_ones(module):
    package = importlib.import_module(module)
    exported = {n for n in hooks.exported(module) if not n.startswith("_")}
    assert exported and all(hasattr(package, name) for name in exported)
    shown = {n: getattr(package, n) for n in dir(package) if not n.startswith("_")}
    defined = {n for n, v in shown.items() if getattr(v, "__module__", None) == module}
    assert defined <= exported


def test_a_name_without_an_entry_is_reported():
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
def test_what_a_page_loads_from_the_network_is_reported(html, count):
    assert len(hooks.loads({"page.html": html})) == count
