"""The layer with trained weights at the non-zeros of a sparse matrix."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import value_error
from ..ops import sparse_matmul
from ..ops._structure import structure_of
from ._shapes import Init, Layer, Size, UnitArray, initial, over_leading


class SparseLinear(Layer):
    """A layer with a fixed sparse structure, `y = x @ S(w) + b`; absent connections stay absent.

    Args:
        spar_mat: matrix of shape (in, out): CSR, CSC or COO of brainevent or saiunit, BCOO or BCSR
            of jax, or any scipy.sparse matrix. Its numbers are the first weights; a structure that
            has a single number for all its connections trains that number.
        b_init: initialiser of the bias, or its value; None for no bias.
        in_size: size of the input, if it has axes before the last; the output keeps them.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the parameter state, a dictionary with `weight`, in the order of the matrix's own
            data vector, and perhaps `bias`.

    Raises:
        TypeError: if the matrix has another format.
        ValueError: if `in_size` does not fit the matrix.

    Example:
        >>> import jax.numpy as jnp, numpy as np, braintrace
        >>> from jax.experimental.sparse import BCOO
        >>> layer = braintrace.nn.SparseLinear(BCOO.fromdense(np.diag([1.0, 2.0, 3.0])))
        >>> layer(jnp.ones(3)).tolist()
        [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        spar_mat: Any,
        b_init: Init | None = None,
        in_size: Size | None = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.structure = structure_of(spar_mat)
        rows, columns = self.structure.shape
        self.in_size = rows if in_size is None else in_size
        if self.in_size[-1] != rows:
            raise value_error(
                f"SparseLinear: in_size {self.in_size} does not fit a matrix of shape "
                f"{self.structure.shape}.",
                why="the last axis of the input meets the rows of the matrix.",
                do=f"let in_size end in {rows}, or transpose the matrix.",
            )
        self.out_size = (*self.in_size[:-1], columns)
        params = {"weight": _data(spar_mat)}
        if b_init is not None:
            params["bias"] = initial(b_init, (columns,), "SparseLinear: b_init")
        self.weight = param_type(params)

    def update(self, x: UnitArray) -> UnitArray:
        """Apply the layer to the last axis of x, whatever the axes before it."""
        p, matrix = self.weight.value, self.structure
        product = lambda x: sparse_matmul(x, p["weight"], sparse_mat=matrix, bias=p.get("bias"))
        return over_leading(product, x, axes=1)


def _data(matrix: Any) -> UnitArray:
    """The values in the order of the structure: the data vector, or that of `tocoo()`."""
    data: Any = getattr(matrix, "data", None)
    if not hasattr(data, "ndim") or data.ndim > 1 or data.dtype == object:
        data = matrix.tocoo().data
    data = jax.tree.map(jnp.asarray, u.math.asarray(data))  # a numpy array would stay one
    return initial(data, data.shape)
