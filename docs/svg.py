"""Figures of the documents: SVG that follows a dark page, and can be read on a phone.

What matplotlib draws in black takes the colour of the text around the picture. A file that is shown
by itself, as on GitHub, asks the system whether that is light or dark; in a page of the site the
picture is part of the page (`inlined`), and follows its switch.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

WIDTH = 5.0  # inches, 480 pixels: a column of a phone, and its letters are not made smaller
INK, PAPER = ("#000000", "#222222"), "#ffffff"
_STYLE = re.compile(r"<style[^>]*>.*?</style>", re.DOTALL)
_HEAD = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>\s*", re.DOTALL)
_ROOT = re.compile(r"<svg[^>]*>")
_BOX = re.compile(r'viewBox="0 0 (?P<width>[\d.]+) (?P<height>[\d.]+)"')
_IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<path>[^":]+\.svg)"\s*/?>')
OF_A_FILE = (
    "<style>svg{color:#1f2328;--paper:#ffffff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;--paper:#0d1117}}</style>"
)


def adaptive(figure: Any) -> str:
    """The figure as SVG text, in which black is the colour of the text and white the paper."""
    import matplotlib

    text = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": "braintrace", "font.size": 10}
    with matplotlib.rc_context(options):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    picture = _STYLE.sub("", _HEAD.sub("", text.getvalue()), count=1)
    found, box = _ROOT.search(picture), _BOX.search(picture)
    assert found and box, "matplotlib writes the box of a picture in points"
    width, height = float(box["width"]), float(box["height"])
    size = f'width="{width * 4 / 3:.0f}" height="{height * 4 / 3:.0f}"'
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" {size} fill="currentColor" '
        f'stroke-linejoin="round" font-family="system-ui, sans-serif">'
    )
    picture = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", picture[found.end() :])
    picture = re.sub(r" ?font-family: [^;\"]+;?", "", picture)
    for colour in INK:
        picture = picture.replace(colour, "currentColor")
    picture = root + OF_A_FILE + picture.replace(PAPER, "var(--paper)")
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


def write(figure: Any, path: Path) -> None:
    path.write_text(adaptive(figure), "utf-8")


def inlined(page: str, folder: Path) -> str:
    """The HTML of a page in which SVG pictures are elements and follow its colours."""

    def element(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match["path"]))  # the page's folder may not exist
        picture = path.read_text("utf-8").replace(OF_A_FILE, "")
        label = f'class="figure" role="img" aria-label="{match["alt"]}"'
        return picture.replace("<svg ", f"<svg {label} ", 1)

    return _IMAGE.sub(element, page)
