"""A drawing as a web page of its own, and as a file."""

from __future__ import annotations

import os
from pathlib import Path

from .._errors import error
from ._picture import Picture
from ._svg import fragment

# The browser is told to load nothing: what is not in the page is not there.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(picture: Picture) -> str:
    """A page that needs nothing besides itself."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="color-scheme" content="light dark">
<title>braintrace: the compiled graph</title>
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
    if target.is_dir():
        raise error(IsADirectoryError)(
            f"{target} is a folder.", why="a page is one file", do="name a file in it"
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, "utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
