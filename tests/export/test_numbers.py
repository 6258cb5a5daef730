"""The numbers of the page are those that the benchmark recorded."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs" / "results" / "export.json").read_text("utf-8"))["rows"]


def test_table_of_the_page_is_the_record():
    spec = spec_from_file_location("export_benchmark", ROOT / "benchmarks" / "export.py")
    benchmark = module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = (ROOT / "docs" / "how-to" / "export.md").read_text("utf-8")
    assert benchmark.table(ROWS) in page


def test_recorded_update_takes_a_third_of_the_jitted_call():
    assert len(ROWS) == 3 and all(row["ratio"] <= 1 / 3 for row in ROWS)
