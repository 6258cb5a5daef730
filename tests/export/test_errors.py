"""What cannot become C is refused in four parts, with the line of the user."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import loss

import braintrace

W, X, Y = jnp.ones((3, 4)), jnp.ones(3), jnp.ones(4)
OTHER_KEY = jax.random.key(0, impl="rbg")


def export(path, change, state=None, loss=loss, w=W, **options):
    """A leaky step whose output goes through `change`."""

    def step(w, h, x):
        h = 0.9 * h + jnp.tanh(x @ w)
        return h, change(h)

    net = braintrace.online(step, "d_rtrl")
    carry = net.init(w, jnp.zeros(4, w.dtype), X)
    return net.export_c(w, carry, X, Y, loss=loss, optimizer=optax.sgd(0.1), path=path, **options)


def rest(h):
    return jax.lax.while_loop(lambda c: c[1] > 0.5, lambda c: (c[0] * 0.5, c[1] * 0.5), (h, h[0]))[
        0
    ]


REFUSED = {
    "sort": (lambda h: jnp.sort(h), "has no sorting"),
    "pure_callback": (
        lambda h: (
            h
            + jax.pure_callback(
                lambda a: a, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h)
            )
        ),
        "calls Python",
    ),
    "digamma": (lambda h: jax.lax.digamma(jnp.abs(h) + 1), "has no entry for it"),
    "while": (lambda h: h + jax.lax.stop_gradient(rest(h)), "only when it runs"),
    "convert_element_type": (lambda h: h + h.astype(jnp.float16), "float16"),
    "random_fold_in": (
        lambda h: h + jax.random.normal(jax.random.fold_in(OTHER_KEY, h[0].astype(int)), h.shape),
        "its generator is not threefry",
    ),
    "random_gamma": (
        lambda h: h + jax.random.gamma(jax.random.key(h[0].astype(int)), 2.0, h.shape),
        "until a number is accepted",
    ),
    "bitcast_convert_type": (
        lambda h: h + jax.lax.bitcast_convert_type(h, jnp.uint8).sum(),
        "of another size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operation_without_c_is_refused_with_the_line(name, tmp_path):
    change, why = REFUSED[name]
    with pytest.raises(braintrace.NotSupportedError) as caught:
        export(tmp_path, change)
    text = str(caught.value)
    assert "cannot be exported" in text and why in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["where", "why", "do"]
    assert "test_errors.py" in text
    assert not list(tmp_path.iterdir())


def test_other_numbering_of_threefry_is_refused(tmp_path):
    draw = lambda h: h + jax.random.normal(jax.random.key(h[0].astype(int)), h.shape)
    with (
        jax.threefry_partitionable(False),
        pytest.raises(braintrace.NotSupportedError, match="jax_threefry_partitionable"),
    ):
        export(tmp_path, draw)


def test_complex_parameters_are_refused(tmp_path):
    with pytest.raises(braintrace.NotSupportedError, match="imaginary"):
        export(tmp_path, jnp.abs, w=W * 1j, loss=lambda o, y: jnp.mean(jnp.abs(o - y)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"name": "for"}, "name='for'"),
        ({"name": "My Net"}, "name"),
        ({"initial": "rom"}, "'source' or 'file'"),
    ],
)
def test_options_are_checked(options, what, tmp_path):
    with pytest.raises(ValueError, match=what):
        export(tmp_path, jnp.tanh, **options)


def test_windows_and_traced_parameters_are_refused(tmp_path):
    step = lambda w, h, x: (h := jnp.tanh(0.9 * h + x @ w), h)
    net = braintrace.online(step, "d_rtrl", window=4)
    how = dict(loss=loss, optimizer=optax.sgd(0.1), path=tmp_path)
    with pytest.raises(braintrace.NotSupportedError, match="without window"):
        net.export_c(W, net.init(W, Y, X), X, Y, **how)
    net = braintrace.online(step, "d_rtrl")
    carry = net.init(W, Y, X)
    with pytest.raises(braintrace.NotSupportedError, match="have no values there"):
        jax.jit(lambda w: net.export_c(w, carry, X, Y, **how))(W)


def test_unknown_arrays_are_refused(tmp_path):
    done = export(tmp_path, jnp.tanh)
    with pytest.raises(ValueError, match="no weights"):
        done.pack({"weights": np.zeros(3)})


def test_arrays_go_into_saved_bytes_and_come_back(tmp_path):
    done = export(tmp_path, jnp.tanh)
    name = done.code.kept[0].name
    value = np.arange(12.0).reshape(3, 4)
    assert (done.unpack(done.pack({name: value}))[name] == value).all()
    assert done.unpack(done.pack()).keys() == {s.name for s in done.code.kept}
    assert "bytes" in repr(done) and inspect.getdoc(type(done))
