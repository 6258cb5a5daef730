"""Where the non-zeros of a sparse matrix are, from any of the usual formats."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import type_error

Indices = tuple[jax.Array, jax.Array, jax.Array]  # rows, columns, where rows start
_arguments: ContextVar[dict[Structure, Indices]] = ContextVar("indices that are arguments")


class Structure:
    """Row and column of every non-zero, in the order of the matrix's own data vector.

    Static and compared by content, so it can be a parameter of a compiled program. Entries that
    only pad the data vector have a row outside the matrix and column 0.
    """

    __slots__ = ("_arrays", "_key", "by_row", "cols", "is_padded", "rows", "shape", "starts")

    def __init__(self, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]):
        padding = (rows < 0) | (rows >= shape[0]) | (cols < 0) | (cols >= shape[1])
        self.rows = np.where(padding, shape[0], rows).astype(np.int32)
        self.cols = np.where(padding, 0, cols).astype(np.int32)
        self.shape = shape
        self.is_padded = bool(padding.any())
        self.by_row = not self.is_padded and bool((self.rows[1:] >= self.rows[:-1]).all())
        ends = np.arange(shape[0] + 1) if self.by_row else ()  # else nothing reads them
        self.starts = np.searchsorted(self.rows, ends).astype(np.int32)
        content = hashlib.blake2b(self.rows.tobytes())
        content.update(self.cols.tobytes())
        self._key = (shape, content.digest())
        self._arrays: Indices | None = None

    @property
    def size(self) -> int:
        """Length of the data vector."""
        return len(self.rows)

    @property
    def arguments(self) -> Indices | None:
        """These arrays as arguments of the program that is being traced, see `compiled`."""
        return in_use().get(self)

    @property
    def arrays(self) -> Indices:
        """These arrays for a program: its arguments, or else constants."""
        return self.arguments or self._made()

    def _made(self) -> Indices:
        return jnp.asarray(self.rows), jnp.asarray(self.cols), jnp.asarray(self.starts)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    def __repr__(self) -> str:
        return f"Structure(shape={self.shape}, size={self.size})"


def in_use() -> dict[Structure, Indices]:
    """The indices that are arguments of the program that is being traced."""
    return _arguments.get({})


@contextlib.contextmanager
def reading(indices: dict[Structure, Indices]) -> Iterator[None]:
    """What is traced here reads these indices.

    The backward rule of a loop's body is traced after the loop, when the arguments of the program
    around it are out of reach: it must be given the indices among what its forward pass saved.
    """
    token = _arguments.set(indices)
    try:
        yield
    finally:
        _arguments.reset(token)


def compiled(run: Callable, structures: Sequence[Structure], donate: int | None = None) -> Callable:
    """`run` under `jit`, with the indices of these structures as arguments.

    As constants they would be in the program once for every use, and constants of this size take
    longer to compile than everything else.
    """
    if not structures:
        return jax.jit(run, donate_argnums=donate)

    def placed(*args: Any) -> Any:
        *own, indices = args
        with reading(dict(zip(structures, indices, strict=True))):
            return run(*own)

    program = jax.jit(placed, donate_argnums=donate)
    return functools.wraps(run)(lambda *args: program(*args, [_on_device(s) for s in structures]))


def _on_device(structure: Structure) -> Indices:
    if structure._arrays is None:
        with jax.ensure_compile_time_eval():
            structure._arrays = structure._made()
    return structure._arrays


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
