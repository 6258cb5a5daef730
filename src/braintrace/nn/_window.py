"""The window of a convolution: sizes and padding per axis, and the order of the axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import lax

from .._errors import value_error

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]
_NAMES = ("SAME", "SAME_LOWER", "VALID")


def padding_of(layer: str, padding: Padding, n: int) -> str | tuple[tuple[int, int], ...]:
    """The name of a padding, or (low, high) for every axis of space."""
    if isinstance(padding, str) and padding.upper() in _NAMES:
        return padding.upper()
    try:
        pads = np.asarray(padding)
    except ValueError:  # sequences of different lengths
        pads = np.asarray(None)
    if n == 1 and pads.shape == (2,):
        pads = pads[None]
    if pads.shape in ((), (1,), (n,)):
        pads = np.stack([np.broadcast_to(pads, (n,))] * 2, axis=1)
    if not np.issubdtype(pads.dtype, np.integer) or pads.shape not in ((1, 2), (n, 2)):
        raise value_error(
            f"{layer}: padding is {padding!r}.",
            why=f"the layer pads both ends of {n if n > 1 else 'one'} ax{'e' if n > 1 else 'i'}s "
            "of space.",
            do=f"give one of {', '.join(map(repr, _NAMES))}, an integer, an integer per axis, or "
            "(low, high) per axis.",
        )
    return tuple((int(low), int(high)) for low, high in np.broadcast_to(pads, (n, 2)))


def dilated(sizes: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Sizes after dilation."""
    return [(n - 1) * d + 1 for n, d in zip(sizes, dilation, strict=True)]


def named_padding(
    name: str, sizes: list[int], kernel: list[int], stride: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """What a name stands for, where the sizes are the dilated ones: lax knows no such names."""
    pads = lax.padtype_to_pads(sizes, kernel, stride, name)
    return tuple((int(low), int(high)) for low, high in pads)


def dimension_numbers(n: int, channel_first: bool) -> lax.ConvDimensionNumbers:
    """Batch first, channels first or last; kernels are (*space, in, out)."""
    space = tuple(range(n))
    kernel = (n + 1, n, *space)
    first = (0, 1, *(a + 2 for a in space))
    last = (0, n + 1, *(a + 1 for a in space))
    image = first if channel_first else last
    return lax.ConvDimensionNumbers(image, kernel, image)
