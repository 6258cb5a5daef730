"""Cells of `braintrace.nn` under rules, as compiled learners; all: benchmarks/export.py --check."""

import numpy as np
import pytest
from cells import CASES, Cell
from compiled import needs


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_200_updates_of_a_cell_in_c_are_those_in_jax(name, rule, tmp_path):
    cell = Cell(name, rule, tmp_path, 200, np.float64)
    assert cell.errors_after_updates("gcc") < 1e-10
    sizes = cell.done.sizes
    assert sizes.scratch <= 1.5 * sizes.live


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_each_step_of_a_cell_in_float_is_that_of_jax(name, rule, tmp_path):
    needs("clang")
    cell = Cell(name, rule, tmp_path, 20, np.float32)
    assert cell.error_of_steps("clang") < 1e-5
