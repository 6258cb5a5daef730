"""Look-up in a trained table: a matrix product with one-hot rows."""

from __future__ import annotations

import string
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import error, type_error, value_error
from ..program import is_inexact
from ._contraction import Contraction
from ._operator import ETPPrimitive, Rules, Shape, Shapes, Weights
from ._twin import twins
from ._units import AnyArray, Hook, Operand, UnitArray, attach, expect_axes, hooked, operand


def row_rules(look_up: Callable[..., Array], one_hot: Callable[..., Array]) -> Rules:
    """The rules of `look_up(x, table)`: a product of `one_hot(x, table)` with the table.

    Their input is indices, or their one-hot rows (perhaps filtered in time).
    """

    # Row i of a table (rows, features) is one_hot(i) @ table, "y,yA->A"; of (batch,) indices it is
    # "ay,yA->aA". So dy/dtable in coordinates of the trace is the one-hot row, as x is of `x @ W`.
    def form(rows: Array, table: Array | Shape) -> Contraction:
        lead, row = string.ascii_lowercase[: rows.ndim - 1], string.ascii_uppercase
        rest = row[: len(table.shape) - 1]
        return Contraction(f"{lead}y", f"y{rest}", f"{lead}{rest}")

    def represent(x: Array, shapes: Shapes, **static: object) -> Array:
        return one_hot(x, shapes["weight"], **static)

    def linear(x: Array, weights: Weights, **static: object) -> Array:
        table = weights["weight"]
        return (
            form(x, table).apply(x, table) if is_inexact(x.dtype) else look_up(x, table, **static)
        )

    def features(x: Array, shapes: Shapes, **static: object) -> Weights:
        rows = x if is_inexact(x.dtype) else represent(x, shapes, **static)
        return {"weight": form(rows, shapes["weight"]).features(rows)}

    return Rules(linear=linear, features=features, represent=represent)


def _rows(x: Array, weight: Array) -> Array:
    return jnp.take(weight, jnp.clip(x, 0, weight.shape[0] - 1), axis=0, mode="clip")


def _one_hot(x: Array, table: Shape) -> Array:
    return jax.nn.one_hot(jnp.clip(x, 0, table.shape[0] - 1), table.shape[0], dtype=table.dtype)


_RULES = row_rules(_rows, _one_hot)
etp_emb, etp_emb_v = twins(
    ETPPrimitive("etp_emb", _rows, rules=_RULES), ETPPrimitive("etp_emb_v", _rows, rules=_RULES)
)


def embedding(indices: AnyArray, weight: AnyArray, *, weight_fn: Hook = None) -> UnitArray:
    """Look up rows of a trained table.

    Indices outside the table are an error where they have values; inside `jit` they are
    clipped to the first and last row.

    Args:
        indices: one integer, or integers of shape (batch,).
        weight: table of shape (rows, features).
        weight_fn: differentiable function of the table without its unit.

    Returns:
        The rows, of shape (features,) or (batch, features), in the table's unit.

    Raises:
        TypeError: if the indices are not integers.
        NotImplementedError: if the indices have two axes or more.
        ValueError: if the table is no matrix, or an index is outside it.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.embedding(jnp.array([2, 0]), jnp.eye(3)).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    op = "embedding"
    i = operand(op, "indices", indices)
    table = hooked(op, "weight", weight, "weight_fn", weight_fn)
    if not jnp.issubdtype(i.value.dtype, jnp.integer):
        raise type_error(
            f"{op}: indices are {i.value.dtype}.",
            why="rows of the table are counted by integers.",
            do="convert them with .astype(int), or multiply by a one-hot array with matmul.",
        )
    if i.ndim > 1:
        raise error(NotImplementedError)(
            f"{op}: {i} has {i.ndim} axes.",
            why="the indices are one integer or (batch,), so that every trace has its batch.",
            do="reshape the indices into one axis and the result back.",
        )
    why = "the table is (rows, features)."
    expect_axes(op, table, (2,), why=why, do="reshape it to two axes.")
    _check_range(i, table.shape[0])
    return attach((etp_emb if i.ndim else etp_emb_v).bind(i.value, table.value), table.unit)


def _check_range(indices: Operand, rows: int) -> None:
    try:
        values = np.asarray(indices.value)
    except jax.errors.TracerArrayConversionError:
        return
    bad = values[(values < 0) | (values >= rows)]
    if bad.size:
        raise value_error(
            f"embedding: index {int(bad.flat[0])} is outside the table's {rows} rows.",
            why="rows are counted from 0, and negative indices do not count from the end.",
            do=f"keep the indices between 0 and {rows - 1}.",
        )
