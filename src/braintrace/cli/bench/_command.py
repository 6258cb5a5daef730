"""`braintrace bench`: what it does with its options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..._errors import CompilationError, NotSupportedError
from .._missing import MissingExtra, draw_or_say
from ..commands._bench import FULL, QUICK
from ..compare._record import write
from ..compare._rules import TRUNCATED, parse
from ._figure import draw
from ._measure import Plan, Result, measure
from ._table import record, table

INTERRUPTED = 130


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what the options say; a mistake in them ends in the parser's error.

    Returns:
        The exit status.
    """
    defaults = QUICK if options.quick else FULL
    given = {k: getattr(options, k) for k in defaults if getattr(options, k) is not None}
    sizes = defaults | given
    sizes["lengths"] = tuple(sorted(set(sizes["lengths"])))
    try:
        choices = tuple(parse(options.rules, block=None))  # the library chooses
    except ValueError as error:
        parser.error(str(error))
    if any(c.name == TRUNCATED and c.window is None for c in choices):
        parser.error("tbptt needs a window: tbptt:window=16")
    try:
        result = measure(Plan(choices, **sizes, memory_limit=options.memory_limit * 2**30))
    except (CompilationError, NotSupportedError, ValueError, TypeError, MissingExtra) as error:
        print(error, file=sys.stderr)
        return 1
    _show(result, options.out)
    return 0 if result.finished else INTERRUPTED


def _show(result: Result, out: Path) -> None:
    print("\n" + table(result) + "\n")
    write(out / "bench.json", record(result))
    print(f"Record: {out / 'bench.json'}")
    draw_or_say(draw, out / "bench.png", result)
