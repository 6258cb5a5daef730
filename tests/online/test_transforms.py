"""A learner of a plain function under JAX's transformations and other libraries."""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from online_cases import BATCH, N_IN, SEQUENCE, N, T, drawn, error

import braintrace
from braintrace._online import _calls
from braintrace.program._flatten import inner_jaxprs

TIGHT = 1e-9


@pytest.fixture
def net(recurrent):
    return braintrace.online(recurrent.step, "d_rtrl")


def test_jit_is_no_jit_and_compiles_once(net, recurrent):
    case, traced = recurrent, []

    def run(params, carry, xs, ys):
        traced.append(1)
        return net.grad(case.loss)(params, carry, xs, ys)

    carry = net.init(case.params, case.state, case.xs[0])
    plain = run(case.params, carry, case.xs, case.ys)
    jitted = jax.jit(run)
    once = jitted(case.params, carry, case.xs, case.ys)
    assert error(once, plain) < TIGHT
    jitted(case.params, once[1][0], case.xs, case.ys)
    jitted(case.params, once[1][0], case.xs, case.ys)
    assert len(traced) <= 3  # plain, and with the first steps count of numpy and of JAX


def test_what_nobody_holds_is_not_kept_compiled(net, recurrent):
    case = recurrent
    carry = net.init(case.params, case.state, case.xs[0])
    net.grad(case.loss)(case.params, carry, case.xs, case.ys)
    kept, traced = net.grad(lambda *a: (traced.append(1), case.loss(*a))[1]), []
    kept(case.params, carry, case.xs, case.ys)
    (plan,) = net._plans.values()
    gc.collect()
    assert len(plan.compiled) == 1
    before = len(traced)
    kept(case.params, carry, case.xs, case.ys)
    assert len(traced) == before


def test_everything_inside_one_jit(net, recurrent):
    case = recurrent

    @jax.jit
    def run(params):
        carry = net.init(params, case.state, case.xs[0])
        return net.grad(case.loss)(params, carry, case.xs, case.ys)[0]

    carry = net.init(case.params, case.state, case.xs[0])
    plain, _ = net.grad(case.loss)(case.params, carry, case.xs, case.ys)
    assert error(run(case.params), plain) < TIGHT


def test_vmap_over_seeds_is_a_loop(net, recurrent):
    case = recurrent
    several = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, -a]), case.params)

    def run(params):
        carry = net.init(params, case.state, case.xs[0])
        return net.grad(case.loss, block_size=3)(params, carry, case.xs, case.ys)[0]

    mapped = jax.vmap(run)(several)
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], several)
        assert error(jax.tree.map(lambda a, i=i: a[i], mapped), run(one)) < TIGHT


def scans(jaxpr):
    """The lengths of all loops of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["length"]
        for inner in inner_jaxprs(eqn.params):
            yield from scans(inner)


@pytest.mark.parametrize(("at_once", "lots"), [(1, 4), (2, 2), (3, 2), (4, None)])
def test_vmap_takes_as_many_samples_at_once_as_fit_the_caches(
    net, recurrent, monkeypatch, at_once, lots
):
    case = recurrent
    several = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, -a, 2 * a]), case.params)
    carry = net.init(case.params, case.state, case.xs[0])
    gradient = net.grad(case.loss)
    run = lambda params: gradient(params, carry, case.xs, case.ys)
    size = _calls.samples_at_once
    monkeypatch.setattr(_calls, "samples_at_once", lambda *args: size(*args) * 0 + at_once)
    mapped = jax.make_jaxpr(jax.vmap(run))(several)
    assert [n for n in scans(mapped) if n in (2, 4)] == [lots] * (lots is not None)
    grads, (_, losses) = jax.vmap(run)(several)
    for i in range(4):
        one = jax.tree.map(lambda a, i=i: a[i], several)
        want, (_, of_one) = run(one)
        assert error(jax.tree.map(lambda a, i=i: a[i], grads), want) < TIGHT
        np.testing.assert_allclose(losses[i], of_one)
    inputs = jnp.stack([case.xs, 2 * case.xs])
    both = jax.vmap(lambda xs: jax.vmap(lambda p: gradient(p, carry, xs, case.ys)[0])(several))
    want = gradient(jax.tree.map(lambda a: a[3], several), carry, inputs[1], case.ys)[0]
    assert error(jax.tree.map(lambda a: a[1, 3], both(inputs)), want) < TIGHT


@pytest.mark.parametrize("around", [jax.jit, jax.vmap])
def test_a_mapped_or_traced_gradient_is_not_differentiated(net, recurrent, around):
    case = recurrent
    carry = net.init(case.params, case.state, case.xs[0])
    gradient = net.grad(case.loss)
    second = lambda p: gradient(p, carry, case.xs, case.ys)[0]["up"].sum()
    params = jax.tree.map(lambda a: a[None], case.params) if around is jax.vmap else case.params
    with pytest.raises(braintrace.NotSupportedError, match="differentiated once more"):
        around(jax.grad(second))(params)


def test_a_loss_may_meet_the_other_samples(net, recurrent):
    case = recurrent
    several = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), case.params)
    carry = net.init(case.params, case.state, case.xs[0])
    apart = lambda out, y: case.loss(out - jax.lax.pmean(out, "seeds"), y)
    gradient = net.grad(apart)
    run = lambda params: gradient(params, carry, case.xs, case.ys)[1][1]
    losses = jax.vmap(run, axis_name="seeds")(several)
    alike = jax.vmap(run, axis_name="seeds")(jax.tree.map(lambda a: a[:1], several))
    assert not np.allclose(losses[0], alike[0])


def test_a_cotangent_may_come_later(net, recurrent):
    case = recurrent
    carry = net.init(case.params, case.state, case.xs[0])
    carry, _ = net(case.params, carry, case.xs[0])
    out, pull, _ = jax.vjp(lambda p: net(p, carry, case.xs[1])[::-1], case.params, has_aux=True)
    net(case.params, carry, case.xs[2])  # the world goes on
    ct = out - case.ys[1]
    direct = jax.grad(lambda p: case.loss(net(p, carry, case.xs[1])[1], case.ys[1]))(case.params)
    assert error(pull(ct)[0], direct) < TIGHT


def test_a_constant_of_a_running_trace_is_not_kept(recurrent):
    case = recurrent

    def run(scale):
        def step(params, state, x):
            return case.step(params, state, scale * x)

        return step

    scale = jnp.array(1.5)
    held = []

    def total(scale):
        net = braintrace.online(run(scale), "d_rtrl")
        held.append(net)
        carry = net.init(case.params, case.state, case.xs[0])
        return net(case.params, carry, case.xs[0])[1].sum()

    wanted = braintrace.online(run(scale), "d_rtrl")
    carry = wanted.init(case.params, case.state, case.xs[0])
    np.testing.assert_allclose(
        jax.jit(total)(scale), wanted(case.params, carry, case.xs[0])[1].sum()
    )
    assert not held[0]._plans


def test_orbax_keeps_a_carry_bit_for_bit(net, recurrent, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    case = recurrent
    carry = net.init(case.params, case.state, case.xs[0])
    run = net.grad(case.loss)
    _, (carry, _) = run(case.params, carry, case.xs[:4], case.ys[:4])
    with ocp.StandardCheckpointer() as keeper:
        keeper.save(tmp_path / "carry", carry)
        keeper.wait_until_finished()
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry)
        back = keeper.restore(tmp_path / "carry", like)
    direct = run(case.params, carry, case.xs[4:], case.ys[4:])
    after = run(case.params, back, case.xs[4:], case.ys[4:])
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


class Cell(eqx.Module):
    """A module with weights, a function and a number: only the weights are trained."""

    w: jax.Array
    rest: jax.Array
    activation: callable
    leak: float

    def __call__(self, h, x):
        return self.activation(self.leak * h + braintrace.matmul(x, self.w)) + 0 * self.rest[0]


def test_an_equinox_module_is_params():
    cell = Cell(drawn(0, N_IN, N), jnp.arange(2), jnp.tanh, 0.9)

    def step(cell, h, x):
        h = cell(h, x)
        return h, h

    xs, ys = SEQUENCE[0], drawn(3, T, BATCH, N)
    net = braintrace.online(step, "d_rtrl")
    loss = lambda out, y: ((out - y) ** 2).sum()
    carry = net.init(cell, jnp.zeros((BATCH, N)), xs[0])
    grads, (last, _) = net.grad(loss)(cell, carry, xs, ys)
    assert isinstance(grads, Cell) and grads.activation is None and grads.rest is None

    @eqx.filter_jit
    def jitted(cell, carry):
        return net.grad(loss)(cell, carry, xs, ys)[0]

    @eqx.filter_grad
    def by_scan(cell):
        def body(carry, slices):
            carry, out = net(cell, carry, slices[0])
            return carry, loss(out, slices[1])

        return jax.lax.scan(body, jax.tree.map(jnp.asarray, carry), (xs, ys))[1].sum()

    def bptt(w):
        moved = eqx.tree_at(lambda c: c.w, cell, w)
        body = lambda h, s: (moved(h, s[0]), loss(moved(h, s[0]), s[1]))
        return jax.lax.scan(body, jnp.zeros((BATCH, N)), (xs, ys))[1].sum()

    truth = jax.grad(bptt)(cell.w)
    for found in (grads, jitted(cell, carry), by_scan(cell)):
        assert error(found.w, truth) < TIGHT
    assert int(last.steps) == T
