"""What the site needs beyond its pages: the root's documents, lists of names, and a check.

The README and its like live at the root, where the forge shows them; the site has them too, with
their links turned to where the pages are. A comment `<!-- members of braintrace.nn -->` becomes
one entry per re-exported name that has none written out. After the build every public name must
have an entry, and no page may load anything from the network.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
MODULES = ("braintrace", "braintrace.nn", "braintrace.show", "braintrace.verify")

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)\s#]+)")
_MEMBERS = re.compile(r"^<!-- members of (?P<module>[\w.]+) -->$", re.MULTILINE)
_ENTRY = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)
_LOADS = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*\"")
_STYLES = re.compile(r"<link\b(?![^>]*rel=\"canonical\")[^>]*\bhref=\"(?:https?:)?//[^\"]*\"")


def linked(text: str, home: str) -> str:
    """Links of a document in folder `home` of the repository, as the site has them."""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, match["path"]))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        if inside == target:  # neither a page nor one of the root's documents
            return match["path"]
        start = home.removeprefix("docs").lstrip("/")
        return posixpath.relpath(inside, start or ".")

    return _LINK.sub(moved, text)


def exported(module: str) -> list[str]:
    """Names that a package re-exports, in the order of its file."""
    folder = ROOT / "src" / module.replace(".", "/")
    files = [folder / name for name in ("_public.py", "__init__.py")]
    tree = ast.parse(next(file for file in files if file.exists()).read_text("utf-8"))
    found = [a for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    return [a.asname for a in found if a.asname and not a.asname.startswith("_")]


def expanded(markdown: str) -> str:
    """The markdown with its lists of members written out."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    told = {name for page in pages for name in _ENTRY.findall(page.read_text("utf-8"))}

    def entries(match: re.Match[str]) -> str:
        names = [f"{match['module']}.{name}" for name in exported(match["module"])]
        return "\n\n".join(f"::: {name}" for name in names if name not in {*told, *MODULES})

    return _MEMBERS.sub(entries, markdown)


def missing(pages: dict[str, str]) -> list[str]:
    """Public names without an entry in any page, given as HTML."""
    entries = {
        m for html in pages.values() for m in re.findall(r"\bid=\"(braintrace[\w.]*)\"", html)
    }
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in exported(module)
        if f"{module}.{name}" not in {*entries, *MODULES}
    ]


def loads(pages: dict[str, str]) -> list[str]:
    """What pages would fetch from another machine, with the page's name."""
    return [
        f"{name}: {found}"
        for name, html in pages.items()
        for pattern in (_LOADS, _STYLES)
        for found in pattern.findall(html)
    ]


# --------------------------------------------------------------------------- called by mkdocs


def on_files(files, config):
    """Add the documents of the root."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = linked((ROOT / source).read_text("utf-8"), "")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links to documents of the root, and list members."""
    home = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    generated = page.file.src_uri in PAGES.values()
    return expanded(markdown if generated else linked(markdown, home.rstrip("/")))


def on_page_content(html, page, config, files):
    """Give the place of an empty table of contents to the page."""
    if not any(entry.children for entry in page.toc):
        page.meta.setdefault("hide", []).append("toc")


def on_post_build(config):
    """Refuse a site that leaves out a public name or needs the network."""
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    pages = {str(p.relative_to(site)): p.read_text("utf-8") for p in site.rglob("*.html")}
    if names := missing(pages):
        raise PluginError(f"no entry in docs/reference for: {', '.join(names)}")
    if found := loads(pages):
        raise PluginError("the site must not load from the network: " + "; ".join(found))
