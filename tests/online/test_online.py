"""`braintrace.online`: steps, scans, gradients and updates of plain functions agree."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from online_cases import T, error

import braintrace
from braintrace import rules
from braintrace._online import _blocks

TIGHT = 1e-9


def begun(case, rule="d_rtrl", **options):
    net = braintrace.online(case.step, rule, **options)
    return net, net.init(case.params, case.state, case.xs[0])


def by_calls(net, case, carry, mask=None):
    """The gradient of a scan of calls."""
    weights = jnp.ones(T) if mask is None else mask

    def total(params):
        def body(carry, slices):
            carry, out = net(params, carry, slices[0])
            return carry, slices[2] * case.loss(out, slices[1])

        start = jax.tree.map(jnp.asarray, carry)
        return jax.lax.scan(body, start, (case.xs, case.ys, weights))[1].sum()

    return jax.grad(total)(case.params)


EVERY_RULE = {
    "d_rtrl": {},
    "pp_prop": {"decay_or_rank": 0.9},
    "eprop": {"kappa_filter_decay": 0.5},
    "rflo": {},
    "ottt": {"leak": 0.8},
    "otpe": {"leak": 0.8},
    "snap": {"n": 1},
    "rtrl": {},
    "stllr": {},
    "uoro": {},
    "kf_rtrl": {},
    "no_trace": {},
}


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_blocks_are_steps(recurrent, rule):
    net, carry = begun(recurrent, rule, **EVERY_RULE[rule])
    case = recurrent
    grads, (last, losses) = net.grad(case.loss, block_size=3)(case.params, carry, case.xs, case.ys)
    assert error(grads, by_calls(net, case, carry)) < TIGHT
    assert losses.shape == (T,) and int(last.steps) == T
    for x in case.xs:
        carry, _ = net(case.params, carry, x)
    assert error(last, carry) < TIGHT


def test_rtrl_is_bptt(recurrent):
    net, carry = begun(recurrent, "rtrl")
    grads, _ = net.grad(recurrent.loss, block_size=2)(
        recurrent.params, carry, recurrent.xs, recurrent.ys
    )
    assert error(grads, recurrent.bptt()) < TIGHT
    d_rtrl, carry = begun(recurrent)
    grads, _ = d_rtrl.grad(recurrent.loss)(recurrent.params, carry, recurrent.xs, recurrent.ys)
    assert error(grads, recurrent.bptt()) > 1e-2


def test_exact_parameters_have_the_gradient_of_bptt(leaky):
    net, carry = begun(leaky, strict=True)
    assert all(p.exact for p in net.report.parameters.values())
    grads, _ = net.grad(leaky.loss, block_size=2)(leaky.params, carry, leaky.xs, leaky.ys)
    assert error(grads, leaky.bptt()) < TIGHT


@pytest.mark.parametrize("window", [3, 1, 2, T])
def test_windows_end_where_the_sequence_ends(recurrent, window):
    case = recurrent
    net, carry = begun(case, window=window)
    one, _ = net.grad(case.loss)(case.params, carry, case.xs, case.ys)
    two, _ = net.grad(case.loss, block_size=window)(case.params, carry, case.xs, case.ys)
    assert error(one, two) < TIGHT
    assert (error(one, case.bptt()) < TIGHT) == (window == T)


def test_scan_is_steps_and_its_derivative_the_gradient(recurrent):
    case = recurrent
    net, carry = begun(case)
    last, outs = net.scan(case.params, carry, case.xs)

    def total(params):
        outs = net.scan(params, carry, case.xs)[1]
        return jax.vmap(case.loss)(outs, case.ys).sum()

    assert error(jax.grad(total)(case.params), by_calls(net, case, carry)) < TIGHT
    for t, x in enumerate(case.xs):
        carry, out = net(case.params, carry, x)
        np.testing.assert_allclose(out, outs[t], atol=1e-12)
    assert error(last, carry) < TIGHT


def test_a_mask_weighs_losses_and_keeps_nan_out(leaky):
    case, mask = leaky, jnp.array([1.0, 0, 0.5, 1, 0, 0, 2])
    net, carry = begun(case)
    broken = case.ys.at[1].set(jnp.nan)
    for block_size in (1, 3, None):
        grads, (_, losses) = net.grad(case.loss, block_size=block_size)(
            case.params, carry, case.xs, broken, mask=mask
        )
        assert error(grads, case.bptt(mask)) < TIGHT
        assert np.isnan(losses[1]) and np.isfinite(np.delete(losses, 1)).all()


def test_aux_comes_with_every_step(leaky):
    net, carry = begun(leaky)
    with_aux = lambda out, y: (leaky.loss(out, y), {"out": out})
    run = net.grad(with_aux, has_aux=True)
    _, (_, losses, aux) = run(leaky.params, carry, leaky.xs, leaky.ys)
    assert losses.shape == (T,) and aux["out"].shape == leaky.ys.shape


def test_traces_that_nobody_wants_are_zero(leaky):
    net, carry = begun(leaky)
    run = net.grad(leaky.loss, keep_traces=False)
    grads, (last, _) = run(leaky.params, carry, leaky.xs, leaky.ys)
    assert error(grads, leaky.bptt()) < TIGHT
    assert int(last.steps) == 0 and not any(a.any() for a in jax.tree.leaves(last.traces))
    np.testing.assert_allclose(
        last.state["v"], net.scan(leaky.params, carry, leaky.xs)[0].state["v"]
    )


def test_a_sequence_in_two_parts_is_one(leaky):
    net, carry = begun(leaky)
    run = net.grad(leaky.loss)
    first, (middle, _) = run(leaky.params, carry, leaky.xs[:4], leaky.ys[:4])
    second, _ = run(leaky.params, middle, leaky.xs[4:], leaky.ys[4:])
    assert error(jax.tree.map(jnp.add, first, second), leaky.bptt()) < TIGHT


@pytest.mark.parametrize("every", [3, 1, 8])
def test_training_is_gradients_and_updates(recurrent, every):
    case, optimizer = recurrent, optax.adam(1e-2)
    net, start = begun(case)
    train = net.train(case.loss, optimizer, update_every=every)
    got = train(case.params, optimizer.init(case.params), start, case.xs, case.ys)
    params, opt, carry, losses = case.params, optimizer.init(case.params), start, []
    gradient = net.grad(case.loss, block_size=1)
    for t in range(0, T, every):
        xs, ys = case.xs[t : t + every], case.ys[t : t + every]
        grads, (carry, some) = gradient(params, carry, xs, ys)
        updates, opt = optimizer.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        losses.append(some)
    for found, wanted in zip(got, (params, opt, carry, jnp.concatenate(losses)), strict=True):
        assert error(found, wanted) < TIGHT


@pytest.mark.parametrize(
    "rule, every, window", [("d_rtrl", 2, None), ("d_rtrl", 6, 2), ("uoro", 6, None)]
)
def test_updates_have_gradients_in_blocks(recurrent, rule, every, window):
    case, optimizer = recurrent, optax.sgd(1e-2)
    net, start = begun(case, rule, window=window)

    def train(**options):
        run = net.train(case.loss, optimizer, every, **options)
        return run(case.params, optimizer.init(case.params), start, case.xs, case.ys)

    one, two = train(), train(block_size=1, keep_traces=False)
    assert error((one[0], one[2].state, one[3]), (two[0], two[2].state, two[3])) < TIGHT
    assert int(one[2].steps) == T and int(two[2].steps) == 0
    assert not any(a.any() for a in jax.tree.leaves(two[2].traces))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU takes larger blocks")
def test_an_update_after_many_steps_takes_the_memory_of_a_segment(leaky, monkeypatch):
    monkeypatch.setattr(_blocks, "SEGMENT", 1 << 14)
    monkeypatch.setattr(_blocks, "CACHED", 1 << 14)  # else so small a sequence is one block
    optimizer, length = optax.sgd(1e-2), 2048
    net, carry = begun(leaky)
    train = jax.jit(net.train(leaky.loss, optimizer, length))

    def bytes_for(xs, ys):
        lowered = train.lower(leaky.params, optimizer.init(leaky.params), carry, xs, ys)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    long = jax.tree.map(lambda a: jnp.tile(a[:1], (length, 1, 1)), (leaky.xs, leaky.ys))
    short = jax.tree.map(lambda a: a[: length // 8], long)
    assert bytes_for(*long) < 2 * bytes_for(*short)


def test_half_precision_traces(leaky):
    net, carry = begun(leaky, trace_dtype=jnp.bfloat16)
    assert {a.dtype for a in jax.tree.leaves(carry.traces)} == {jnp.dtype(jnp.bfloat16)}
    full, _ = begun(leaky)
    assert 2 * net.memory < full.memory  # float64 to bfloat16
    grads, _ = net.grad(leaky.loss, block_size=1)(leaky.params, carry, leaky.xs, leaky.ys)
    assert 1e-6 < error(grads, leaky.bptt()) < 0.05


def test_rules_that_take_something_with_a_call(leaky):
    net, carry = begun(leaky, "three_factor")
    rewards = jnp.arange(float(T))
    run = net.grad(leaky.loss, block_size=3)
    grads, _ = run(leaky.params, carry, leaky.xs, leaky.ys, modulator=rewards)
    total = jax.tree.map(jnp.zeros_like, grads)
    for x, y, r in zip(leaky.xs, leaky.ys, rewards, strict=True):

        def loss(params, carry=carry, x=x, y=y, r=r):
            new, out = net(params, carry, x, modulator=r)
            return leaky.loss(out, y), new

        g, carry = jax.grad(loss, has_aux=True)(leaky.params)
        total = jax.tree.map(jnp.add, total, g)
    assert error(grads, total) < TIGHT
    twice, _ = run(
        leaky.params, begun(leaky, "three_factor")[1], leaky.xs, leaky.ys, modulator=2 * rewards
    )
    np.testing.assert_allclose(twice["w"], 2 * grads["w"])


def test_report_has_one_entry_per_floating_leaf_in_order(recurrent):
    case = recurrent._replace(params={**recurrent.params, "index": jnp.arange(3), "name": "x"})
    net, carry = begun(case)
    wanted = [("b",), ("cell", "w"), ("out",), ("up",)]
    assert list(net.report.parameters) == wanted
    assert not net.report.parameters["cell", "w"].exact and net.report.parameters["out",].exact
    grads, _ = net.grad(case.loss)(case.params, carry, case.xs, case.ys)
    assert grads["index"] is None and grads["name"] is None
    assert net.memory == sum(a.nbytes for a in jax.tree.leaves(carry.traces))


def test_memory_is_told_before_it_is_taken(recurrent):
    net = braintrace.online(recurrent.step, "rtrl")
    jax.eval_shape(net.init, recurrent.params, recurrent.state, recurrent.xs[0])
    assert net.memory > 0
    limited = braintrace.online(recurrent.step, "rtrl", memory_limit=net.memory - 1)
    with pytest.raises(braintrace.NotSupportedError, match="would store"):
        limited.init(recurrent.params, recurrent.state, recurrent.xs[0])


def test_integer_state_passes_through(leaky):
    def step(params, state, x):
        inner, out = leaky.step(params, {"v": state["v"]}, x)
        return {**inner, "count": state["count"] + 1}, out

    case = leaky._replace(step=step, state={**leaky.state, "count": jnp.zeros((), jnp.int32)})
    net, carry = begun(case)
    grads, (last, _) = net.grad(case.loss, block_size=3)(case.params, carry, case.xs, case.ys)
    assert int(last.state["count"]) == T and error(grads, leaky.bptt()) < TIGHT


def test_rules_are_names_values_and_coordinates(leaky):
    ways = ("d_rtrl", rules.d_rtrl(), braintrace.ETraceConfig())
    grads = []
    for rule in ways:
        net, carry = begun(leaky, rule)
        grads.append(net.grad(leaky.loss)(leaky.params, carry, leaky.xs, leaky.ys)[0])
    assert error(grads[1], grads[0]) == error(grads[2], grads[0]) == 0


def test_no_brainstate_is_imported():
    code = (
        "import sys; sys.modules['brainstate'] = None\n"
        "import importlib.util\n"
        "import braintrace._online\n"
        "assert 'braintrace.learner' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
