"""Which cases run: `make test` takes some of every test, CI most, `make test-all` all of them.

`costs.json` has the processor time of a case of each test, as `make costs` recorded it. A test may
take so many seconds of cases, one at least; those are taken first whose parameters no case has had
yet. A parameter that several tests share is a model, a rule or the like, and is in a case at least.
Cases of more than a second (documents, commands, other processes) are left to CI, unless their file
is named.
"""

import json
import os
import sys
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
LONG, LONG_SHARED = 1.0, 2.5  # seconds of a case, and of a fixture that several cases share
LEVELS = {"some": 0.1, "most": 2.5, "all": float("inf")}  # seconds of a test
LEVEL = os.environ.get("BRAINTRACE_TESTS", "some")
ALL = LEVEL == "all"
UNKNOWN = 0.25  # of a test that is not recorded


def examples(count: int) -> int:
    """How many random cases a test draws: a quarter, or all."""
    return count if ALL else -(-count // 4)


@cache
def costs() -> dict[str, dict[str, float]]:
    return json.loads((HERE / "costs.json").read_text("utf-8"))


def home(item) -> str:
    return item.path.relative_to(HERE).as_posix()


def cost(item) -> float:
    return costs().get(home(item), {}).get(item.originalname, UNKNOWN)


def shared(fixture) -> bool:
    """Whether a fixture of a file serves several of its cases."""
    return fixture.scope == "module" and fixture.baseid.endswith(".py")


def fixture_name(fixture) -> str:
    return f"{fixture.baseid}::fixture {fixture.argname}"


def is_long(item) -> bool:
    """Whether a case takes long, or a fixture that it needs."""
    found = [defs[-1] for defs in item._fixtureinfo.name2fixturedefs.values() if defs]
    own = costs().get(home(item), {})
    needed = [own.get(f"fixture {f.argname}", 0) for f in found if shared(f)]
    return cost(item) > LONG or any(seconds > LONG_SHARED for seconds in needed)


def values(item) -> set[str]:
    """The parameters of a case, which are names of models, rules and the like."""
    return {*item.name[len(item.originalname) :].strip("[]").split("-")}


def kept(items: list, named: bool) -> list:
    """The cases to run, in their order; those of files that are named as in CI."""
    level = "most" if named and LEVEL == "some" else LEVEL
    if level == "some":
        items = [item for item in items if not is_long(item)]
    tests: dict[tuple[str, str], list] = {}
    for item in items:
        tests.setdefault((home(item), item.originalname), []).append(item)
    seen: set[str] = set()
    chosen: set = set()
    for (_, name), cases in tests.items():
        count = max(1, int(min(LEVELS[level] / max(cost(cases[0]), 1e-3), len(cases))))
        found = _spread(cases, count, seen, zlib.crc32(name.encode()))
        chosen.update(found)
    used = Counter(value for cases in tests.values() for value in set().union(*map(values, cases)))
    shared = {value for value, tests_of in used.items() if tests_of > 1}
    left = [item for item in items if item not in chosen and item.path.parent != HERE]
    for item in sorted(left, key=cost):  # stable: the same every time
        if not values(item) & shared <= seen:
            seen |= values(item)
            chosen.add(item)
    return [item for item in items if item in chosen]


def _spread(cases: list, count: int, seen: set, start: int) -> list:
    """So many cases, those with new parameters first; different tests begin at different ones."""
    if count == len(cases):
        seen.update(*map(values, cases))
        return cases
    start %= len(cases)
    left, found = cases[start:] + cases[:start], []
    for _ in range(count):
        best = max(left, key=lambda item: len(values(item) - seen))  # the first of the best
        left.remove(best)
        found.append(best)
        seen |= values(best)
    return found


def ordered(items: list) -> list:
    """Quick files first, so that `-x` stops soon; of two processes each begins with its half of the
    list, and with the files that have a long case, so that both end together."""
    files: dict[Path, list] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    found = sorted(files.values(), key=lambda cases: max(map(cost, cases)))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return [item for cases in found for item in cases]
    halves: tuple[list, list] = ([], [])
    for cases in reversed(found):
        min(halves, key=len).extend(cases)
    return halves[0] + halves[1]


def record(files: list[str]) -> None:
    """Write `costs.json` from what `conftest.py` wrote: means over cases; other tests stay."""
    spent: dict[tuple[str, str], list[float]] = {}
    for row in (json.loads(x) for file in files for x in Path(file).read_text().splitlines()):
        name, seconds = row
        file, _, test = name.removeprefix("tests/").partition("::")
        spent.setdefault((file, test.partition("[")[0]), []).append(seconds)
    found = costs() if (HERE / "costs.json").exists() else {}
    for (file, test), seconds in spent.items():
        found.setdefault(file, {})[test] = round(sum(seconds) / len(seconds), 2)
    rows = (f"{json.dumps(file)}: {json.dumps(found[file])}" for file in sorted(found))
    (HERE / "costs.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


if __name__ == "__main__":
    record(sys.argv[1:])
