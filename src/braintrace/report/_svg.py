"""A drawing of the compiled graph as SVG, as a fragment of HTML that explains itself, as a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from .._errors import error
from .._files import replace_file
from ._layout import LINE, NARROW, WIDE, Box, Curve, Form, Layout, place
from ._picture import Picture, Standing

# The browser is told to load nothing: what is not in the page is not there.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
SEARCHABLE = 12  # parameters from which on a search box helps
# Of the rules of a mixture; apart for most eyes, on a light and on a dark page.
_RULES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b5ea7")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def fragment(picture: Picture, name: str) -> str:
    """The drawing with its legend, style and script, to put into a page as the element `name`."""
    name = escape(name)
    # All of the style is about `.braintrace-picture`; the script is a function of that element.
    style, script = _read("_picture.css"), _read("_picture.js").strip().rstrip(";")
    return "\n".join(
        [
            f'<div class="braintrace-picture" id="{name}">',
            f"<style>{style}</style>",
            *([f'<p class="title">{escape(picture.title)}</p>'] if picture.title else []),
            f'<p class="summary">{escape(picture.summary)}</p>',
            _legend(picture),
            '<input class="search" type="search" placeholder="find a parameter" '
            f'aria-label="find a parameter" hidden data-from="{SEARCHABLE}">',
            '<div class="beside">',
            '<div class="scroll" tabindex="0" role="region" aria-label="drawing of the graph">',
            svg(picture, WIDE),
            svg(picture, NARROW),
            "</div>",
            '<aside class="panel" aria-live="polite" hidden>',
            '<p class="hint">Hover over a box to see its part of the report; '
            "click or tap to pin it.</p>",
            "<pre></pre></aside>",
            "</div>",
            _in_words(picture),
            "</div>",
            f'<script>({script})(document.getElementById("{name}"));</script>',
        ]
    )


def svg(picture: Picture, form: Form) -> str:
    """The drawing alone."""
    layout = place(picture, form)
    size = f'width="{layout.width:.0f}" height="{layout.height:.0f}"'
    label = escape(picture.summary, quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{form.name}" {size} '
            f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}" role="group" '
            f'aria-label="{label}">',
            *(f'<text class="head" x="{x:.1f}" y="{y:.1f}">{t}</text>' for x, y, t in layout.heads),
            *(
                _curve(c, form.between / WIDE.between)
                for c in sorted(layout.curves, key=lambda c: not c.edge.left_out)
            ),
            *(_box(b, layout, form, _colours(picture)) for b in layout.boxes),
            "</svg>",
        ]
    )


def _colours(picture: Picture) -> dict[str, str]:
    """A colour for each rule of a mixture."""
    return {rule: _RULES[i % len(_RULES)] for i, rule in enumerate(picture.rules)}


def _box(box: Box, layout: Layout, form: Form, colours: Mapping[str, str]) -> str:
    node = box.node
    links = [c.edge for c in layout.curves if node.key in (c.edge.source, c.edge.target)]
    about = [k for link in links for k in link.parameters]
    keys = " ".join(dict.fromkeys([*([node.key] if node.standing else []), *about]))
    kind = f" {node.standing.name.lower()}" if node.standing else ""
    x = box.x + form.pad + 6
    label = escape(f"{', '.join(node.lines)}: {node.note}", quote=True)
    out = [
        f'<g class="node{kind}" tabindex="0" role="button" aria-pressed="false" '
        f'data-about="{keys}" data-words="{node.key}" aria-label="{label}">',
        f"<title>{label}</title>",
        f'<rect class="box" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="6"/>',
    ]
    if node.standing:
        out.append(
            f'<rect class="bar" x="{box.x:.1f}" y="{box.y:.1f}" width="6" '
            f'height="{box.height:.1f}" rx="3"/>'
        )
    if node.rule:
        out.append(
            f'<circle class="rule" cx="{box.x + box.width - 9:.1f}" cy="{box.y + 9:.1f}" r="4.5" '
            f'fill="{colours[node.rule]}"/>'
        )
    y = box.y + 1.5 + LINE
    for line in box.lines:
        out.append(f'<text class="line" x="{x:.1f}" y="{y:.1f}">{escape(line)}</text>')
        y += LINE
    if box.note:
        out.append(f'<text class="note" x="{x:.1f}" y="{y - 1:.1f}">{escape(box.note)}</text>')
    return "".join([*out, "</g>"])


def _curve(curve: Curve, scale: float) -> str:
    edge, (x0, y0), (x1, y1) = curve.edge, curve.start, curve.end
    out, into = (1 if curve.leaves_right else -1), (-1 if curve.enters_left else 1)
    tip = x1 + into * 7  # the line ends where the head begins
    bend = max(40.0 * scale, abs(tip - x0) / 2)
    if out == into:  # around the side of a column
        bend = (30.0 + min(abs(y1 - y0) / 8, 40.0)) * scale
    path = f"M{x0:.1f} {y0:.1f}C{x0 + out * bend:.1f} {y0:.1f} {tip + into * bend:.1f} {y1:.1f} "
    path += f"{tip:.1f} {y1:.1f}"
    head = f"M{x1:.1f} {y1:.1f}l{into * 8} -4v8z"
    kind = edge.standing.name.lower() + (" left-out" if edge.left_out else "")
    return (
        f'<g class="edge {kind}" data-about="{" ".join(edge.parameters)}">'
        f'<path class="line" d="{path}"/><path class="tip" d="{head}"/></g>'
    )


def _legend(picture: Picture) -> str:
    entries = [
        f'<li class="{s.name.lower()}"><span class="mark"></span><b>{escape(s.label)}</b> '
        f"{escape(s.meaning)}</li>"
        for s in Standing
        if picture.counts.get(s)
    ]
    entries += [
        f'<li><span style="color:{colour}">●</span> <b>{escape(rule)}</b></li>'
        for rule, colour in _colours(picture).items()
    ]
    if any(e.left_out for e in picture.edges):
        entries.append('<li class="dash"><span class="mark"></span><b>dashed</b> left out</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _in_words(picture: Picture) -> str:
    parts = [f'<pre data-of="{n.key}">{escape(n.text)}</pre>' for n in picture.nodes]
    return f"<details><summary>In words</summary>{''.join(parts)}</details>"


def page(picture: Picture) -> str:
    """A page that needs nothing besides itself."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>{escape(picture.title or "the compiled graph")} · braintrace</title>
<style>body {{ margin: 1.5rem }} @media (max-width: 600px) {{ body {{ margin: .6rem }} }}</style>
</head>
<body>
{fragment(picture, "braintrace")}
</body>
</html>
"""


def write(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all."""
    target = Path(path)
    if not target.parent.is_dir():
        raise error(FileNotFoundError)(
            f"{target} cannot be written.",
            why=f"there is no folder {target.parent}",
            do="make the folder first, or choose another path",
        )
    replace_file(target, [text.encode("utf-8", "backslashreplace")])
