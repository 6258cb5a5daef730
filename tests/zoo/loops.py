"""Models with a loop inside `update`: an operator around, before, after and in its body."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from brainstate import transform as bst
from jax import lax

from .control import case
from .zoo import (
    element_wise,
    matmul,
    net,
    small,
)

LOOPS: dict[str, tuple[Callable, tuple, dict]] = {}


# ------------------------------------------------------------------------------------- loops


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def operator_outside(m, x):
    y = matmul(x, m.w.value)
    m.h.value = lax.fori_loop(0, 2, lambda i, h: h + 0.2 * (y - jnp.tanh(h)), m.h.value)
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4), "b": 4}, {"h": 4})
def operator_inside(m, x):
    turn = lambda h, _: (jnp.sin(0.9 * h + 0.3 * matmul(x, m.w.value, m.b.value)), None)
    m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
    return m.h.value


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": 4})
def operator_on_what_a_turn_brings(m, x):
    turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value)), jnp.sin(h))
    m.h.value, path = lax.scan(turn, m.h.value, x)
    return path.sum(0) + m.h.value


@case(LOOPS, exact=False)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4})
def recurrent_operator_inside(m, x):
    y = matmul(x, m.w.value)
    turn = lambda h, _: (0.7 * h + 0.3 * jnp.tanh(y + matmul(h, m.r.value)), None)
    m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
    return m.h.value


@case(LOOPS, exact=False)
@small({"w": (3, 4), "r": (4, 4)}, {"h": 4})
def recurrent_and_driving_operator_inside(m, x):
    def turn(i, h):
        return jnp.tanh(0.6 * h + 0.5 * matmul(x, m.w.value) + 0.3 * matmul(h, m.r.value))

    m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
    return m.h.value


@case(LOOPS, (2, 3))
@small({"w": (2, 3, 4)}, {"h": 4})
def weights_as_slices(m, x):
    turn = lambda h, vw: (jnp.tanh(0.8 * h + matmul(*vw)), None)
    m.h.value = lax.scan(turn, m.h.value, (x, m.w.value))[0]
    return m.h.value


@case(LOOPS, (2, 3), exact=False)
@small({"w": (2, 3, 4)}, {"h": 4})
def weights_as_slices_and_as_a_whole(m, x):
    def turn(h, vw):
        return jnp.tanh(0.8 * h + matmul(*vw) + matmul(vw[0], m.w.value.sum(0)) * h.mean()), h

    m.h.value, path = lax.scan(turn, m.h.value, (x, m.w.value))
    return m.h.value + path[1]


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": 4})
def operator_outputs_as_slices(m, x):
    turn = lambda h, y: (jnp.tanh(0.8 * h + y), h * y)
    m.h.value, path = lax.scan(turn, m.h.value, matmul(x, m.w.value))
    return m.h.value + path[0]


@case(LOOPS, (3, 3))
@small({"w": (3, 4)}, {"h": 4})
def reverse_scan(m, x):
    turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value)), h)
    m.h.value, path = lax.scan(turn, m.h.value, x, reverse=True)
    return path[0] * path[2]


@case(LOOPS, (3, 3))
@small({"w": (3, 3, 4)}, {"h": 4})
def reverse_scan_of_weights(m, x):
    turn = lambda h, vw: (0.8 * jnp.sin(h) + matmul(*vw), h)
    m.h.value, path = lax.scan(turn, m.h.value, (x, m.w.value), reverse=True)
    return path[0] + m.h.value


@case(LOOPS, (2, 3))
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def nested_scans(m, x):
    def outer(h, v):
        inner = lambda h, _: (0.9 * h + 0.2 * matmul(v, m.w.value), None)
        h = lax.scan(inner, h, None, 2)[0]
        return jnp.tanh(h + matmul(v, m.u.value)), None

    m.h.value = lax.scan(outer, m.h.value, x)[0]
    return m.h.value


@case(LOOPS)
@small({"w": (2, 3, 4)}, {"h": 4})
def nested_scans_weights_of_both(m, x):
    def outer(h, w):
        inner = lambda h, _: (jnp.sin(0.9 * h + 0.2 * matmul(x, w)), None)
        return lax.scan(inner, h, None, 2)[0], None

    m.h.value = lax.scan(outer, m.h.value, m.w.value)[0]
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def choice_inside_a_loop(m, x):
    def turn(i, h):
        even = lambda h: 0.9 * h + 0.2 * matmul(x, m.w.value)
        odd = lambda h: jnp.sin(h) * matmul(x, m.u.value)
        return lax.cond((i % 2 == 0) | (h[0] > 0), even, odd, h)

    m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def loop_inside_a_choice(m, x):
    turn = lambda i, h: jnp.sin(0.9 * h + 0.2 * matmul(x, m.w.value))
    many = lambda h: lax.fori_loop(0, 2, turn, h)
    m.h.value = lax.cond(x[0] > 0, many, lambda h: 0.5 * h, m.h.value)
    return m.h.value


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": (2, 4)})
def lax_map(m, x):
    y = lax.map(lambda v: jnp.sin(matmul(v, m.w.value)), x)
    m.h.value = jnp.tanh(0.8 * m.h.value + y)
    return m.h.value


@case(LOOPS, (4, 3))
@small({"w": (3, 4)}, {"h": (4, 4)})
def lax_map_in_batches(m, x):
    one = lambda hv: jnp.tanh(0.8 * hv[0] + matmul(hv[1], m.w.value))
    m.h.value = lax.map(one, (m.h.value, x), batch_size=2)
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4), "g": 4}, {"h": 4, "v": 4})
def two_operators_in_one_body(m, x):
    def turn(carry, gain):
        h, v = carry
        v = v - 0.1 * h + 0.2 * gain * matmul(x, m.w.value)
        return (h + 0.2 * element_wise(m.g.value, jnp.tanh) * v, v), v

    (m.h.value, m.v.value), path = lax.scan(turn, (m.h.value, m.v.value), jnp.arange(3.0))
    return m.h.value + path[1]


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": 4})
def bias_that_varies(m, x):
    turn = lambda h, v: (jnp.tanh(0.8 * h + matmul(v, m.w.value, v[:1] * jnp.ones(4))), None)
    m.h.value = lax.scan(turn, m.h.value, x)[0]
    return m.h.value


@case(LOOPS, exact=False)
@small({"w": (3, 4), "b": 4}, {"h": 4})
def bias_that_follows_the_state(m, x):
    turn = lambda i, h: jnp.tanh(0.8 * h + matmul(x, m.w.value, m.b.value * h))
    m.h.value = lax.fori_loop(0, 2, turn, m.h.value) + matmul(x, m.w.value)
    return m.h.value


@case(LOOPS)
def weight_transforms_inside(draw):
    mask = jnp.asarray(np.random.default_rng(0).random((3, 4)) < 0.6)

    @net({"w": draw(3, 4), "u": draw(4, 3)}, {"h": draw(4)})
    def model(m, x):
        def turn(h, _):
            y = matmul(x, m.w.value * mask) + jnp.sin(matmul(x, jnp.tanh(m.u.value).T))
            return jnp.tanh(0.8 * h + 0.3 * y), None

        m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
        return m.h.value

    return model


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def weight_scaled_by_a_slice(m, x):
    turn = lambda h, g: (jnp.sin(0.9 * h + 0.1 * matmul(x, m.w.value * g)), None)
    m.h.value = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0))[0]
    return m.h.value


@case(LOOPS, exact=False)
@small({"w": (3, 4)}, {"h": 4})
def layer_norm_inside(m, x):
    def turn(h, _):
        y = h + 0.5 * matmul(x, m.w.value)
        return 0.5 * h + (y - y.mean()) / jnp.sqrt(y.var() + 0.5), None

    m.h.value = lax.scan(turn, m.h.value, None, 2)[0]
    return m.h.value


@case(LOOPS, exact=False)
@small({"w": (3, 4)}, {"h": 4})
def layer_norm_inside_operator_outside(m, x):
    y = matmul(x, m.w.value)
    turn = lambda i, h: 0.7 * h + 0.3 * y / (1 + jnp.sum((h + y) ** 2))
    m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
    return m.h.value


@case(LOOPS, (4,))
@small({"w": (2, 4, 4)}, {"h": (2, 4)})
def layers_by_scan(m, x):
    def layer(_, of):
        w, h = of
        return _, jnp.tanh(0.8 * h + matmul(x, w))

    m.h.value = lax.scan(layer, 0, (m.w.value, m.h.value))[1]
    return m.h.value


@case(LOOPS, (4,), exact=False)
@small({"w": (2, 4, 4), "b": (2, 4)}, {"h": (2, 4)})
def layers_by_scan_that_feed_each_other(m, x):
    def layer(below, of):
        w, b, h = of
        h = jnp.tanh(0.8 * h + matmul(below, w, b))
        return h, h

    top, m.h.value = lax.scan(layer, x, (m.w.value, m.b.value, m.h.value))
    return top


@case(LOOPS, (4,), exact=False)
@small({"w": (2, 4, 4), "r": (2, 4, 4)}, {"h": (2, 4)})
def recurrent_layers_by_scan(m, x):
    def layer(below, of):
        w, r, h = of
        h = jnp.tanh(0.5 * h + matmul(below, w) + matmul(h, r))
        return h, h

    top, m.h.value = lax.scan(layer, x, (m.w.value, m.r.value, m.h.value))
    return top


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": 4, "k": 4})
def brainstate_scan(m, x):
    def turn(c, v):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))
        return 0.5 * c + m.h.value, m.h.value

    m.k.value, path = bst.scan(turn, m.k.value, x)
    return m.k.value + path[0]


@case(LOOPS, (3, 3))
@small({"w": (3, 4)}, {"h": 4})
def brainstate_for_loop(m, x):
    def turn(v):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))
        return m.h.value

    return bst.for_loop(turn, x).sum(0)


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": 4})
def brainstate_cond_in_for_loop(m, x):
    def write(v):
        m.h.value = jnp.tanh(0.8 * m.h.value + matmul(v, m.w.value))

    bst.for_loop(lambda v: bst.cond(v[0] > 0, write, lambda v: None, v), x)
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4})
def operator_before_and_after(m, x):
    h = m.h.value + matmul(x, m.w.value)
    h = lax.fori_loop(0, 2, lambda i, h: 0.9 * h - 0.1 * jnp.sin(i + h), h)
    m.h.value = jnp.tanh(0.8 * h + matmul(x**2, m.u.value))
    return m.h.value


@case(LOOPS, (2, 3))
@small({"w": (3, 4), "b": 4}, {"h": (2, 4)})
def loop_on_a_batch(m, x):
    turn = lambda i, h: jnp.sin(0.9 * h + 0.3 * matmul(x, m.w.value, m.b.value))
    m.h.value = lax.fori_loop(0, 2, turn, m.h.value)
    return m.h.value


@case(LOOPS, (2, 3))
@small({"w": (3, 4)}, {"h": (2, 4)})
def loop_under_vmap(m, x):
    def one(h, v):
        turn = lambda h, _: (jnp.sin(0.9 * h + 0.3 * matmul(v, m.w.value)), None)
        return lax.scan(turn, h, None, 2)[0]

    m.h.value = jax.vmap(one)(m.h.value, x)
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4)}, {"line": (3, 4)})
def delay_line_by_scan(m, x):
    shift = lambda above, own: (own, above)
    out, m.line.value = lax.scan(shift, matmul(x, m.w.value), m.line.value)
    return jnp.sin(out)


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def outputs_in_the_loss_only(m, x):
    m.h.value = 0.9 * m.h.value + matmul(x, m.w.value)
    return lax.scan(lambda c, _: (jnp.sin(c), c * m.h.value), m.h.value, None, 2)[1]


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def no_turns_and_one_turn(m, x):
    turn = lambda h, _: (jnp.tanh(0.8 * h + matmul(x, m.w.value)), None)
    h = lax.scan(turn, m.h.value, None, 0)[0]
    m.h.value = lax.scan(turn, h, None, 1)[0]
    return m.h.value


@case(LOOPS)
@small({"w": (3, 4)}, {"h": 4})
def unrolled_scan(m, x):
    turn = lambda h, g: (jnp.tanh(0.8 * h + g * matmul(x, m.w.value)), h)
    m.h.value, path = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0), unroll=2)
    return m.h.value + path[-1]
