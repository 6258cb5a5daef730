"""Edge lists from files, and the sparse matrices they are."""

import sys

import brainstate
import numpy as np
import pytest

import braintrace
from braintrace import data

EDGES = "pre,post,weight,delay\n720,31,0.5,2\n720,720,1.5,1\n5,720,-2,3\n"


def test_edges_are_read_and_neurons_numbered(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    edges = data.read_edges(tmp_path / "e.csv")
    assert {k: v.tolist() for k, v in edges.items()} == {
        "pre": [2, 2, 0],
        "post": [1, 2, 2],
        "id": [5, 31, 720],
        "weight": [0.5, 1.5, -2],
        "delay": [2, 1, 3],
    }
    own = {k: edges[k] for k in ("pre", "post", "weight", "delay")}
    np.savez(tmp_path / "e.npz", **{**own, "pre": edges["pre"].astype(np.int64) + 10**12})
    again = data.read_edges(tmp_path / "e.npz")
    assert again["pre"].tolist() == [3, 3, 2] and again["post"].tolist() == [0, 1, 1]
    assert again["id"].tolist() == [1, 2, 10**12, 10**12 + 2]


@pytest.mark.parametrize(
    "name, text, told",
    [
        ("e.txt", EDGES, r"named e\.txt"),
        ("e.csv", EDGES.replace("weight", "size"), "no column weight"),
        ("e.csv", "pre,post,weight\n", "one edge at least"),
        ("e.csv", EDGES.replace("-2", "nan"), "edge 2 has no finite weight"),
        ("e.csv", EDGES.replace("-2", "two"), "a weight is no number"),
        ("e.csv", EDGES.replace(",1\n", ",0\n"), "less than one step"),
        ("e.csv", EDGES.replace("5,720", ",720"), "column pre has an entry that is missing"),
        ("e.csv", EDGES.replace("31", "3.5"), "column post has an entry that is missing"),
        ("e.csv", EDGES.replace("1.5", ""), "edge 1 has no finite weight"),
        ("e.csv", EDGES + "1,2\n", "no table of edges"),
    ],
)
def test_bad_edges_are_refused(tmp_path, name, text, told):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        data.read_edges(tmp_path / name)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"gone\.csv"):
        data.read_edges(tmp_path / "gone.csv")
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        data.read_edges(tmp_path / "e.parquet")


def test_the_matrix_takes_spikes_by_delay(tmp_path):
    (tmp_path / "e.csv").write_text(EDGES)
    edges = data.read_edges(tmp_path / "e.csv")
    matrix = data.edge_matrix(edges)
    dense = np.zeros((3, 3, 3))  # delay, sender, receiver
    for pre, post, weight, delay in zip(
        *(edges[k] for k in ("pre", "post", "weight", "delay")), strict=True
    ):
        dense[delay - 1, pre, post] = weight
    np.testing.assert_array_equal(matrix.toarray(), dense.reshape(9, 3))
    layer = braintrace.nn.SparseLinear(matrix)
    brainstate.nn.init_all_states(layer)
    spikes = np.arange(9.0)
    np.testing.assert_allclose(layer(spikes), spikes @ matrix.toarray())
    plain = {k: edges[k] for k in ("pre", "post", "weight")}
    assert data.edge_matrix(plain).shape == (3, 3)
    with pytest.raises(ValueError, match="different lengths"):
        data.edge_matrix({**plain, "weight": edges["weight"][:1]})
