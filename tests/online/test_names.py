"""Traces by names that a step and a step around it share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from online_cases import drawn, error

import braintrace
from braintrace.graph import operator_names, seed_of

B, N, IN = 2, 3, 2
PARAMS = {"w": drawn(0, IN, N), "r": drawn(1, N, N)}
XS, YS = drawn(2, 6, B, IN), drawn(3, 6, B, N)
TIGHT = 1e-10


def model(params, h, x):
    h = jnp.tanh(0.5 * h + x @ params["w"] + h @ params["r"])
    return h, h


def around(params, state, x):
    """The model between an encoder and a filter with a state of its own, in front of the other."""
    a = 0.9 * state["a"] + x @ params["enc"]
    h, out = model(params["model"], state["h"], jnp.sin(x) + 0 * a[:, :IN])
    return {"a": a, "h": h}, out + a


WHOLE = {"enc": drawn(4, IN, N), "model": PARAMS}
STATE = {"a": jnp.zeros((B, N)), "h": jnp.zeros((B, N))}


def started(step, params, state, rule, **options):
    net = braintrace.online(step, rule, **options)
    return net, net.init(params, state, XS[0])


def loss(out):
    return (out**2).sum()


def parts(plan, traces):
    """The parts of traces by name."""
    names, tree = jax.tree.flatten(plan.rule.record.named(plan.graph))
    return dict(zip(names, tree.flatten_up_to(traces), strict=True))


def given(plan, carry, named):
    """A carry with these traces; what has no name among them starts at zero."""
    names, tree = jax.tree.flatten(plan.rule.record.named(plan.graph))
    zeros = parts(plan, plan.zeros())
    traces = jax.tree.unflatten(tree, [named.get(name, zeros[name]) for name in names])
    return dataclasses.replace(carry, traces=traces, steps=jnp.maximum(carry.steps, 1))


def run(net, params, carry, xs):
    return net.grad(loss, block_size=2)(params, carry, xs)


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "snap", "eprop", "rtrl", "kf_rtrl", "uoro"])
def test_a_carry_gives_and_takes_its_traces_by_name(rule):
    net, carry = started(model, PARAMS, jnp.zeros((B, N)), rule, **_options(rule))
    carry = run(net, PARAMS, carry, XS)[1][0]
    named = parts(net._last, carry.traces)
    assert all(isinstance(name, str) for name in named)
    fresh = net.init(PARAMS, carry.state, XS[0])
    back = given(net._last, fresh, named)
    pairs = zip(jax.tree.leaves(carry.traces), jax.tree.leaves(back.traces), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs) and int(back.steps) >= 1
    assert error(run(net, PARAMS, back, XS)[0], run(net, PARAMS, carry, XS)[0]) < TIGHT
    assert error(run(net, PARAMS, fresh, XS)[0], run(net, PARAMS, carry, XS)[0]) > 1e-3


def _options(rule):
    return {"pp_prop": {"decay_or_rank": 0.9}, "snap": {"n": 2}}.get(rule, {})


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop", "rtrl"])
def test_a_step_around_a_model_has_the_traces_of_the_model(rule):
    # The same model, called alone and in a step with an operator and a state before it.
    inner = lambda params, h, x: model(params["model"], h["h"], jnp.sin(x))
    alone = lambda params, h, x: ({"h": inner(params, h, x)[0]}, inner(params, h, x)[1])
    options = _options(rule)
    net, carry = started(alone, {"model": PARAMS}, {"h": STATE["h"]}, rule, **options)
    whole, other = started(around, WHOLE, STATE, rule, **options)
    ran = run(net, {"model": PARAMS}, carry, XS)[1][0]
    ran_whole = run(whole, WHOLE, other, XS)[1][0]
    named, named_whole = parts(net._last, ran.traces), parts(whole._last, ran_whole.traces)
    assert set(named) < set(named_whole)
    for name, trace in named.items():
        assert error(trace, named_whole[name]) < TIGHT
    taken = given(whole._last, other, named)
    only_whole = set(named_whole) - set(named)
    for name, trace in parts(whole._last, taken.traces).items():
        if name in only_whole:
            assert not any(np.any(a) for a in jax.tree.leaves(trace))
        else:
            assert error(trace, named[name]) < TIGHT


def test_uses_of_a_weight_are_counted():
    def step(params, h, x):
        h = jnp.tanh(braintrace.matmul(x, params["w"]) + braintrace.matmul(2 * x, params["w"]))
        return h, h

    net, _ = started(step, PARAMS, jnp.zeros((B, N)), "d_rtrl")
    first, second = operator_names(net._last.graph)
    assert (first, second) == ("w", "w 2")


def test_the_states_of_the_slots_are_a_part_of_the_name():
    def into(key):
        def step(params, state, x):
            return {**state, key: 0.5 * state[key] + x @ params["w"]}, state[key]

        state = {"a": jnp.zeros((B, N)), "b": jnp.zeros((B, N))}
        net, carry = started(step, PARAMS, state, "d_rtrl")
        return parts(net._last, carry.traces)

    a, b = into("a"), into("b")
    assert [n.partition(" @")[0] for n in a] == [n.partition(" @")[0] for n in b]
    assert not set(a) & set(b)


def test_a_step_with_other_states_has_another_random_product():
    net, carry = started(model, PARAMS, jnp.zeros((B, N)), "uoro")
    wide = lambda params, s, x: ((model(params, s[0], x)[0], s[1] + 1), s[0])
    other, start = started(wide, PARAMS, (jnp.zeros((B, N)), jnp.zeros(2)), "uoro")
    assert not set(parts(net._last, carry.traces)) & set(parts(other._last, start.traces))


def test_factored_traces_correct_by_their_own_steps():
    # The encoder's trace is first seen at step 3: its correction counts from there.
    net, carry = started(around, WHOLE, STATE, "pp_prop", decay_or_rank=0.9)
    plan = net._last
    ran = run(net, WHOLE, carry, XS[:3])[1][0]
    named = parts(plan, ran.traces)
    kept = {n: t for n, t in named.items() if n.startswith("model.")}
    assert 0 < len(kept) < len(named)
    taken = given(plan, ran, kept)
    steps = {n: int(t["steps"]) for n, t in parts(plan, taken.traces).items()}
    assert {steps[n] for n in kept} == {3} and {steps[n] for n in set(named) - set(kept)} == {0}
    # One step on, its gradient is that of a carry with these states and no trace.
    bare = net.init(WHOLE, ran.state, XS[0])
    grads = run(net, WHOLE, taken, XS[3:4])[0]
    assert error(grads["enc"], run(net, WHOLE, bare, XS[3:4])[0]["enc"]) < TIGHT
    assert error(grads["model"], run(net, WHOLE, bare, XS[3:4])[0]["model"]) > 1e-3


def test_traces_of_another_shape_are_refused():
    net, carry = started(model, PARAMS, jnp.zeros((B, N)), "rtrl")
    named = {k: t[..., :1] for k, t in parts(net._last, carry.traces).items()}
    with pytest.raises(ValueError, match="traces"):
        run(net, PARAMS, given(net._last, carry, named), XS)


def test_the_seed_of_a_name_is_the_same_in_every_process():
    assert seed_of("cell.w matmul") == 479493678
