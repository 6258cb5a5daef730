"""docs/cells.md is what the code does; every row is also the test of a cell's gradients."""

import inspect
import os
from pathlib import Path

import brainstate
import pytest
from registry import ENTRIES
from table import TIGHT, cosine, error, measured, page, row

from braintrace import nn
from braintrace.verify._compare import comparison

PAGE = Path(__file__).parents[2] / "docs" / "cells.md"
MODULE = brainstate.nn.Module
EXPORTED = [
    name
    for name, value in vars(nn).items()
    if not name.startswith("_")
    and inspect.isclass(value)
    and issubclass(value, MODULE)
    and value.update is not MODULE.update
    and value is not nn.SpikingCell  # a base to build on
]
EXACT = """
    Linear LeakyRateReadout FilteredReadout MinGRUCell MinLSTMCell LRUCell RTUCell RGLRUCell S5Cell
    LIFCell(recurrent=False) LeakySpikeReadout SigmaDeltaCell DelayedLinear
    DelayedLIFCell(recurrent=False)
""".split()


def rows() -> dict[str, str]:
    """The rows of the page by the name of the cell."""
    lines = PAGE.read_text("utf-8").splitlines()
    return {text.split("`")[1]: text for text in lines if text.startswith("| `")}


def test_every_layer_has_an_entry():
    missing = set(EXPORTED) ^ {name.split("(")[0] for name in ENTRIES}
    assert not missing, f"add to (or take from) tests/nn/registry.py: {sorted(missing)}"


@pytest.mark.parametrize("name", ENTRIES)
def test_row_is_what_is_measured(name):
    found = measured(name)
    assert error(found) < TIGHT
    assert all(p.operators for p in found.parameters.values())  # none reaches a state unseen
    kept = [path for path, p in found.parameters.items() if p.exact]
    exact = comparison(*({p: g[p] for p in kept} for g in (found.d_rtrl, found.bptt)))
    assert exact.max_error < TIGHT, exact
    if found.rtrl is not None:  # what is left out matters here: the certificate is not idle
        assert cosine(found.d_rtrl, found.bptt) < 1 - 1e-6
    if not os.environ.get("BRAINTRACE_WRITE"):
        assert rows().get(name) == row(name), "BRAINTRACE_WRITE=1 writes the page anew"


def test_page_has_these_rows_in_this_order():
    if os.environ.get("BRAINTRACE_WRITE"):
        PAGE.write_text(page(row(name) for name in ENTRIES), "utf-8")
    found = rows()
    assert PAGE.read_text("utf-8") == page(found.values())
    assert list(found) == list(ENTRIES)


@pytest.mark.parametrize("name", EXACT)
def test_element_wise_cells_are_exact(name):
    assert all(p.exact for p in measured(name).parameters.values())


def test_reset_gate_after_the_product_has_a_trace():
    how = {
        name: {path[0]: p.how for path, p in measured(name).parameters.items()}
        for name in ("GRUCell", "GRUResetAfterCell")
    }
    assert how["GRUCell"]["Wr"] == "within-step"
    assert set(how["GRUResetAfterCell"].values()) == {"trace"}
