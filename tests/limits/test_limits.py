"""Every limit behaves as `docs/limits.md` says. `BRAINTRACE_WRITE=1` regenerates the page."""

import contextlib
import functools
import io
import os
import re
import textwrap
from pathlib import Path

import pytest

from .records import PREAMBLE, SECTIONS, Limit

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
LIMITS = [limit for _, limits in SECTIONS.values() for limit in limits]


@functools.cache
def namespace() -> dict:
    names = {"__name__": "model"}
    exec(compile(PREAMBLE.strip(), "preamble.py", "exec"), names)
    return names


@functools.cache
def outcome(code: str) -> tuple[bool, str]:
    """Whether it raised, and the error or what was printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "model.py", "exec"), dict(namespace()))
    except Exception as error:
        return True, f"{type(error).__name__}: {error}"
    return False, printed.getvalue().rstrip()


def folded(line: str) -> str:
    """The line wrapped at 90 characters, with an indent for continuation lines."""
    start = re.match(r"  (where|why|do): +| *", line)[0]
    indent = " " * (len(start) if start.strip() else len(start) + 4)
    return textwrap.fill(line, 90, subsequent_indent=indent, break_on_hyphens=False)


def example(code: str) -> str:
    shown = "\n".join(map(folded, outcome(code)[1].splitlines()))
    return f"<!-- no-run -->\n```python\n{code}\n```\n\n```text\n{shown}\n```\n"


def entry(limit: Limit) -> str:
    instead = [example(limit.instead)] if limit.instead else []
    do = textwrap.fill(limit.do, 100, break_on_hyphens=False) + "\n"
    return "\n".join([f"### {limit.title}\n", example(limit.code), do, *instead])


def row(limit: Limit, outcome: str) -> str:
    """A row of the table: the limit as a link, what happens, the first sentence of what to do."""
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", limit.title).strip().lower())
    return f"| [{limit.title}](#{anchor}) | {outcome} | {re.split(r'(?<=[.]) ', limit.do)[0]} |"


def page() -> str:
    rows = [row(limit, name.lower()) for name, (_, limits) in SECTIONS.items() for limit in limits]
    parts = [HEAD.format(rows="\n".join(rows), preamble=PREAMBLE.strip())]
    for name, (about, limits) in SECTIONS.items():
        parts += [f"## {name}\n", textwrap.fill(about, 100) + "\n", *map(entry, limits)]
    return "\n".join(parts)


HEAD = """\
# Limits

What the library does not support. *Refused*: the compiler raises an error that says where, why, and
what to do. *Left out*: the model compiles, and the report lists the paths missing from the
gradient. Every limit links to a short program with its outcome; the tests run all of them.

| limit | outcome | in short |
|---|---|---|
{rows}

## The model of the examples

All programs below use this small model; `certify` prints the certificate of a parameter.

<!-- no-run -->
```python
{preamble}
```
"""


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.title)
def test_limit_is_refused_or_left_out_as_recorded(limit):
    raised, text = outcome(limit.code)
    assert raised == limit.raises, text
    assert text
    if raised:
        assert "why:" in text and "do:" in text, text


FIXED = [limit for limit in LIMITS if limit.instead]


@pytest.mark.parametrize("limit", FIXED, ids=lambda limit: limit.title)
def test_what_to_do_instead_is_exact(limit):
    raised, text = outcome(limit.instead)
    assert not raised and text.endswith("; exact"), text


def test_page_matches_outcomes():
    text = page()
    if os.environ.get("BRAINTRACE_WRITE") == "1":
        PAGE.write_text(text, "utf-8")
    assert PAGE.read_text("utf-8") == text, (
        "docs/limits.md is outdated: BRAINTRACE_WRITE=1 regenerates it"
    )
