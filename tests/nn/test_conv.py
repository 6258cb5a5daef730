import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from jax import lax

from braintrace.nn import Conv1d, Conv2d, Conv3d

RNG = np.random.default_rng(0)
LAYOUT = {
    Conv1d: ("NWC", "WIO", "NWC"),
    Conv2d: ("NHWC", "HWIO", "NHWC"),
    Conv3d: ("NDHWC", "DHWIO", "NDHWC"),
}


@pytest.mark.parametrize(
    "kind, size, options, window",
    [
        (Conv1d, (7, 2), dict(stride=2), dict(padding="SAME", window_strides=(2,))),
        (Conv1d, (7, 2), dict(padding=(0, 3)), dict(padding=[(0, 3)])),
        (Conv1d, (7, 2), dict(padding=1), dict(padding=[(1, 1)])),
        (Conv1d, (7, 2), dict(padding="same_lower"), dict(padding="SAME_LOWER")),
        (Conv2d, (5, 6, 2), dict(padding=(0, 3)), dict(padding=[(0, 0), (3, 3)])),
        (Conv2d, (5, 6, 2), dict(padding=((1, 0),)), dict(padding=[(1, 0)] * 2)),
        (Conv2d, (5, 6, 2), dict(padding="VALID", stride=(2, 1)), dict(window_strides=(2, 1))),
        (
            Conv1d,
            (7, 2),
            dict(lhs_dilation=2, padding=1),
            dict(padding=[(1, 1)], lhs_dilation=(2,)),
        ),
        (Conv2d, (5, 6, 4), dict(groups=2), dict(padding="SAME", feature_group_count=2)),
        (Conv3d, (3, 4, 5, 2), dict(padding=(0, 1, 2)), dict(padding=[(0, 0), (1, 1), (2, 2)])),
    ],
)
def test_window_is_that_of_lax(kind, size, options, window):
    layer = kind(size, 4, 3, **options)
    x = jnp.asarray(RNG.normal(size=(2, *size)))
    window = {"padding": "VALID", "window_strides": (1,) * (len(size) - 1), **window}
    kernel = layer.weight.value["weight"]
    want = lax.conv_general_dilated(x, kernel, dimension_numbers=LAYOUT[kind], **window)
    np.testing.assert_allclose(layer(x), want, rtol=1e-12, atol=1e-12)
    assert layer.in_size == size and layer.out_size == want.shape[1:]


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_padding_of_a_dilated_input_is_that_of_the_input_with_its_zeros(padding):
    options = dict(kernel_size=(3, 2), stride=(2, 1), rhs_dilation=(2, 1), padding=padding)
    layer = Conv2d((4, 5, 2), 3, lhs_dilation=(2, 3), **options)
    wide = Conv2d((7, 13, 2), 3, w_init=layer.weight.value["weight"], **options)
    x = jnp.asarray(RNG.normal(size=(4, 5, 2)))
    want = wide(jnp.zeros((7, 13, 2)).at[::2, ::3].set(x))
    np.testing.assert_allclose(layer(x), want, rtol=1e-12, atol=1e-12)
    assert layer.out_size == wide.out_size


def test_channels_first_is_the_same_with_other_axes():
    last = Conv2d((5, 6, 2), 3, 3, b_init=jnp.arange(3.0))
    first = Conv2d(
        (2, 5, 6), 3, 3, w_init=last.weight.value["weight"], b_init=[0, 1, 2], channel_first=True
    )
    assert last.weight.value["bias"].shape == (1, 1, 3)
    assert first.weight.value["bias"].shape == (1, 3, 1, 1)
    assert first.weight.value["bias"].dtype == jnp.float64
    x = jnp.asarray(RNG.normal(size=(5, 6, 2)))
    np.testing.assert_allclose(first(x.transpose(2, 0, 1)), last(x).transpose(2, 0, 1))
    assert first.out_size == (3, 5, 6) and last.out_size == (5, 6, 3)


def test_mask_multiplies_the_kernel():
    layer = Conv1d((4, 2), 3, 3, w_mask=jnp.zeros((3, 1, 1)).at[1].set(1), padding="VALID")
    x = jnp.asarray(RNG.normal(size=(4, 2)))
    np.testing.assert_allclose(layer(x), x[1:-1] @ layer.weight.value["weight"][1])


def test_units_of_input_kernel_and_bias_pass_through():
    layer = Conv1d((4, 2), 3, 3, w_init=2.0 * u.siemens, b_init=1.0 * u.amp)
    y = layer(jnp.ones((2, 4, 2)) * u.volt)
    assert u.get_unit(y) == u.amp
    np.testing.assert_allclose(y.mantissa[:, 1:-1], 13.0)
    plain = Conv1d((4, 2), 3, 3, w_init=2.0, b_init=1.0 * u.mV)
    assert u.get_unit(plain(jnp.ones((4, 2)) * u.mV)) == u.mV


def test_kernel_keeps_a_small_type():
    layer = Conv1d((4, 2), 3, 3, w_init=jnp.ones((3, 2, 3), jnp.bfloat16))
    assert jax.eval_shape(layer, jnp.ones((4, 2), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "kind, match, arguments",
    [
        (Conv2d, r"in_size is \(5, 2\)", dict(in_size=(5, 2))),
        (Conv1d, "2 channels in and 4 out are not divisible by groups=3", dict(groups=3)),
        (Conv1d, r"kernel_size is \(3, 3\)", dict(kernel_size=(3, 3))),
        (Conv1d, "stride is 0", dict(stride=0)),
        (Conv1d, "rhs_dilation is 1.5", dict(rhs_dilation=1.5)),
        (Conv1d, "padding is 'FULL'", dict(padding="FULL")),
        (Conv1d, r"padding is \(1, 2, 3\)", dict(padding=(1, 2, 3))),
        (Conv1d, r"padding is \(\(1, 2\), 3\)", dict(padding=((1, 2), 3))),
        (Conv1d, "padding is 0.5", dict(padding=0.5)),
        (Conv1d, r"is empty", dict(kernel_size=9, padding="VALID")),
        (Conv1d, r"w_mask has the shape \(2, 3\)", dict(w_mask=jnp.ones((2, 3)))),
        (Conv1d, r"b_init has the shape \(3,\)", dict(b_init=jnp.ones(3))),
    ],
)
def test_conv_refuses(kind, match, arguments):
    with pytest.raises(ValueError, match=match) as info:
        kind(**{"in_size": (5, 2), "out_channels": 4, "kernel_size": 3, **arguments})
    assert "why:" in str(info.value) and "do:" in str(info.value)


def test_conv_refuses_an_input_of_another_shape():
    with pytest.raises(ValueError, match=r"\(2, 2, 5\).*\(5, 2\)(.|\n)*last"):
        Conv1d((5, 2), 4, 3)(jnp.ones((2, 2, 5)))
    with pytest.raises(ValueError, match=r"does not end in"):
        Conv1d((5, 2), 4, 3)(jnp.ones(2))


def test_kernel_shape_is_that_of_the_kernel():
    layer = Conv2d((4, 6, 6), 8, (3, 2), groups=2, channel_first=True)
    assert layer.kernel_shape == (3, 2, 2, 8) == layer.weight.value["weight"].shape
