"""Hooks of the site: documents of the root, lists of public names, formulas, and checks.

README, CONTRIBUTING and CHANGELOG stay at the root of the repository; the site has a copy with
rewritten links. A tutorial leads to its notebook, and every example has a page (`gallery.py`). A
comment `<!-- members of braintrace.nn -->` expands to one entry per re-exported name that no page
lists explicitly. LaTeX becomes MathML, and the site carries the font for it, so that formulas need
neither a script nor the network. After the build every public name must have an entry, and no page
may load anything from another host.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import gallery  # noqa: E402
import svg  # noqa: E402

PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/NOTES.md": "notes.md",
}
MODULES = (
    "braintrace",
    "braintrace.nn",
    "braintrace.show",
    "braintrace.tasks",
    "braintrace.verify",
)

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)\s#]+)")
_MEMBERS = re.compile(r"^<!-- members of (?P<module>[\w.]+) -->$", re.MULTILINE)
_ENTRY = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?P<latex>.*?)</\1>', re.DOTALL)
_MO = re.compile("<mo>(?P<sign>[^<]*)</mo>")
# As TeX sets them: ∂, / and | without space around them, | and ‖ at the height of a line.
_SIGNS = {
    "&#x02202;": 'lspace="0" rspace="0"',
    "&#x0002F;": 'lspace="0" rspace="0"',
    "&#x0007C;": 'lspace="0" rspace="0" stretchy="false"',
    "&#x02016;": 'stretchy="false"',
}
_LOADS = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*\"")
_GITHUB = re.compile(r"https://github\.com/(?P<name>[\w.-]+/[\w.-]+?)(?:\.git)?/?")
_STYLES = re.compile(r"<link\b(?![^>]*rel=\"canonical\")[^>]*\bhref=\"(?:https?:)?//[^\"]*\"")


def linked(text: str, home: str, page: str | None = None) -> str:
    """The text of a document in folder `home` of the repository, with the links of the site.

    A document outside of `docs` becomes `page`.
    """

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, match["path"]))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        if inside == target:  # neither a page nor one of the root's documents
            return match["path"]
        start = posixpath.dirname(page) if page else home.removeprefix("docs").lstrip("/")
        return posixpath.relpath(inside, start or ".")

    return _LINK.sub(moved, text)


def exported(module: str) -> list[str]:
    """Names that a package shows, in the order of its file, but for modules and `compat`."""
    package, _, name = module.partition(".")
    folder = ROOT / "src" / package
    files = [folder / "lab" / name / "__init__.py", folder / name / "__init__.py"]
    files = files if name else [folder / "__init__.pyi"]
    tree = ast.parse(next(file for file in files if file.exists()).read_text("utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    shown = [n for n in imports if n.module and not n.module.startswith("compat")]
    names = [a.asname for n in shown for a in n.names]
    return [name for name in names if name and not name.startswith("_")]


def expanded(markdown: str) -> str:
    """The markdown with its lists of members expanded."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    listed = {name for page in pages for name in _ENTRY.findall(page.read_text("utf-8"))}

    def entries(match: re.Match[str]) -> str:
        names = [f"{match['module']}.{name}" for name in exported(match["module"])]
        return "\n\n".join(f"::: {name}" for name in names if name not in {*listed, *MODULES})

    return _MEMBERS.sub(entries, markdown)


def typeset(page: str) -> str:
    """The HTML of a page with its LaTeX as MathML; a command that is not supported is an error."""
    from latex2mathml.converter import convert

    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"]).strip()
        inline = latex.startswith("\\(")
        latex = re.sub(r"^\\[(\[]|\\[)\]]$", "", latex)
        mathml = convert(latex, display="inline" if inline else "block")
        mathml = mathml.replace("&#x000AF;", "&#x0203E;")  # a bar over all of its letter
        if "\\" in mathml or "&<" in mathml:  # passed through as text
            raise ValueError(f"latex2mathml does not support all of this formula: {latex}")
        mathml = _MO.sub(
            lambda m: f"<mo {_SIGNS[m['sign']]}>{m['sign']}</mo>" if m["sign"] in _SIGNS else m[0],
            mathml,
        )
        return mathml if inline else f'<div class="formula">{mathml}</div>'

    return _FORMULA.sub(formula, page)


def colab(repository: str | None, notebook: str) -> list[str]:
    """The link that opens a notebook in Colab, where the repository is known and GitHub has it."""
    found = _GITHUB.fullmatch(repository or "")
    if found is None:
        return []
    place = f"https://colab.research.google.com/github/{found['name']}/blob/main/notebooks"
    return [f"[open in Colab]({place}/{notebook})"]


def math_font() -> Path:
    """STIX Two Math (Open Font License), from the package ziamath."""
    spec = importlib.util.find_spec("ziamath")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"


def missing(pages: dict[str, str]) -> list[str]:
    """Public names without an entry in any of the HTML pages."""
    entries = {
        m for page in pages.values() for m in re.findall(r"\bid=\"(braintrace[\w.]*)\"", page)
    }
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in exported(module)
        if f"{module}.{name}" not in {*entries, *MODULES}
    ]


def loads(pages: dict[str, str]) -> list[str]:
    """Tags that would load something from another host, with the name of their page."""
    return [
        f"{name}: {tag}"
        for name, page in pages.items()
        for pattern in (_LOADS, _STYLES)
        for tag in pattern.findall(page)
    ]


# --------------------------------------------------------------------------- called by mkdocs


def on_files(files, config):
    """Add the documents of the root, the gallery, and the font of the formulas."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = linked((ROOT / source).read_text("utf-8"), posixpath.dirname(source), page)
        files.append(File.generated(config, page, content=text))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    pages = {"gallery.md": gallery.page()}
    pages |= {f"examples/{name}.md": gallery.page_of(name) for name in gallery.examples()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    font = math_font()
    files.append(File.generated(config, f"css/{font.name}", abs_src_path=str(font)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links to documents of the root, list members, and lead to the notebook."""
    name = f"{posixpath.basename(page.file.src_uri).removesuffix('.md')}.ipynb"
    if page.file.src_uri.startswith("tutorials/") and (ROOT / "notebooks" / name).exists():
        title, rest = markdown.split("\n", 1)
        ways = [f"[This page as a notebook](../notebooks/{name})", *colab(config.repo_url, name)]
        markdown = f"{title}\n\n*{' · '.join(ways)}*\n{rest}"
    home = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    generated = page.file.src_uri in PAGES.values()
    return expanded(markdown if generated else linked(markdown, home.rstrip("/")))


def on_page_content(html, page, config, files):
    """Typeset formulas, take pictures into the page, and hide an empty table of contents."""
    if not any(entry.children for entry in page.toc):
        page.meta.setdefault("hide", []).append("toc")
    return svg.inlined(typeset(html), ROOT / "docs" / posixpath.dirname(page.file.src_uri))


def on_post_build(config):
    """Refuse a site that leaves out a public name or needs the network."""
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    pages = {str(p.relative_to(site)): p.read_text("utf-8") for p in site.rglob("*.html")}
    if names := missing(pages):
        raise PluginError(f"no entry in docs/reference for: {', '.join(names)}")
    if tags := loads(pages):
        raise PluginError("the site must not load from the network: " + "; ".join(tags))
