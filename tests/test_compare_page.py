"""The pages of the comparison show the kept records, and records of jobs become one."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("compare", "_compare_page"):
        sys.modules.pop(name, None)


def test_tables_of_the_pages_are_those_of_the_records():
    from _compare_page import MARKED, Records, page_with, pages

    tables = Records(ROOT / "docs" / "results").tables()
    shown = set()
    for path in pages(ROOT / "docs"):
        page = path.read_text("utf-8")
        shown |= {found[1] for found in MARKED.findall(page)}
        assert page_with(page, tables) == page, "run `python benchmarks/compare.py --write`"
    assert shown == set(tables)


def test_the_page_of_conclusions_is_short():
    assert len((ROOT / "docs" / "compare.md").read_text("utf-8").split()) <= 2500


def test_every_part_has_its_records():
    from compare import PARTS, RESULTS

    seconds = json.loads((RESULTS / "seconds.json").read_text("utf-8"))
    assert set(seconds) == set(PARTS)
    for name, part in PARTS.items():
        for task in part.tasks:
            path = RESULTS / name / f"compare_{task.rpartition(':')[2]}.json"
            assert json.loads(path.read_text("utf-8"))["sources"]


def test_jobs_of_a_table_become_one_record(tmp_path):
    from compare import RESULTS, jobs_of, keep

    from braintrace import CompareResult

    (job,) = jobs_of(["example"], tmp_path, quick=False)
    kept = RESULTS / "example" / "compare_Sign.json"
    whole, jobs = CompareResult.load(kept), []
    for n, rows in enumerate((whole.rows[3:], whole.rows[:3])):
        part = CompareResult.load(kept)
        part.rows = rows
        jobs.append(type(job)(job.part, job.task, "", job.optimizers, tmp_path / str(n), False))
        part.save(jobs[-1].record)
        jobs[-1].seconds.write_text("2.5\n")
    keep("example", jobs, tmp_path)
    found = CompareResult.load(tmp_path / "example" / "compare_Sign.json")
    assert found.rows == whole.rows and found.table() == whole.table()
    sources = json.loads((tmp_path / "example" / "compare_Sign.json").read_text())["sources"]
    assert [set(source) for source in sources] == [{"versions", "machine"}]
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"example": 5}


def test_times_of_a_table_come_from_one_job(tmp_path):
    from compare import RESULTS, jobs_of, keep

    from braintrace import CompareResult

    scores, *_, times = jobs_of(["digits"], tmp_path, quick=False)
    assert times.times and not scores.times
    kept = CompareResult.load(RESULTS / "digits" / "compare_digits.json")
    kept.save(scores.record)
    for row in kept.rows:
        row.milliseconds = 7.0
    kept.rows = kept.rows[:2]
    kept.save(times.record)
    for job in (scores, times):
        job.seconds.write_text("1\n")
    keep("digits", [scores, times], tmp_path)
    rows = CompareResult.load(tmp_path / "digits" / "compare_digits.json").rows
    assert [row.milliseconds for row in rows[:2]] == [7.0, 7.0]
    assert all(row.milliseconds != row.milliseconds for row in rows[2:])


def test_streams_are_counted_by_the_spread_of_seeds():
    from _compare_page import _better
    from compare import RESULTS

    from braintrace import CompareResult

    result = CompareResult.load(RESULTS / "streams-gru" / "compare_electricity.json")
    assert _better(result, "rtrl", "no_trace") == 1 == -_better(result, "no_trace", "rtrl")
    assert _better(result, "rtrl", "rolling:window=8") == 0
