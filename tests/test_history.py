"""The page of earlier measurements is what is recorded."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
history = runpy.run_path(str(ROOT / "benchmarks" / "history.py"))


def test_the_page_is_the_record():
    text = (ROOT / "docs" / "history.md").read_text("utf-8")
    assert text == history["page"](history["rows"]()), "python benchmarks/history.py writes it anew"


def test_a_run_becomes_rows_of_medians_beside_bptt(tmp_path):
    workload = {"model": "gru", "n": 4, "b": 2, "t": 8, "i": 1}
    row = lambda mode, *seconds, status="ok": {
        **dict(workload=workload, mode=mode, status=status, seconds=list(seconds))
    }
    modes = [row("ours:d_rtrl", 0.002, 0.003, 0.1), row("bptt", 0.006), row("peer:d_rtrl", 1.0)]
    (tmp_path / "r.json").write_text(json.dumps({"rows": [*modes, row("x", status="failed")]}))
    (found,) = history["measured"](tmp_path / "r.json", "m", "2026-01-01", "abc")
    assert found["workload"] == "GRU, N=4, B=2, T=8, traces kept"
    assert (found["milliseconds"], found["bptt"], found["machine"]) == ("3", "6", "m")
    assert list(found) == list(history["rows"]()[0])
