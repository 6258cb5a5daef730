"""The layer that looks up rows of a table."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from brainstate.nn import init

from .._errors import error, value_error
from ..ops import embedding
from ._shapes import Init, Layer, Size, UnitArray, check_size, initial, over_leading

_LECUN = init.LecunUniform()


class Embedding(Layer):
    """A trained table of vectors, looked up by integers: `y = table[indices]`.

    The row `padding_idx` reads as zero and gets no gradient. A table with `freeze=True` is in
    a `LongTermState` instead of a parameter, so that no optimizer sees it.

    Args:
        num_embeddings: number of rows.
        embedding_size: shape of a row.
        embedding_init: initialiser of the table, or its value.
        padding_idx: the row that stands for nothing.
        max_norm: not supported; only None.
        norm_type: the norm of `max_norm`; without that it has no meaning.
        scale_grad_by_freq: not supported; only False.
        freeze: whether the table stays as it is.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the state of the table, an array of shape (rows, *row).

    Raises:
        NotImplementedError: for the two arguments that are not supported.
        ValueError: if `padding_idx` is outside the table, or a value has another shape.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> layer = braintrace.nn.Embedding(10, 4, padding_idx=0)
        >>> layer(jnp.array([[3, 0], [1, 9]])).shape
        (2, 2, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: Size,
        embedding_init: Init = _LECUN,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        freeze: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        check_size(self, "num_embeddings", num_embeddings, one=True)
        _check(num_embeddings, padding_idx, max_norm, scale_grad_by_freq)
        self.num_embeddings, self.padding_idx = num_embeddings, padding_idx
        self.norm_type, self.freeze = norm_type, freeze
        self.out_size = self.embedding_size = embedding_size
        shape = (num_embeddings, *self.out_size)
        table = initial(embedding_init, shape, "Embedding: embedding_init")
        if padding_idx is not None:
            table = table.at[padding_idx].set(0 * table[padding_idx])
        self.weight = (brainstate.LongTermState if freeze else param_type)(table)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: UnitArray,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        freeze: bool = True,
        **options: Any,
    ) -> Self:
        """A layer for a table that exists already, by default one that stays as it is.

        Args:
            embeddings: the table, (rows, *row).
            freeze: whether the table stays as it is; the other arguments are those of the class.

        Raises:
            ValueError: if the table has no rows of numbers.
        """
        shape = u.math.shape(embeddings)
        if len(shape) < 2:
            raise value_error(
                f"Embedding.from_pretrained: the table has shape {shape}.",
                why="its first axis counts the rows, the others are those of a row.",
                do="give an array with two axes or more.",
            )
        norms = (padding_idx, max_norm, norm_type, scale_grad_by_freq, freeze)
        return cls(shape[0], shape[1:], embeddings, *norms, **options)

    def update(self, indices: jax.Array) -> UnitArray:
        """The rows at these indices, one or an array of them."""
        indices = jnp.asarray(indices)
        table = self.weight.value
        table = table.reshape((self.num_embeddings, prod(self.out_size)))
        rows = over_leading(lambda i: embedding(i, table, weight_fn=self._padded), indices, axes=0)
        return rows.reshape((*indices.shape, *self.out_size))

    def _padded(self, table: jax.Array) -> jax.Array:
        # Not the stored row: whatever an optimizer does to it, it reads as zero.
        return table if self.padding_idx is None else table.at[self.padding_idx].set(0)


def _check(rows: int, padding: int | None, max_norm: float | None, by_frequency: bool) -> None:
    if padding is not None and not 0 <= padding < rows:
        raise value_error(
            f"Embedding: padding_idx {padding} is outside the table's {rows} rows.",
            why="rows are counted from 0, and negative indices do not count from the end.",
            do=f"give a number between 0 and {rows - 1}.",
        )
    if max_norm is not None:
        raise error(NotImplementedError)(
            f"Embedding: max_norm={max_norm} is not supported.",
            why="it rewrites the rows that a step looks up, and weights must stay constant "
            "while a trace is built.",
            do="shorten the rows of layer.weight.value after each step of the optimizer.",
        )
    if by_frequency:
        raise error(NotImplementedError)(
            "Embedding: scale_grad_by_freq=True is not supported.",
            why="an index counts in all later steps through its trace, so one step's "
            "frequencies do not scale the gradient.",
            do="divide the table's gradient by the counts of your indices before the "
            "optimizer uses it.",
        )
