"""Models whose gradients in blocks are compared with single steps."""

import functools

import brainstate
import jax.numpy as jnp
import models
from jax import lax

import braintrace as bt
from small import net, small

EXTRA = {}


case = functools.partial(models.case, EXTRA)


matmul, element_wise = bt.matmul, bt.element_wise


def adaptive(draw, reset):
    @net({"w": draw(3, 4, scale=1.5), "r": draw(4, 4)}, {"v": draw(4), "a": abs(draw(4))})
    def model(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = models.spike(v - 0.3 - 0.5 * m.a.value)
        m.a.value = 0.8 * m.a.value + z
        fired = lax.stop_gradient(z)
        m.v.value = v * (1 - reset * fired) - 0.1 * matmul(z, m.r.value)
        return z + 0.1 * m.v.value

    return model, (3,)


@case()
def spikes_with_hard_reset(draw):
    return adaptive(draw, 1.0)


@case()
def spikes_with_reset_beyond_zero(draw):
    return adaptive(draw, 2.0)


@case()
@small({"w": (3, 4), "u": (3, 4)}, {"h": 4}, x=(3,))
def operator_in_a_branch(m, x):
    far = lambda x: matmul(jnp.log(x[0]) + x, m.w.value)  # not a number where not taken
    y = lax.cond(x[0] > 0, far, lambda x: 0.3 * matmul(x, m.u.value), x)
    m.h.value = jnp.tanh(0.8 * m.h.value + y)
    return m.h.value


@case()
@small({"w": (3, 4)}, {"h": 4}, x=(3,))
def while_loop_of_dynamics(m, x):
    y = matmul(x, m.w.value)
    go_on = lambda c: (c[0] < 4) & (jnp.abs(c[1]).max() < 5)
    turn = lambda c: (c[0] + 1, c[1] + 0.2 * (y - jnp.tanh(c[1])))
    m.h.value = lax.while_loop(go_on, turn, (0, m.h.value))[1]
    return m.h.value


@case()
def ring_buffer(draw):
    states = {
        "line": draw(3, 4),
        "at": brainstate.ShortTermState(jnp.zeros((), int)),
        "v": draw(4),
    }

    @net({"w": draw(3, 4)}, states)
    def model(m, x):
        oldest = lax.dynamic_index_in_dim(m.line.value, m.at.value, keepdims=False)
        y = jnp.tanh(matmul(x, m.w.value))
        m.v.value = 0.9 * m.v.value + jnp.sin(oldest)
        m.line.value = lax.dynamic_update_index_in_dim(m.line.value, y, m.at.value, 0)
        m.at.value = (m.at.value + 1) % 3
        return m.v.value

    return model, (3,)


@case()
@small({"w": (3, 4), "g": 4}, {"h": (2, 4)}, x=(2, 3))
def branch_in_the_turns_of_a_scan(m, x):
    def turn(h, scale):
        y = lax.cond(scale > 1, lambda: matmul(scale * x, m.w.value), lambda: 0.1 * h)
        return 0.8 * h + y * element_wise(m.g.value), h.sum()

    m.h.value, sums = lax.scan(turn, m.h.value, jnp.arange(1.0, 4.0))
    return m.h.value + sums.mean()


CASES = {
    name: (models.EXACT | models.RECURRENT | models.OPERATORS | EXTRA)[name]
    for name in (
        *("gru_batched", "lstm", "stacked_layers", "spikes_with_hard_reset"),
        *("spikes_with_reset_beyond_zero", "learnable_decay", "element_wise_batched", "conv"),
        *("sparse_batched", "grouped_batched", "lora_batched", "embedding_batched"),
        *("einsum_shared", "custom", "operators_inside_bodies", "branch_in_the_turns_of_a_scan"),
        *("operator_in_a_branch", "while_loop_of_dynamics", "delay_line", "ring_buffer"),
        *("complex_state", "plain_recurrent_weight", "plain_readout", "noise"),
        *("layer_norm", "lif_with_units"),
    )
}
