"""Break the library at random places, and count how many of the breaks `make test` notices.

A mutant is one change of an expression or a statement of `graph`, `rules` or `engine`: another
comparison, operator, constant or branch, a value that is not returned, a statement left out. It
runs with the tests of its room first and then with those of its neighbours, until one fails:

    python benchmarks/mutants.py --count 60 --minutes 9

Results are added to `benchmarks/results/mutants.jsonl`; the same seed goes on where it stopped. A
mutant that no test has noticed within `--seconds` of processor time is listed as a survivor.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("graph", "rules", "engine")
# The folders of tests, in this order, for a change in a room.
TESTS = {
    "graph": ("graph", "zoo", "truth", "online", "limits", "learner"),
    "rules": ("rules", "truth", "online", "learner", "zoo"),
    "engine": ("engine", "online", "learner", "truth", "zoo", "kernel"),
}
TIME = "survived the time"
OUTCOMES = {0: "survived all", -signal.SIGXCPU: TIME, -signal.SIGKILL: TIME}
COMPARED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
COMPUTED = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.MatMult: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    """Characters `start` to `stop` of a file, and what stands there instead."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        short = lambda text: " ".join(text.split())[:60]
        return f"{self.file}:{self.line}: {short(self.before)} -> {short(self.after)}"


def changed(node: ast.AST) -> ast.AST | None:
    """The node with its change, or None where there is none."""
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=others):
            return ast.Compare(left, [COMPARED[type(op)](), *ops], others)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            return ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(test, orelse, body)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
        case ast.Continue():
            return ast.Break()
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            return ast.Pass()
    return None


def inspected(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that run: no annotations, decorators, messages of errors or texts, nor
    `strict=True`, which only looks for mistakes."""
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from inspected(child)


def mutants(file: Path) -> list[Mutant]:
    """All changes of a file."""
    text = file.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    place = lambda line, column: begins[line - 1] + len(lines[line - 1].encode()[:column].decode())
    found = []
    for node in inspected(ast.parse(text)):
        new = changed(node)
        if new is None:
            continue
        start = place(node.lineno, node.col_offset)
        stop = place(node.end_lineno, node.end_col_offset)
        after = ast.unparse(ast.fix_missing_locations(new))
        after = f"({after})" if isinstance(new, ast.expr) else after
        name = file.relative_to(ROOT).as_posix()
        found.append(Mutant(name, node.lineno, start, stop, text[start:stop], after))
    return found


def drawn(seed: int, rooms: tuple[str, ...]) -> list[Mutant]:
    """All mutants of these rooms in the order that the seed gives."""
    files = [f for room in rooms for f in sorted((ROOT / "src/braintrace" / room).glob("*.py"))]
    found = [mutant for file in files for mutant in mutants(file)]
    random.Random(seed).shuffle(found)
    return found


def judged(mutant: Mutant, seconds: int) -> dict:
    """Whether a test fails with it, which one, and after how long."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src")
        file = Path(folder) / mutant.file
        text = file.read_text("utf-8")
        file.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :], "utf-8")
        tests = [f"tests/{name}" for name in TESTS[file.parent.name]]
        options = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider")
        env = os.environ | {"PYTHONPATH": f"{folder}/src", "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        command = [
            "sh",
            "-c",
            f'ulimit -t {seconds}; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "pytest",
        ]
        done = subprocess.run(
            [*command, *options, *tests], cwd=ROOT, env=env, capture_output=True, text=True
        )
    out = done.stdout + done.stderr
    killer = [x for x in out.splitlines() if x.startswith(("FAILED", "ERROR", "ImportError"))]
    return {
        "mutant": str(mutant),
        "outcome": "killed" if killer else OUTCOMES.get(done.returncode, "killed"),
        "by": killer[0][:150] if killer else out[-150:],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="mutants in all (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--seconds", type=int, default=100, help="of a mutant (100)")
    parser.add_argument("--minutes", type=float, default=600, help="no new one afterwards")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", default=str(ROOT / "benchmarks/results/mutants.jsonl"))
    given = parser.parse_args()
    results = Path(given.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(x) for x in results.read_text().splitlines()] if results.exists() else []
    known, end = {row["mutant"] for row in rows}, time.monotonic() + 60 * given.minutes
    chosen = drawn(given.seed, tuple(given.rooms))[: given.count]

    def run(mutant: Mutant) -> None:
        if str(mutant) in known or time.monotonic() > end:
            return
        row = judged(mutant, given.seconds)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['outcome']}, {row['seconds']} s: {row['mutant']}\n    {row['by']}", flush=True)

    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(run, chosen))
    rows = [json.loads(x) for x in results.read_text().splitlines()]
    print(dict(Counter(row["outcome"] for row in rows)))


if __name__ == "__main__":
    main()
