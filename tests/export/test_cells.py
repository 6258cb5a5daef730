"""Cells of `braintrace.nn` under rules, as compiled learners.

All pairs: `make test-all`, and benchmarks/export.py --check, whose record is kept.
"""

import numpy as np
import pytest
from cells import ALL_RULES, CASES, ENTRIES, Cell
from compiled import needs

from thinned import ALL


def pairs(shift):
    """A fifth of them for each test: a cell with two rules or three, a rule with every fifth."""
    cells, rules = list(ENTRIES), list(ALL_RULES)
    number = lambda name, rule: cells.index(name) + rules.index(rule)
    return [pair for pair in CASES if ALL or number(*pair) % 5 == shift]


@pytest.mark.parametrize(("name", "rule"), pairs(0))
def test_200_updates_of_a_cell_in_c_are_those_in_jax(name, rule, tmp_path):
    cell = Cell(name, rule, tmp_path, 200, np.float64)
    assert cell.errors_after_updates("gcc") < 1e-10
    sizes = cell.done.sizes
    assert sizes.scratch <= 1.5 * sizes.live


@pytest.mark.parametrize(("name", "rule"), pairs(2))
def test_each_step_of_a_cell_in_float_is_that_of_jax(name, rule, tmp_path):
    needs("clang")
    cell = Cell(name, rule, tmp_path, 20, np.float32)
    assert cell.error_of_steps("clang") < 1e-5
