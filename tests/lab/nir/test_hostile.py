"""Graphs of NIR that cannot be read end in an error, and long ones do not."""

import jax.numpy as jnp
import nir
import numpy as np
import pytest

from braintrace.lab.nir import from_nir


def graph(nodes, edges):
    """A graph whose edges are not checked by nir itself."""
    ends = {"input": nir.Input(np.array([2])), "output": nir.Output(np.array([2]))}
    made = nir.NIRGraph({**ends, "a": linear()}, [("input", "a"), ("a", "output")])
    made.nodes = {**ends, **nodes}
    made.edges = edges
    return made


def linear(value=1.0):
    return nir.Linear(np.full((2, 2), value))


def refused(made, what):
    with pytest.raises(ValueError, match=what) as error:
        from_nir(made, dt=1e-3)
    assert "why:" in str(error.value) and "do:" in str(error.value)


def test_edge_to_a_missing_node_is_named():
    for edge in (("a", "b"), ("b", "a")):
        refused(graph({"a": linear()}, [("input", "a"), ("a", "output"), edge]), "edge.*'b'")


def test_graph_that_contains_itself_is_refused():
    made = graph({"a": linear()}, [("input", "a"), ("a", "output")])
    made.nodes["b"] = made
    refused(made, "cannot be inlined")
    inner = made = graph({"a": linear()}, [("input", "a"), ("a", "output")])
    for _ in range(60):
        inner.nodes["b"] = graph({"a": linear()}, [("input", "a"), ("a", "output")])
        inner = inner.nodes["b"]
    refused(made, "cannot be inlined")


def test_weights_that_are_not_finite_are_refused():
    edges = [("input", "a"), ("a", "output")]
    refused(graph({"a": linear(np.nan)}, edges), "node 'a' .* not finite")
    bias = nir.Affine(np.ones((2, 2)), np.array([1.0, np.inf]))
    refused(graph({"a": bias}, edges), "node 'a' .* not finite")


def test_long_chain_is_read():
    names = [f"n{i}" for i in range(1500)]
    nodes = {name: linear(0.5 * (i % 2 + 0.5)) for i, name in enumerate(names)}
    edges = list(zip(["input", *names], [*names, "output"], strict=True))
    network = from_nir(graph(nodes, edges), dt=1e-3)
    assert [name for name, _ in network.order] == [*names, "output"]
    assert network.update(jnp.zeros(2)).shape == (2,)
