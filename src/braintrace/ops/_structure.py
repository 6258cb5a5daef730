"""Where the non-zeros of a sparse matrix are, from any of the usual formats."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._errors import type_error


class Structure:
    """Row and column of every non-zero, in the order of the matrix's own data vector.

    Static and compared by content, so it can be a parameter of a compiled program. Entries that
    only pad the data vector have a row outside the matrix and column 0.
    """

    __slots__ = ("_hash", "_key", "cols", "rows", "shape")

    def __init__(self, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]):
        padding = (rows < 0) | (rows >= shape[0]) | (cols < 0) | (cols >= shape[1])
        self.rows = np.where(padding, shape[0], rows).astype(np.int32)
        self.cols = np.where(padding, 0, cols).astype(np.int32)
        self.shape = shape
        self._key = (shape, self.rows.tobytes(), self.cols.tobytes())
        self._hash = hash(self._key)

    @property
    def size(self) -> int:
        """Length of the data vector."""
        return len(self.rows)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Structure) and self._hash == other._hash and self._key == other._key
        )

    def __repr__(self) -> str:
        return f"Structure(shape={self.shape}, size={self.size})"


def structure_of(matrix: Any) -> Structure:
    """Read the structure of a CSR, CSC, COO, BCOO, BCSR or scipy.sparse matrix.

    Formats are recognised by their attributes: no sparse library is needed to import this one.
    """
    if isinstance(matrix, Structure):
        return matrix
    shape: tuple = getattr(matrix, "shape", ())
    if len(shape) != 2 or getattr(matrix, "n_batch", None) or getattr(matrix, "n_dense", None):
        raise _refuse(matrix, "it is not a plain matrix of two axes.")
    try:
        rows, cols = _positions(matrix)
    except jax.errors.TracerArrayConversionError as error:
        raise _refuse(matrix, "its indices are not known when the model is traced.") from error
    return Structure(rows, cols, (int(shape[0]), int(shape[1])))


def _positions(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    names = {c.__name__ for c in type(matrix).__mro__}
    has = lambda *attributes: all(hasattr(matrix, a) for a in attributes)
    if has("indices", "indptr") and not has("blocksize"):
        minor = np.asarray(matrix.indices)
        major = _expand(np.asarray(matrix.indptr), len(minor))
        by_column = getattr(matrix, "format", None) == "csc" or "CSC" in names
        return (minor, major) if by_column else (major, minor)
    if "BCOO" in names:
        indices = np.asarray(matrix.indices)
        return indices[:, 0], indices[:, 1]
    if has("row", "col"):
        return np.asarray(matrix.row), np.asarray(matrix.col)
    if has("tocoo"):
        coo = matrix.tocoo()
        return np.asarray(coo.row), np.asarray(coo.col)
    raise _refuse(matrix, "its row and column indices cannot be read.")


def _expand(pointers: np.ndarray, size: int) -> np.ndarray:
    # What lies behind the last pointer is padding: no row of the matrix.
    major = np.full(size, -1, np.int64)
    major[: pointers[-1]] = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
    return major


def _refuse(matrix: object, why: str) -> TypeError:
    return type_error(
        f"sparse_matmul: cannot use a {type(matrix).__name__} as sparse_mat.",
        why=why,
        do="pass a CSR, CSC, COO, BCOO, BCSR or scipy.sparse matrix with concrete indices.",
    )
