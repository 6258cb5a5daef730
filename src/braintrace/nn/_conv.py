"""Convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import brainstate
import jax
import saiunit as u

from .._errors import value_error
from ..ops import conv
from ..ops._conv import per_axis
from ._shapes import XAVIER, Init, Layer, UnitArray, constant, initial, over_leading
from ._window import Padding, dilated, dimension_numbers, named_padding, padding_of


class _Conv(Layer):
    """A convolution over as many axes as `spatial` says."""

    spatial: int

    def __init__(
        self,
        in_size: Sequence[int],
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        lhs_dilation: int | Sequence[int] = 1,
        rhs_dilation: int | Sequence[int] = 1,
        groups: int = 1,
        w_init: Init = XAVIER,
        b_init: Init | None = None,
        w_mask: Init | None = None,
        channel_first: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ):
        super().__init__(name=name)
        self.in_size = in_size
        self.out_channels, self.groups, self.channel_first = out_channels, groups, channel_first
        self._check_channels()
        n, layer = self.spatial, self._kind
        self.kernel_size = per_axis(layer, "kernel_size", kernel_size, n)
        self.stride = per_axis(layer, "stride", stride, n)
        self.lhs_dilation = per_axis(layer, "lhs_dilation", lhs_dilation, n)
        self.rhs_dilation = per_axis(layer, "rhs_dilation", rhs_dilation, n)
        self.padding = padding_of(layer, padding, n)
        if isinstance(self.padding, str) and self.lhs_dilation != (1,) * n:
            sizes = self.in_size[1:] if channel_first else self.in_size[:-1]
            self.padding = named_padding(
                self.padding,
                dilated(sizes, self.lhs_dilation),
                dilated(self.kernel_size, self.rhs_dilation),
                self.stride,
            )
        self.dimension_numbers = dimension_numbers(n, channel_first)

        shape = self.kernel_shape
        self.w_mask = None if w_mask is None else constant(w_mask, shape, f"{layer}: w_mask")
        params = {"weight": initial(w_init, shape, f"{layer}: w_init")}
        if b_init is not None:
            params["bias"] = self._bias(b_init)
        self.weight = param_type(params)
        self.out_size = self._convolved(shape)

    @property
    def in_channels(self) -> int:
        """Number of channels of the input."""
        return self.in_size[0 if self.channel_first else -1]

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """Shape of the kernel: (*kernel_size, in / groups, out)."""
        return (*self.kernel_size, self.in_channels // self.groups, self.out_channels)

    def update(self, x: UnitArray) -> UnitArray:
        """Convolve x, whose last axes are `in_size`, whatever the axes before them."""
        axes = self.spatial + 1
        if tuple(x.shape[-axes:]) != self.in_size:
            raise value_error(
                f"{self._kind}: x {tuple(x.shape)} does not end in {self.in_size}.",
                why="these are the layer's in_size: channels "
                f"{'first' if self.channel_first else 'last'}, and the axes of space.",
                do="give x that shape, with the batch before it, or build the layer for the "
                "shape of x.",
            )
        if x.ndim == axes:
            return self._apply(x[None])[0]
        return over_leading(self._apply, x, axes)

    def _apply(self, x: UnitArray) -> UnitArray:
        return self._convolve(x, self.weight.value["weight"], self.weight.value.get("bias"))

    def _convolve(self, *operands: UnitArray | None) -> UnitArray:
        mask = self.w_mask
        return conv(
            *operands,
            strides=self.stride,
            padding=self.padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.rhs_dilation,
            feature_group_count=self.groups,
            dimension_numbers=self.dimension_numbers,
            kernel_fn=None if mask is None else lambda kernel: kernel * mask,
        )

    def _bias(self, b_init: Init) -> UnitArray:
        # One number per channel, with the axes that let it broadcast to an output.
        n, channels, label = self.spatial, self.out_channels, f"{self._kind}: b_init"
        shape = (1, channels, *(1,) * n) if self.channel_first else (*(1,) * n, channels)
        if not callable(b_init) and u.math.shape(b_init) == (channels,):
            return initial(b_init, (channels,), label).reshape(shape)
        return initial(b_init, shape, label)

    def _convolved(self, kernel: tuple[int, ...]) -> tuple[int, ...]:
        shapes = [jax.ShapeDtypeStruct(a, "float32") for a in ((1, *self.in_size), kernel)]
        y = jax.eval_shape(self._convolve, *shapes)
        if 0 in y.shape:
            raise value_error(
                f"{self._kind}: the output of in_size {self.in_size} is empty.",
                why=f"the window {self.kernel_size} does not fit into the padded input.",
                do="make the kernel smaller, or pad more.",
            )
        return tuple(y.shape[1:])

    def _check_channels(self) -> None:
        if len(self.in_size) != self.spatial + 1:
            raise value_error(
                f"{self._kind}: in_size is {self.in_size}.",
                why=f"it has {self.spatial} size(s) of space and the number of channels, "
                "which comes last unless channel_first=True.",
                do=f"give {self.spatial + 1} numbers.",
            )
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise value_error(
                f"{self._kind}: {self.in_channels} channels in and {self.out_channels} out are "
                f"not divisible by groups={self.groups}.",
                why="every group reads and writes equally many channels.",
                do="choose channels that are multiples of groups.",
            )


class Conv1d(_Conv):
    """A convolution along one axis, trained online.

    Any axes before those of `in_size` are batch; there may be none.

    Args:
        in_size: shape of a sample: its sizes in space and the number of channels.
        out_channels: number of channels of the output.
        kernel_size: size of the window; one number serves all axes, here and below.
        stride: step of the window.
        padding: 'SAME', 'SAME_LOWER', 'VALID', a number for both ends, a number for each axis, or
            pairs (low, high); in one dimension two numbers are such a pair.
        lhs_dilation: dilation of the input.
        rhs_dilation: dilation of the kernel.
        groups: number of groups of channels.
        w_init: initialiser of the kernel (*kernel_size, in / groups, out), or its value.
        b_init: initialiser of the bias, or its value, one per channel; None for no bias.
        w_mask: array or initialiser that multiplies the kernel.
        channel_first: whether channels come before space, in `in_size`, input and output.
        name: name of the layer.
        param_type: class of the parameter state.

    Attributes:
        weight: the parameter state, a dictionary with `weight` and perhaps `bias`.
        kernel_shape: shape of the kernel.
        out_size: shape of the output of a sample.

    Raises:
        ValueError: if sizes, channels, groups or padding do not fit.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.nn.Conv1d((8, 3), 4, 5, stride=2)(jnp.ones((2, 8, 3))).shape
        (2, 4, 4)
    """

    spatial = 1


class Conv2d(_Conv):
    """A convolution over two axes, trained online; its arguments are those of `Conv1d`.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.nn.Conv2d((6, 8, 3), 4, (3, 5), padding="VALID").out_size
        (4, 4, 4)
    """

    spatial = 2


class Conv3d(_Conv):
    """A convolution over three axes, trained online; its arguments are those of `Conv1d`.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> braintrace.nn.Conv3d((3, 6, 6, 6), 4, 3, channel_first=True).out_size
        (4, 6, 6, 6)
    """

    spatial = 3
