"""A state that is changed outside of a learner, and calls with arrays that do not fit."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from online_cases import drawn, error
from test_errors import refuses

import braintrace

B, N, IN, T = 4, 4, 3, 12
PARAMS = {"w": drawn(0, IN, N), "r": drawn(1, N, N)}
XS, H0 = drawn(2, T, B, IN), jnp.zeros((B, N))
TIGHT = 1e-10


def step(params, h, x):
    h = jnp.tanh(0.5 * h + x @ params["w"] + h @ params["r"])
    return h, h


def loss(out):
    return (out**2).sum()


def ran(rule="rtrl", **options):
    """A learner, its gradient and the carry after a sequence."""
    net = braintrace.online(step, rule, **options)
    gradient = net.grad(loss)
    return net, gradient, gradient(PARAMS, net.init(PARAMS, H0, XS[0]), XS)[1][0]


# ------------------------------------------------------------------------- replaced states


def test_a_carry_says_what_becomes_of_its_traces():
    net, gradient, carry = ran(strict=True)
    again = gradient(PARAMS, net.init(PARAMS, H0, XS[0]), XS)[0]
    reset = carry.replace(state=H0, traces="reset")
    assert int(reset.steps) == 0 and not any(a.any() for a in jax.tree.leaves(reset.traces))
    assert error(gradient(PARAMS, reset, XS)[0], again) < TIGHT
    kept = carry.replace(state=1.0 * carry.state, traces="keep")
    on = gradient(PARAMS, kept, XS)[0]
    assert error(on, gradient(PARAMS, carry, XS)[0]) < TIGHT < error(on, again)


def test_a_learned_state_that_is_replaced_has_started():
    net = braintrace.online(step, "rtrl")
    start = lambda params: jnp.ones((B, 1)) * params["w"][0]
    carry = net.init(PARAMS, start, XS[0]).replace(state=H0, traces="reset")
    plain = net.init(PARAMS, H0, XS[0])
    found, wanted = (net.grad(loss)(PARAMS, c, XS)[0] for c in (carry, plain))
    assert error(found, wanted) < TIGHT


def test_a_replacement_that_does_not_fit_is_refused():
    carry = ran()[2]
    refuses(ValueError, "traces='both'", carry.replace, state=H0, traces="both")
    text = r"the new state is float64\[4, 3\]"
    refuses(ValueError, text, carry.replace, state=H0[:, :3], traces="reset")
    refuses(ValueError, "the new state is", carry.replace, state=(H0,), traces="reset")


@pytest.mark.parametrize(
    "replaced",
    [
        lambda carry: dataclasses.replace(carry, state=H0),
        lambda carry: eqx.tree_at(lambda c: c.state, carry, H0),
    ],
)
def test_a_state_that_is_replaced_in_silence_is_seen(replaced):
    _, gradient, carry = ran(strict=True)
    text = "strict=True, and the state of the carry is another one"
    refuses(ValueError, text, gradient, PARAMS, replaced(carry), XS)
    _, gradient, carry = ran("d_rtrl")
    with pytest.warns(UserWarning, match="traces='reset'"):
        gradient(PARAMS, replaced(carry), XS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        gradient(PARAMS, replaced(carry), XS)


def test_carries_that_nobody_changed_are_not_suspected():
    net, gradient, carry = ran(strict=True)
    moved = jax.tree.map(jnp.copy, carry)  # saved and loaded, say
    begun = dataclasses.replace(net.init(PARAMS, H0, XS[0]), state=H0 + 1)  # no traces yet
    for at in (moved, begun, carry, jax.tree.map(lambda a: a, carry)):
        gradient(PARAMS, at, XS)
    jax.jit(lambda c: gradient(PARAMS, dataclasses.replace(c, state=H0), XS))(carry)


# --------------------------------------------------------------------- calls that do not fit


def test_inputs_of_another_shape_than_those_of_init_are_named():
    net, gradient, carry = ran("d_rtrl")
    saw = lambda shape: rf"init saw float64\[4, 3\], this step gets float64\[{shape}\]"
    refuses(ValueError, saw("12, 3"), gradient, PARAMS, carry, XS.swapaxes(0, 1))
    refuses(ValueError, saw("5, 3"), gradient, PARAMS, carry, jnp.ones((T, 5, IN)))
    refuses(ValueError, saw("12, 4, 3"), net, PARAMS, carry, XS)


def test_a_number_is_a_state():
    count = lambda params, h, x: (0.5 * h + (x @ params["w"]).sum(), h)
    net = braintrace.online(count, "d_rtrl")
    carry = net.init(PARAMS, 0.0, XS[0])
    grads, (after, _) = net.grad(lambda out: out**2)(PARAMS, carry, XS)

    def total(params):
        body = lambda h, x: (count(params, h, x)[0], count(params, h, x)[1] ** 2)
        return jax.lax.scan(body, 0.0, XS)[1].sum()

    assert error(grads["w"], jax.grad(total)(PARAMS)["w"]) < TIGHT and after.state.shape == ()


def test_forward_mode_is_refused():
    net, _, carry = ran("d_rtrl")
    scan = lambda params: net.scan(params, carry, XS)[1]
    kind = braintrace.NotSupportedError
    refuses(kind, "in forward mode", jax.jvp, scan, (PARAMS,), (PARAMS,))
    refuses(kind, "in forward mode", jax.jacfwd(lambda p: net(p, carry, XS[0])[1]), PARAMS)
    twice = lambda params: net.grad(loss)(params, carry, XS)[0]
    refuses(kind, "differentiated once more", jax.jvp, twice, (PARAMS,), (PARAMS,))


def test_a_class_is_no_step():
    refuses(TypeError, "the step is the class GRUCell", braintrace.online, eqx.nn.GRUCell)


def test_a_mask_per_sample_is_a_target():
    _, gradient, carry = ran("d_rtrl")
    refuses(ValueError, "pass it as a target", gradient, PARAMS, carry, XS, mask=np.ones((T, B)))
    refuses(ValueError, "one number per step", gradient, PARAMS, carry, XS, mask=np.ones(3))


def test_a_donated_carry_is_named():
    _, gradient, carry = ran("d_rtrl")
    jax.jit(lambda c: jax.tree.map(lambda a: a + 1, c), donate_argnums=0)(carry)
    refuses(ValueError, "does not exist any more", gradient, PARAMS, carry, XS)
