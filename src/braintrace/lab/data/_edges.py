"""Edge lists of connectomes: who sends to whom, how strongly, and how late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._errors import error, value_error
from ._files import Name, existing, layout_error, regular

_KINDS = (".csv", ".parquet", ".npz")


def read_edges(path: Name) -> dict[str, np.ndarray]:
    """Read an edge list: columns pre, post and weight, perhaps delay, from CSV, Parquet or npz.

    Args:
        path: the file. Identifiers of neurons are integers of any size, delays whole steps.

    Returns:
        `pre` and `post`, the neurons as numbers from 0 in the order of their identifiers; `id`, the
        identifier of each; `weight`; and `delay`, if the file has it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column or an entry is missing, or is no number of its kind.
        ImportError: Parquet without pyarrow.

    Example:
        >>> import pathlib, tempfile, braintrace
        >>> path = pathlib.Path(tempfile.mkdtemp(), "edges.csv")
        >>> _ = path.write_text("pre,post,weight,delay\\n720,31,0.5,2\\n5,720,-2,1\\n")
        >>> edges = braintrace.data.read_edges(path)
        >>> edges["pre"].tolist(), edges["post"].tolist(), edges["id"].tolist()
        ([2, 0], [1, 2], [5, 31, 720])
        >>> braintrace.data.edge_matrix(edges).shape
        (6, 3)
    """
    path = existing(path, "an edge list")
    regular(path)
    table = _table(path)
    if missing := sorted({"pre", "post", "weight"} - table.keys()):
        why = f"the columns are {', '.join(sorted(table)) or 'none'}"
        raise layout_error(path, f"there is no column {', '.join(missing)}.", why)
    lengths = {len(column) for column in table.values()}
    if len(lengths) != 1 or not len(table["pre"]):
        why = "every column has one entry per edge, and there is one edge at least"
        raise layout_error(path, f"columns have {sorted(lengths)} entries.", why)
    for name in [n for n in ("pre", "post", "delay") if n in table]:
        if table[name].dtype.kind not in "iu" or np.ma.is_masked(table[name]):
            why = "it counts neurons or steps"
            what = f"column {name} has an entry that is missing or no integer."
            raise layout_error(path, what, why)
    weight = _numbers(path, table["weight"])
    ids, ends = np.unique(np.concatenate([table["pre"], table["post"]]), return_inverse=True)
    pre, post = np.split(ends.reshape(-1).astype(np.int32), 2)
    out = {"pre": pre, "post": post, "id": np.asarray(ids), "weight": weight}
    if "delay" in table:
        out["delay"] = np.asarray(table["delay"], int)
        if out["delay"].min() < 1:
            raise layout_error(path, "a delay is less than one step.", "a spike takes one step")
    return out


def edge_matrix(edges: Mapping[str, Any]) -> Any:
    """The weights of an edge list as a sparse matrix, from senders to receivers.

    Args:
        edges: columns as of `read_edges`; edges between the same neurons stay apart.

    Returns:
        A `scipy.sparse.coo_array` of shape (neurons, neurons), `spikes @ matrix` is what arrives.
        With delays (delays * neurons, neurons): the spikes of the last step first, then those of
        the step before, as a layer such as `nn.SparseLinear` takes them from a buffer.
    """
    from scipy.sparse import coo_array

    pre, post, weight = (np.asarray(edges[k]) for k in ("pre", "post", "weight"))
    n = len(edges["id"]) if "id" in edges else 1 + int(max(pre.max(), post.max()))
    delay = np.asarray(edges.get("delay", np.ones_like(pre)))
    if len({len(a) for a in (pre, post, weight, delay)}) != 1:
        raise value_error(
            "columns of an edge list have different lengths.",
            why="every column has one entry per edge",
            do="pass the columns of one table, as read_edges returns them",
        )
    rows = pre.astype(np.int64) + (delay - 1) * n
    order = np.lexsort((pre, delay))  # by row: products are faster
    return coo_array((weight[order], (rows[order], post[order])), (int(delay.max()) * n, n))


def _table(path: Path) -> dict[str, Any]:
    """The columns of a file."""
    kind = path.suffix.lower()
    if kind == ".npz":
        with np.load(path) as arrays:
            return {name: np.ma.asarray(arrays[name]) for name in arrays.files}
    if kind == ".csv":
        how: dict[str, Any] = {"delimiter": ",", "names": True, "dtype": None}
        try:
            rows = np.genfromtxt(path, usemask=True, encoding="utf-8", **how)
        except ValueError as cause:
            raise layout_error(
                path, "this is no table of edges.", str(cause).split("\n")[0]
            ) from cause
        return {name: np.ma.atleast_1d(rows[name]) for name in rows.dtype.names or ()}
    if kind == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as cause:
            raise error(ImportError)(
                "a Parquet file without pyarrow.",
                where=str(path),
                why="it reads the columns",
                do="pip install pyarrow, or save the edges as npz",
            ) from cause
        columns = pyarrow.parquet.read_table(path)
        return {name: np.ma.asarray(columns[name].to_numpy()) for name in columns.column_names}
    raise value_error(
        f"an edge list named {path.name}.",
        why=f"its kind is known from the end of its name: {', '.join(_KINDS)}",
        do="save it as one of them",
    )


def _numbers(path: Path, column: Any) -> np.ndarray:
    """The weights of all edges."""
    try:
        weight = np.ma.filled(column.astype(float), np.nan)
    except ValueError as cause:
        raise layout_error(path, "a weight is no number.", str(cause)) from cause
    if not np.isfinite(weight).all():
        first = int(np.argmin(np.isfinite(weight)))
        raise layout_error(path, f"edge {first} has no finite weight.", "it is trained from there")
    return weight
