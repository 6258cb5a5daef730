"""The page of published names has all of them, and records show what those of the package do."""

from pathlib import Path

import jax.numpy as jnp
import pytest

import braintrace

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "published.md"
NAMES = sorted({*braintrace.__all__} - {*dir(braintrace)})


@pytest.mark.parametrize("name", NAMES)
def test_name_is_on_the_page(name):
    assert f"`{name}`" in PAGE.read_text("utf-8")


def test_attribute_that_nobody_had_is_refused():
    cell = braintrace.nn.ValinaRNNCell(2, 3)
    cell.init_state()
    graph = braintrace.compile_etrace_graph(cell, jnp.zeros(2))
    for record in (graph, graph.module_info, graph.hidden_groups[0]):
        with pytest.raises(AttributeError, match=f"'{type(record).__name__}' object has no"):
            _ = record.transition_jaxprs
        assert not hasattr(record, "__wrapped__")
