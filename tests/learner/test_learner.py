"""The learner as its users meet it: calling, differentiating, batching, resetting, inspecting."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import braintrace
from thinned import some

from .reference import (
    Leaky,
    assert_alive,
    assert_close,
    bptt,
    leaky,
    learner_of,
    normal,
    online,
    restore,
    squares,
    values,
)

XS = normal(7, 5, 2)
H = ("model4compile", "h")


class Recurrent(Leaky):
    """A recurrent operator besides the leak, so that online and BPTT gradients differ."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.r = brainstate.ParamState(0.5 * normal(4, self.n, self.n))

    def update(self, x):
        h = self.h.value
        y = braintrace.matmul(x, self.w.value, self.b.value)
        self.h.value = 0.9 * jnp.tanh(h) + y + braintrace.matmul(h, self.r.value)
        return self.h.value @ self.v.value


def recurrent(batch_size=None):
    model = Recurrent()
    brainstate.nn.init_all_states(model, batch_size=batch_size)
    return model


# ----------------------------------------------------------------- one gradient over many calls


@pytest.mark.parametrize("make", [leaky, recurrent])
@pytest.mark.parametrize("way", ["scan", "for_loop", "python", "etrace_grad"])
def test_gradient_over_many_calls_is_the_sum_of_online_gradients(make, way):
    want = online(learner_of(make(), XS[0]), XS)
    algo = learner_of(make(), XS[0])

    def through_scan():
        def body(total, x):
            return total + squares(algo(x)), None

        return brainstate.transform.scan(body, jnp.zeros(()), XS)[0]

    losses = {
        "scan": through_scan,
        "for_loop": lambda: brainstate.transform.for_loop(lambda x: squares(algo(x)), XS).sum(),
        "python": lambda: sum(squares(algo(x)) for x in XS),
    }
    if way == "etrace_grad":
        got = algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), reduction="sum")
    else:
        got = brainstate.transform.grad(losses[way], algo.param_states)()
    assert_alive(got)
    assert_close(got, want)


def test_gradient_equals_bptt_for_an_elementwise_recurrence_and_not_for_a_recurrent_weight():
    assert_close(online(learner_of(leaky(), XS[0]), XS), bptt(leaky(), XS))
    got, whole = online(learner_of(recurrent(), XS[0]), XS), bptt(recurrent(), XS)
    assert np.abs(got[("w",)] - whole[("w",)]).max() > 1e-3


def test_readout_is_trained_with_its_exact_gradient():
    algo = learner_of(recurrent(), XS[0])
    got = online(algo, XS)
    assert_close(got[("v",)], bptt(recurrent(), XS)[("v",)])


def test_two_calls_in_one_loss_count_both():
    algo, other = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    got = brainstate.transform.grad(
        lambda: squares(algo(XS[0])) + squares(algo(XS[1])), algo.param_states
    )()
    assert_close(got, online(other, XS[:2]))


def test_loss_that_reads_a_stored_state_after_the_call():
    algo, other = learner_of(leaky(), XS[0]), leaky()

    def loss(x):
        algo(x)
        return squares(algo.model4compile.h.value)

    step = brainstate.transform.grad(loss, algo.param_states)
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])

    def read(out):
        return squares(other.h.value)

    assert_close(got, bptt(other, XS, read))


def test_encoder_outside_the_model_gets_its_gradient_within_the_step():
    encoder = brainstate.ParamState(normal(8, 4, 2))
    raw = normal(9, 5, 4)
    algo = learner_of(leaky(), XS[0])
    states = {("encoder",): encoder, **algo.param_states}
    step = brainstate.transform.grad(lambda x: squares(algo(x @ encoder.value)), states)
    for x in raw:
        h = algo.model4compile.h.value
        got = step(x)[("encoder",)]

        def loss(e, h=h, x=x):
            m = algo.model4compile
            h = 0.9 * jnp.tanh(h) + (x @ e) @ m.w.value + m.b.value
            return squares(h @ m.v.value)

        assert_close(got, jax.grad(loss)(encoder.value))


def test_gradient_by_input_is_the_one_within_the_step():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    m, h = algo.model4compile, algo.model4compile.h.value

    def loss(x):
        return squares((0.9 * jnp.tanh(h) + x @ m.w.value + m.b.value) @ m.v.value)

    got = brainstate.transform.grad(lambda x: squares(algo(x)), argnums=0)(XS[1])
    assert_close(got, jax.grad(loss)(XS[1]))


def test_learning_loop_reduces_the_loss_of_a_memory_task():
    # Say at the last step what came at the first one.
    brainstate.random.seed(0)

    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = braintrace.nn.GRUCell(1, 12)
            self.out = braintrace.nn.Linear(12, 1)

        def update(self, x):
            return self.out(self.cell(x))

    rng = np.random.default_rng(0)
    first = jnp.asarray(rng.choice([-1.0, 1.0], size=(16, 1)))
    xs = jnp.concatenate([first[None], jnp.zeros((4, 16, 1))])
    mask = jnp.asarray([0, 0, 0, 0, 1.0])
    algo = braintrace.compile(Net(), "d_rtrl", xs[0], batch_size=16)
    params = algo.param_states
    optimizer = optax.adam(0.03)
    memory = optimizer.init({k: s.value for k, s in params.items()})

    @brainstate.transform.jit
    def train(memory):
        algo.reset()
        grads, loss = algo.etrace_grad(
            xs,
            step_fn=lambda x: ((algo(x) - first) ** 2).mean(),
            mask=mask,
            return_value=True,
            loss_output="scalar",
        )
        change, memory = optimizer.update(grads, memory)
        for k, s in params.items():
            s.value = optax.apply_updates(s.value, change[k])
        return memory, loss

    losses = []
    for _ in range(60):
        memory, loss = train(memory)
        losses.append(float(loss))
    assert losses[0] > 0.5
    assert losses[-1] < 0.05


# ------------------------------------------------------------------------------ cost of a call


def temporaries(fun, xs):
    """Bytes the compiled function needs besides its inputs and outputs."""
    stateful = brainstate.transform.StatefulFunction(fun)
    stateful.make_jaxpr(xs)
    state = [s.value for s in stateful.get_states(xs)]
    compiled = jax.jit(stateful.jaxpr_call).lower(state, xs).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def sequence_memory(make, length):
    algo = make()
    gradient = lambda xs: algo.etrace_grad(xs, step_fn=lambda x: squares(algo(x)))
    return temporaries(gradient, jnp.zeros((length, 2)))


def test_memory_of_a_sequence_gradient_does_not_grow_with_its_length():
    def make():
        return learner_of(leaky(n=16), jnp.zeros(2))

    short, long = sequence_memory(make, 512), sequence_memory(make, 4096)
    assert long <= short + 1024, (short, long)


def test_memory_of_bptt_grows_with_the_length_of_the_sequence():
    model = leaky(n=16)
    params = model.states(brainstate.ParamState)

    def memory(length):
        loss = lambda xs: brainstate.transform.for_loop(lambda x: squares(model(x)), xs).sum()
        return temporaries(brainstate.transform.grad(loss, params), jnp.zeros((length, 2)))

    assert memory(1024) > 8 * memory(64)  # the control of the test above


class Counted(Leaky):
    traced = 0

    def update(self, x):
        type(self).traced += 1
        return super().update(x)


def compiles(action):
    """Programs XLA compiled during the action."""
    seen = []

    def listen(event, *args, **kwargs):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    action()
    return len(seen)  # older JAX cannot take a listener back; this one only counts


def test_second_call_under_jit_neither_traces_nor_compiles():
    model = Counted()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    fast = brainstate.transform.jit(grad)
    fast(XS[0])
    before = Counted.traced
    assert compiles(lambda: fast(XS[1])) == 0
    assert Counted.traced == before


@pytest.mark.parametrize("with_grad", [False, True], ids=["call", "grad"])
def test_second_eager_call_compiles_nothing(with_grad):
    algo = learner_of(leaky(), XS[0])
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    run = grad if with_grad else algo
    run(XS[0])
    run(XS[1])
    assert compiles(lambda: run(XS[2])) == 0


# ------------------------------------------------------------------------------------ batching

BATCHED = normal(11, 4, 3, 2)  # time, batch, features


def explicit_batch():
    algo = learner_of(leaky(3), BATCHED[0])
    return algo, lambda: algo.model4compile.h.value, algo.param_states


def compiled_vmap():
    algo = braintrace.compile(Leaky(), "d_rtrl", BATCHED[0], batch_size=3, vmap=True)
    return algo, lambda: algo.module.model4compile.h.value, algo.param_states


def mapped_model():
    model = Leaky()
    mapped = brainstate.nn.Map(model, init_map_size=3)
    mapped.init_all_states()
    return learner_of(mapped, BATCHED[0]), lambda: model.h.value, None


def manual_vmap():
    model = Leaky()
    algo = braintrace.D_RTRL(model)

    @brainstate.transform.vmap_new_states(state_tag="new", axis_size=3)
    def make():
        brainstate.nn.init_all_states(model)
        algo.compile_graph(BATCHED[0, 0])

    make()
    mapped = brainstate.nn.Vmap(algo, vmap_states="new")
    return mapped, lambda: model.h.value, algo.param_states


@pytest.mark.parametrize("make", [explicit_batch, compiled_vmap, mapped_model, manual_vmap])
def test_batching_modes_agree_on_states_and_gradients(make):
    algo, state, params = make()
    params = algo.param_states if params is None else params
    step = brainstate.transform.grad(lambda x: squares(algo(x)), params)
    found = jax.tree.map(lambda *g: sum(g), *[step(x) for x in BATCHED])
    samples = [learner_of(leaky(), BATCHED[0, 0]) for _ in range(3)]
    each = [online(s, BATCHED[:, i]) for i, s in enumerate(samples)]
    want = jax.tree.map(lambda *g: sum(g), *each)
    assert_close({k[-1]: v for k, v in found.items()}, {k[-1]: v for k, v in want.items()})
    assert_close(state(), jnp.stack([s.model4compile.h.value for s in samples]))


@pytest.mark.parametrize("make", [compiled_vmap, mapped_model])
def test_batching_modes_drive_sequences(make):
    algo, state, _ = make()
    got = algo.etrace_grad(BATCHED, step_fn=lambda x: squares(algo(x)), reduction="sum")
    plain = learner_of(leaky(3), BATCHED[0])
    want = plain.etrace_grad(BATCHED, step_fn=lambda x: squares(plain(x)), reduction="sum")
    assert_close({k[-1]: v for k, v in got.items()}, {k[-1]: v for k, v in want.items()})
    algo.etrace_evolve(BATCHED)
    plain.etrace_evolve(BATCHED)
    assert_close(state(), plain.model4compile.h.value)


def test_mapped_batch_shows_the_report_of_one_sample():
    algo = compiled_vmap()[0]
    assert algo.report.counts["etrace_weights"] == 2  # weight and bias
    assert algo.graph is algo.module.graph
    assert isinstance(algo, braintrace.ETraceVmap)


# --------------------------------------------------------------------- windows and sequences


def test_multi_step_data_forward_equals_stepping():
    algo, other = learner_of(recurrent(), XS[0]), learner_of(recurrent(), XS[0])
    out = algo(braintrace.MultiStepData(XS))
    assert_close(out, jnp.stack([other(x) for x in XS]))
    a, b = values(algo), values(other)
    a.pop(("running_index",)), b.pop(("running_index",))
    assert_close(a, b)


def test_multi_step_data_gradient_of_a_single_step_learner_is_the_sum_of_online_gradients():
    algo, other = learner_of(recurrent(), XS[0]), learner_of(recurrent(), XS[0])
    got = brainstate.transform.grad(
        lambda: squares(algo(braintrace.MultiStepData(XS))), algo.param_states
    )()
    assert_alive(got)
    assert_close(got, online(other, XS))


def test_single_step_data_is_reused_at_every_step():
    class Driven(Leaky):
        def update(self, x, gain):
            return super().update(gain * x)

    def make():
        model = Driven()
        brainstate.nn.init_all_states(model)
        algo = braintrace.D_RTRL(model)
        algo.compile_graph(XS[0], jnp.zeros(2))
        return algo

    gain = normal(3, 2)
    a, b, c = make(), make(), make()
    want = jnp.stack([a(x, gain) for x in XS])
    assert_close(b(braintrace.MultiStepData(XS), braintrace.SingleStepData(gain)), want)
    assert_close(c(braintrace.MultiStepData(XS), gain), want)


@pytest.mark.parametrize("chunk", some([1, 2, 3, 5, 9], 2))
def test_windows_of_any_size_cover_a_sequence_of_any_length(chunk):
    algo = learner_of(leaky(), XS[0], vjp_method="multi-step")

    def loss(x):
        out = algo(braintrace.MultiStepData(x) if chunk > 1 else x)
        return (out**2).sum(-1)

    got, losses = algo.etrace_grad(
        XS, step_fn=loss, chunk_size=chunk, reduction="sum", return_value=True
    )
    assert losses.shape == (5,)
    assert_close(got, bptt(leaky(), XS))


def test_whole_window_is_bptt_for_a_recurrent_weight():
    algo = learner_of(recurrent(), XS[0], vjp_method="multi-step")
    got = algo.etrace_grad(
        XS,
        step_fn=lambda x: (algo(braintrace.MultiStepData(x)) ** 2).sum(-1),
        chunk_size=5,
        reduction="sum",
    )
    assert_close(got, bptt(recurrent(), XS))


def window_learner():
    algo = learner_of(leaky(), XS[0], vjp_method="multi-step")
    return algo, lambda x: algo(braintrace.MultiStepData(x))


@pytest.mark.parametrize("length", [4, 5])
def test_windows_stack_auxiliary_values_per_step_and_per_window(length):
    algo, call = window_learner()
    xs = XS[:length]

    def loss(x):
        out = call(x)
        return (out**2).sum(-1), {"out": out}

    _, losses, aux = algo.etrace_grad(
        xs, step_fn=loss, chunk_size=2, has_aux=True, return_value=True
    )
    plain = leaky()
    want = jnp.stack([plain(x) for x in xs])
    assert_close(aux["out"], want)
    assert_close(losses, (want**2).sum(-1))


@pytest.mark.parametrize(
    "summary", [lambda o: o.mean(), lambda o: jnp.tile(o.sum(0), 2)], ids=["0d", "1d"]
)
@pytest.mark.parametrize("length", [4, 5])
def test_windows_stack_summaries_of_windows(summary, length):
    algo, call = window_learner()

    def loss(x):
        out = call(x)
        return (out**2).sum(-1), summary(out)

    _, aux = algo.etrace_grad(XS[:length], step_fn=loss, chunk_size=2, has_aux=True)
    plain = leaky()
    outs = jnp.stack([plain(x) for x in XS[:length]])
    parts = [outs[i : i + 2] for i in range(0, length, 2)]
    assert_close(aux, jnp.stack([summary(p) for p in parts]))


def sequence(**options):
    algo = learner_of(leaky(), XS[0])
    return algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), **options)


def step_losses():
    model = leaky()
    return jnp.stack([squares(model(x)) for x in XS])


def test_etrace_grad_mask_weighs_the_losses_and_mean_divides_by_its_sum():
    mask = jnp.asarray([0.0, 2.0, 0.0, 1.0, 0.5])
    algo = learner_of(leaky(), XS[0])
    steps = [
        brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)(x) for x in XS
    ]
    want = jax.tree.map(lambda *g: sum(m * a for m, a in zip(mask, g, strict=True)), *steps)
    assert_close(sequence(mask=mask, reduction="sum"), want)
    assert_close(sequence(mask=mask), jax.tree.map(lambda g: g / 3.5, want))


@pytest.mark.parametrize("mask", [[True, False, True, True, False], np.array([1, 0, 1, 1, 0])])
def test_etrace_grad_accepts_boolean_and_integer_masks(mask):
    want = sequence(mask=jnp.asarray(mask, float))
    assert_close(sequence(mask=mask), want)


def test_etrace_grad_mean_of_a_small_mask_divides_by_one():
    mask = 0.1 * jnp.ones(5)
    assert_close(sequence(mask=mask), sequence(mask=mask, reduction="sum"))


def test_etrace_grad_returns_losses_in_three_forms():
    mask = jnp.asarray([0.0, 2.0, 0.0, 1.0, 0.5])
    raw = step_losses()
    options = {"mask": mask, "return_value": True}
    assert_close(sequence(**options)[1], raw)
    assert_close(sequence(loss_output="masked", **options)[1], raw * mask)
    assert_close(sequence(loss_output="scalar", **options)[1], (raw * mask).sum() / 3.5)
    assert_close(sequence(loss_output="scalar", reduction="sum", **options)[1], (raw * mask).sum())


def test_etrace_grad_returns_auxiliary_values_stacked_over_time():
    algo = learner_of(leaky(), XS[0])

    def loss(x):
        out = algo(x)
        return squares(out), {"out": out, "first": out[0]}

    grads, losses, aux = algo.etrace_grad(XS, step_fn=loss, has_aux=True, return_value=True)
    model = leaky()
    want = jnp.stack([model(x) for x in XS])
    assert_close(aux["out"], want)
    assert_close(aux["first"], want[:, 0])
    assert_close(losses, step_losses())
    assert_close(grads, sequence())
    algo = learner_of(leaky(), XS[0])
    pair = algo.etrace_grad(XS, step_fn=loss, has_aux=True)
    assert_close(pair[1]["out"], want)


def test_etrace_grad_slices_pytrees_in_lockstep():
    targets = {"a": normal(1, 5, 2), "b": normal(2, 5)}
    algo, other = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])

    def loss(learner, x, y):
        return ((learner(x) - y["a"]) ** 2).sum() * y["b"]

    got = algo.etrace_grad(XS, targets, step_fn=lambda x, y: loss(algo, x, y), reduction="sum")
    step = brainstate.transform.grad(lambda x, y: loss(other, x, y), other.param_states)
    each = [step(XS[t], jax.tree.map(lambda a: a[t], targets)) for t in range(5)]  # noqa: B023
    assert_close(got, jax.tree.map(lambda *g: sum(g), *each))


@pytest.mark.parametrize("kind", [lambda m: m.w, lambda m: [m.w, m.v], lambda m: {"x": m.w}])
def test_etrace_grad_of_chosen_weights(kind):
    algo = learner_of(leaky(), XS[0])
    weights = kind(algo.model4compile)
    got = algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)), weights=weights)
    assert_close(jax.tree.leaves(got)[0], sequence()[("w",)])


def test_etrace_grad_continues_from_the_present_state_and_leaves_the_new_one():
    a, b = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    grads = [
        a.etrace_grad(x, step_fn=lambda x: squares(a(x)), reduction="sum") for x in (XS[:2], XS[2:])
    ]
    whole = b.etrace_grad(XS, step_fn=lambda x: squares(b(x)), reduction="sum")
    assert_close(jax.tree.map(jnp.add, *grads), whole)
    assert_close(values(a), values(b))


def test_etrace_evolve_advances_like_calls_and_returns_outputs_on_demand():
    a, b, c, d = (learner_of(leaky(), XS[0]) for _ in range(4))
    want = jnp.stack([a(x) for x in XS])
    assert b.etrace_evolve(XS) is None
    assert_close(values(b), values(a))
    assert_close(c.etrace_evolve(XS, return_outputs=True), want)
    got = d.etrace_evolve(XS, step_fn=lambda x: d(x).sum(), return_outputs=True)
    assert_close(got, want.sum(-1))


@pytest.mark.parametrize("chunk", [2, 5, 8])
def test_etrace_evolve_in_windows_equals_steps(chunk):
    a, b = learner_of(leaky(), XS[0]), learner_of(leaky(), XS[0])
    want = a.etrace_evolve(XS, return_outputs=True)
    assert_close(b.etrace_evolve(XS, chunk_size=chunk, return_outputs=True), want)
    assert_close(values(b)[H], values(a)[H])
    assert_close(values(b)[("etraces", "0:w")], values(a)[("etraces", "0:w")])


# ------------------------------------------------------------------------------------ resetting


def traces_of(algo):
    return {k: t.value for k, t in algo.etraces.items()}


def test_reset_state_clears_traces_and_counter_and_keeps_the_model():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    h = algo.model4compile.h.value
    algo.reset_state()
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(traces_of(algo)))
    assert int(algo.running_index.value) == 0
    assert_close(algo.model4compile.h.value, h, 0)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("how", ["reset", "reset_all_states"])
def test_reset_starts_the_sequence_anew(how, batch):
    xs = XS if batch is None else normal(1, 5, batch, 2)
    algo = learner_of(leaky(batch), xs[0])
    first, start = online(algo, xs), None
    if how == "reset":
        algo.reset()
    else:
        brainstate.nn.reset_all_states(algo, batch_size=batch)
    start = values(algo)
    assert not np.asarray(start[H]).any()
    assert_close(online(algo, xs), first)


def resized(algo, batch):
    """The gradient after a change of batch size equals that of a new learner."""
    xs = normal(batch, 3, batch, 2)
    assert_close(online(algo, xs), online(learner_of(leaky(batch), xs[0]), xs))


@pytest.mark.parametrize("rule", ["d_rtrl", "pp_prop"])
def test_reset_changes_the_batch_size(rule):
    options = {"decay_or_rank": 0.9} if rule == "pp_prop" else {}
    xs = normal(2, 3, 4, 2)
    algo = braintrace.compile(Leaky(), rule, jnp.zeros((2, 2)), batch_size=2, **options)
    other = braintrace.compile(Leaky(), rule, xs[0], batch_size=4, **options)
    algo(jnp.ones((2, 2)))
    algo.reset(batch_size=4)
    assert_close(online(algo, xs), online(other, xs))


def test_reset_changes_the_batch_size_again_and_again():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    for batch in (5, 1, 3):
        algo.reset(batch_size=batch)
        resized(algo, batch)


def test_reset_without_batch_size_keeps_the_present_one():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    algo.reset(batch_size=5)
    algo.reset()
    assert algo.model4compile.h.value.shape == (5, 3)
    resized(algo, 5)


def test_reset_all_states_changes_the_batch_size():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    algo(jnp.ones((2, 2)))
    brainstate.nn.reset_all_states(algo, batch_size=3)
    resized(algo, 3)


class Folded(Leaky):
    """The operator sees batch and space folded into one axis."""

    def __init__(self):
        super().__init__(n_in=2, n=4)
        self.linear = braintrace.nn.Linear((3, 2), (3, 4), w_init=normal(1, 2, 4))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3, 4)))

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value = jnp.zeros((batch_size, 3, 4))

    def update(self, x):
        self.h.value = 0.5 * self.h.value + self.linear(x)
        return self.h.value


@pytest.mark.parametrize("batch", [None, 5])
def test_reset_finds_the_batch_axis_behind_a_folded_operator(batch):
    algo = braintrace.compile(Folded(), "d_rtrl", jnp.zeros((2, 3, 2)), batch_size=2)
    algo(jnp.ones((2, 3, 2)))
    algo.reset(batch_size=batch)
    batch = batch or 2
    assert algo.model4compile.h.value.shape == (batch, 3, 4)
    xs = normal(1, 3, batch, 3, 2)
    other = braintrace.compile(Folded(), "d_rtrl", xs[0], batch_size=batch)
    assert_close(online(algo, xs), online(other, xs))


class Decay(Leaky):
    """A learnable decay through element_wise, and states that start at one."""

    def __init__(self):
        super().__init__()
        self.a = brainstate.ParamState(jnp.full(3, 0.5))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.ones((3,) if batch_size is None else (batch_size, 3)))

    def reset_state(self, batch_size=None, **kwargs):
        self.h.value = jnp.ones((3,) if batch_size is None else (batch_size, 3))

    def update(self, x):
        a = braintrace.element_wise(self.a.value)
        self.h.value = a * self.h.value + braintrace.matmul(x, self.w.value)
        return self.h.value


@pytest.mark.parametrize("start, end", [(2, 4), (2, None), (1, None), (1, 4), (4, 1)])
def test_reset_of_a_batch_with_an_elementwise_parameter(start, end):
    algo = braintrace.compile(Decay(), "d_rtrl", jnp.zeros((start, 2)), batch_size=start)
    algo(jnp.ones((start, 2)))
    algo.reset(batch_size=end)
    batch = end or start
    xs = normal(1, 3, batch, 2)
    other = braintrace.compile(Decay(), "d_rtrl", xs[0], batch_size=batch)
    assert_close(online(algo, xs), online(other, xs))


@pytest.mark.parametrize("how", ["reset", "reset_all_states"])
def test_reset_of_a_mapped_learner_restores_the_initial_states(how):
    xs = normal(1, 3, 2, 2)
    algo = braintrace.compile(Decay(), "d_rtrl", xs[0], batch_size=2, vmap=True)
    first = online(algo, xs)
    algo.reset() if how == "reset" else brainstate.nn.reset_all_states(algo)
    assert_close(algo.module.model4compile.h.value, jnp.ones((2, 3)), 0)
    assert int(algo.module.running_index.value) == 0
    assert_close(online(algo, xs), first)


class Begun(Leaky):
    """For one sample, and says only how its state begins."""

    reset_state = brainstate.nn.Module.reset_state

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.full(3, 0.5))


class BegunBatch(Begun):
    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.full((batch_size, 3), 0.5))


class BegunWhole(Begun):
    """For two samples, and makes all that it has, its weight too."""

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.full((2, 3), 0.5))
        self.w = brainstate.ParamState(brainstate.random.randn(2, 3))


@pytest.mark.parametrize("how", ["mapped learner", "mapped model", "explicit", "whole"])
def test_reset_of_a_module_with_init_state_only_keeps_its_state(how):
    xs = normal(1, 3, 2, 2)
    if how == "mapped learner":
        model = Begun()
        algo = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2, vmap=True)
    elif how == "mapped model":
        model = Begun()
        algo = braintrace.compile(brainstate.nn.Map(model, init_map_size=2), "d_rtrl", xs[0])
    elif how == "whole":
        model = BegunWhole()
        brainstate.nn.init_all_states(model)
        algo = learner_of(model, xs[0])
    else:
        model = BegunBatch()
        algo = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    state, first = model.h, online(algo, xs)

    @brainstate.transform.jit
    def again():
        algo.reset()
        return algo.etrace_evolve(xs, return_outputs=True)

    algo.reset()
    assert model.h is state
    assert_close(state.value, jnp.full((2, 3), 0.5), 0)
    assert_close(online(algo, xs), first)
    last = again()[-1]  # states that are made while jit traces would be lost
    assert model.h is state
    assert_close(state.value @ model.v.value, last)


def test_reset_under_jit_keeps_shapes():
    algo = learner_of(leaky(2), jnp.zeros((2, 2)))
    first = online(algo, normal(1, 3, 2, 2))
    brainstate.transform.jit(algo.reset)()
    assert_close(online(algo, normal(1, 3, 2, 2)), first)


def test_states_made_anew_after_compiling_are_found_by_path():
    model = leaky()
    algo = learner_of(model, XS[0])
    algo(XS[0])
    old, stale = model.h, model.h.value
    brainstate.nn.init_all_states(model)
    assert model.h is not old
    algo(XS[1])
    fresh = leaky()
    fresh(XS[1])
    assert_close(model.h.value, fresh.h.value)
    assert_close(old.value, stale, 0)
    assert algo.hidden_states[("h",)] is model.h


def test_states_made_anew_with_another_batch_size_work_after_reset_state():
    model = leaky(2)
    algo = learner_of(model, jnp.zeros((2, 2)))
    brainstate.nn.init_all_states(model, batch_size=4)
    algo.reset_state(batch_size=4)
    resized(algo, 4)


# -------------------------------------------------------------------------------------- reports


def test_get_etrace_of_finds_a_weight_by_state_path_and_name():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    by_state = algo.get_etrace_of(algo.model4compile.w)
    (trace,) = by_state.values()
    assert trace["weight"].shape == (2, 3, 1)
    assert trace["bias"].shape == (3, 1)
    assert_close(trace["weight"][..., 0], jnp.broadcast_to(XS[0][:, None], (2, 3)))
    assert_close(by_state, algo.get_etrace_of(("w",)))
    assert_close(by_state, algo.get_etrace_of("w"))
    assert_close(by_state, algo.get_etrace_of("b"))


def test_get_etrace_of_an_untraced_weight_names_the_traced_ones():
    algo = learner_of(leaky(), XS[0])
    with pytest.raises(ValueError, match=r"v.*no eligibility trace") as error:
        algo.get_etrace_of(algo.model4compile.v)
    assert "w" in str(error.value) and "do:" in str(error.value)


def test_report_and_show_graph_name_groups_weights_and_reasons(capsys):
    brainstate.random.seed(0)
    algo = braintrace.compile(
        braintrace.nn.GRUCell(2, 3), "d_rtrl", jnp.zeros((2, 2)), batch_size=2, verbose=1
    )
    printed = capsys.readouterr().out
    assert printed == algo.report.to_str(level=1) + "\n"
    assert printed.startswith("=" * 120)
    for part in ("0: h", "Wz.weight", "Wh.weight", "Wr.weight", "weight_to_weight", "etp_mm"):
        assert part in printed
    assert algo.show_graph(return_msg=True) == algo.graph.report.to_str(level=2)
    assert capsys.readouterr().out == ""
    algo.show_graph()
    assert "only through Wh.weight" in capsys.readouterr().out
    assert algo.report.counts == {
        "hidden_groups": 1,
        "etrace_weights": 4,
        "excluded_weights": 1,
        "inexact": 3,
        "silent": 0,
        "warnings": 1,
        "errors": 0,
    }
    assert "hidden_groups=1" in repr(algo.report)
    assert repr(algo).splitlines() == [
        "D_RTRL of GRUCell: trace_factorization=per_param, vjp_method=single-step, batch_size=2",
        "  3 parameters: 2 trace, not exact; 1 within-step, not exact",
        "  576 bytes of traces",
    ]
    assert repr(braintrace.D_RTRL(braintrace.nn.GRUCell(2, 3))).endswith("not compiled")


def test_groups_and_relations_come_in_the_same_order_every_time():
    def names():
        brainstate.random.seed(0)
        cells = [braintrace.nn.LSTMCell(2, 3), braintrace.nn.GRUCell(3, 3)]
        model = brainstate.nn.Sequential(*cells)
        brainstate.nn.init_all_states(model, batch_size=2)
        graph = braintrace.compile_etrace_graph(model, jnp.zeros((2, 2)))
        return (
            [g.hidden_paths for g in graph.hidden_groups],
            [r.weight_path for r in graph.hidden_param_op_relations],
            [(d.kind, d.message) for d in graph.diagnostics],
        )

    first = names()
    assert len(first[0]) == 2 and len(first[1]) == 6
    assert all(names() == first for _ in range(3))


def test_learner_exposes_states_by_path():
    algo = learner_of(leaky(), XS[0])
    assert set(algo.param_states) == {("w",), ("b",), ("v",)}
    assert set(algo.hidden_states) == {("h",)}
    assert algo.other_states == {}
    assert algo.path_to_states[("h",)] is algo.model4compile.h
    assert algo.state_id_to_path[id(algo.model4compile.w)] == ("w",)
    assert algo.graph_executor is algo.executor


# ---------------------------------------------------------------- options, arguments, environment


def test_trace_dtype_bf16_is_stored_small_and_close_to_full():
    xs = normal(3, 8, 2)
    full = online(learner_of(leaky(), xs[0]), xs)
    algo = learner_of(leaky(), xs[0], trace_dtype=jnp.bfloat16)
    got = online(algo, xs)
    assert {a.dtype for a in jax.tree.leaves(traces_of(algo))} == {jnp.dtype(jnp.bfloat16)}
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(float)}
    assert_close(got, full, 2e-2)
    assert np.abs(got[("w",)] - full[("w",)]).max() > 0  # it is not the full trace


def test_unused_parameter_has_a_zero_gradient_and_a_diagnostic():
    class Extra(Leaky):
        def __init__(self):
            super().__init__()
            self.unused = brainstate.ParamState({"k": normal(0, 2, 2)})

    model = Extra()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    for grads in (online(algo, XS), algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x)))):
        assert_close(grads[("unused",)], {"k": jnp.zeros((2, 2))}, 0)
        assert set(grads) == set(algo.param_states)
    (record,) = algo.graph.explain(kind=braintrace.DiagnosticKind.PARAMETER_UNUSED)
    assert record.weight_path == ("unused",)
    assert "unused" in algo.report.to_str(level=2)


class Keyed(Leaky):
    def update(self, x, *, gain=1.0, shift=None):
        return super().update(gain * x + (0.0 if shift is None else shift))


def test_update_takes_keyword_arguments():
    model, twin = Keyed(), Keyed()
    for m in (model, twin):
        brainstate.nn.init_all_states(m)
    algo = braintrace.D_RTRL(model)
    algo.compile_graph(XS[0], gain=jnp.ones(()), shift=jnp.zeros(2))
    gain, shift = jnp.asarray(2.0), jnp.asarray([0.5, -0.5])
    step = brainstate.transform.grad(
        lambda x: squares(algo(x, gain=gain, shift=shift)), algo.param_states
    )
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])
    want = brainstate.transform.grad(
        lambda: sum(squares(twin(x, gain=gain, shift=shift)) for x in XS),
        twin.states(brainstate.ParamState),
    )()
    assert_close(got, want)
    window = algo(braintrace.MultiStepData(XS), gain=gain, shift=braintrace.MultiStepData(XS))
    assert window.shape == (5, 2)


class Clocked(Leaky):
    """Reads t, i, dt and fit of the call."""

    def update(self, x):
        t, i = brainstate.environ.get("t"), brainstate.environ.get("i")
        gain = t + 10 * i + 100 * brainstate.environ.get("dt")
        x = x * (gain if brainstate.environ.get("fit") else -1.0)
        return super().update(x)


def clocked():
    model = Clocked()
    brainstate.nn.init_all_states(model)
    with brainstate.environ.context(t=0.0, i=0, dt=0.1, fit=True):
        algo = learner_of(model, XS[0])
    return algo


def clock_reference(fit=True):
    model, outs = leaky(), []
    for i, x in enumerate(XS):
        outs.append(model(x * (0.1 * i + 10 * i + 100 * 0.2 if fit else -1.0)))
    return jnp.stack(outs)


KINDS = {"python": lambda a: a, "numpy": np.float64, "jax": jnp.asarray}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("fit", [True, False])
def test_environment_values_are_those_of_an_eager_call(kind, fit):
    algo, outs = clocked(), []
    for i, x in enumerate(XS):
        with brainstate.environ.context(t=kind(0.1 * i), i=i, dt=kind(0.2), fit=fit):
            outs.append(algo(x))
    assert_close(jnp.stack(outs), clock_reference(fit))


@pytest.mark.parametrize("fit", [True, False])
def test_environment_values_are_those_of_a_jitted_call_and_of_a_loop(fit):
    def step(algo, i, x):
        with brainstate.environ.context(t=0.1 * i, i=i, dt=0.2, fit=fit):
            return algo(x)

    a, b = clocked(), clocked()
    fast = brainstate.transform.jit(lambda i, x: step(a, i, x))
    jitted = jnp.stack([fast(jnp.asarray(i), x) for i, x in enumerate(XS)])
    looped = brainstate.transform.for_loop(lambda i, x: step(b, i, x), jnp.arange(5), XS)
    assert_close(jitted, clock_reference(fit))
    assert_close(looped, clock_reference(fit))


def test_environment_values_count_in_the_gradient_of_an_eager_call():
    algo = clocked()
    total = None
    for i, x in enumerate(XS):
        with brainstate.environ.context(t=0.1 * i, i=i, dt=0.2, fit=True):
            g = online(algo, [x])
        total = g if total is None else jax.tree.map(jnp.add, total, g)
    scaled = jnp.stack([x * (0.1 * i + 10 * i + 100 * 0.2) for i, x in enumerate(XS)])
    assert_close(total, bptt(leaky(), scaled))


@pytest.mark.parametrize("value", [2.0, 2, jnp.asarray(2.0)], ids=["float", "int", "array"])
def test_attribute_changed_between_calls_counts(value):
    class Gained(Leaky):
        gain = type(value)(1) if not isinstance(value, jax.Array) else jnp.asarray(1.0)

        def update(self, x):
            return super().update(self.gain * x)

    model, twin = Gained(), leaky()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    algo(XS[0]), twin(XS[0])
    model.gain = value
    assert_close(algo(XS[1]), twin(2 * XS[1]))


class Noisy(Leaky):
    def __init__(self):
        super().__init__()
        self.drop = brainstate.nn.Dropout(0.5)

    def update(self, x):
        return super().update(self.drop(x))


@pytest.mark.parametrize("way", ["eager", "jit", "for_loop"])
def test_random_states_advance_with_every_call(way):
    model = Noisy()
    brainstate.nn.init_all_states(model)
    brainstate.random.seed(0)
    with brainstate.environ.context(fit=True):
        algo = learner_of(model, XS[0])

        def step(x):
            model.h.value = jnp.zeros(3)
            return algo(x)

        xs = jnp.ones((12, 2))
        if way == "for_loop":
            outs = brainstate.transform.for_loop(step, xs)
        else:
            run = brainstate.transform.jit(step) if way == "jit" else step
            outs = jnp.stack([run(x) for x in xs])
    assert len(np.unique(np.asarray(outs)[:, 0])) > 1


def test_random_draws_are_those_of_the_bare_model():
    outs = []
    for learn in (False, True):
        model = Noisy()
        brainstate.nn.init_all_states(model)
        with brainstate.environ.context(fit=True):
            run = learner_of(model, XS[0]) if learn else model
            brainstate.random.seed(3)
            outs.append(jnp.stack([run(x) for x in XS]))
    assert_close(outs[1], outs[0])


class Fragile(Leaky):
    bad = False

    def update(self, x):
        self.h.value = self.h.value * 1.0
        if self.bad:
            raise RuntimeError("broken")
        return super().update(x)


@pytest.mark.parametrize("way", ["eager", "jit", "grad", "for_loop", "etrace_grad"])
def test_failed_call_leaves_the_learner_usable(way):
    model = Fragile()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    algo(XS[0])
    before = values(algo)
    grad = brainstate.transform.grad(lambda x: squares(algo(x)), algo.param_states)
    run = {
        "eager": lambda: algo(XS[1]),
        "jit": lambda: brainstate.transform.jit(algo)(XS[1]),
        "grad": lambda: grad(XS[1]),
        "for_loop": lambda: brainstate.transform.for_loop(algo, XS),
        "etrace_grad": lambda: algo.etrace_grad(XS, step_fn=lambda x: squares(algo(x))),
    }[way]
    model.bad = True
    with pytest.raises(RuntimeError, match="broken"):
        run()
    assert_close(values(algo), before, 0)
    model.bad = False
    twin = leaky()
    twin(XS[0])
    assert_close(algo(XS[1]), twin(XS[1]))


def test_refused_call_leaves_states_and_traces_as_they_were():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    before = values(algo)
    for bad in (jnp.ones(3), jnp.ones((2, 2))):
        with pytest.raises(ValueError):
            algo(bad)
    with pytest.raises(ValueError):
        algo.reset_state(batch_size=4)
    assert_close(values(algo), before, 0)


def test_integer_counters_advance_and_are_no_hidden_state():
    class Counting(Leaky):
        def __init__(self):
            super().__init__()
            self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

        def update(self, x):
            self.count.value = self.count.value + 1
            return super().update(x) * self.count.value

    model = Counting()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    got = online(algo, XS)
    assert int(model.count.value) == 5
    assert set(algo.other_states) == {("count",)}
    assert_close(got, bptt(_started(Counting()), XS))


def _started(model):
    brainstate.nn.init_all_states(model)
    return model


def test_state_in_a_dictionary_is_hidden_leaf_by_leaf():
    class Pair(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState({"in": normal(0, 2, 3), "decay": normal(1, 3)})
            self.s = brainstate.ShortTermState({"i": jnp.zeros(3), "v": jnp.zeros(3)})

        def update(self, x):
            s, w = self.s.value, self.w.value
            i = 0.5 * s["i"] + braintrace.matmul(x, w["in"])
            v = jnp.tanh(braintrace.element_wise(w["decay"]) * s["v"]) + i
            self.s.value = {"i": i, "v": v}
            return v

    algo = learner_of(Pair(), XS[0])
    (group,) = algo.graph.hidden_groups
    assert group.num_state == 2
    got = online(algo, XS)
    assert_alive(got)
    assert_close(got, bptt(Pair(), XS))


def test_stop_gradient_in_the_step_is_respected():
    class Stopped(Leaky):
        def update(self, x):
            h = 0.9 * jnp.tanh(lax.stop_gradient(self.h.value))
            self.h.value = h + braintrace.matmul(x, self.w.value, self.b.value)
            return self.h.value @ self.v.value

    algo = learner_of(_started(Stopped()), XS[0])
    assert_close(online(algo, XS), bptt(_started(Stopped()), XS))


def test_learner_inside_a_larger_module_learns():
    class Outer(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.learner = learner_of(leaky(), XS[0])
            self.head = brainstate.ParamState(normal(4, 2, 1))

        def update(self, x):
            return self.learner(x) @ self.head.value

    outer = Outer()
    params = outer.states(brainstate.ParamState)
    step = brainstate.transform.grad(lambda x: squares(outer(x)), params)
    got = jax.tree.map(lambda *g: sum(g), *[step(x) for x in XS])
    head, model = outer.head.value, leaky()
    want = bptt(model, XS, lambda out: squares(out @ head))
    assert_close(got[("learner", "model4compile", "w")], want[("w",)])
    assert_alive(got)


def test_executor_returns_the_numbers_of_a_step():
    algo = learner_of(leaky(), XS[0])
    algo.model4compile.h.value = normal(0, 3)
    before = values(algo)
    out, hiddens, others, (xs, fs), jacobians = algo.executor.solve_h2w_h2h_jacobian(XS[0])
    assert_close(values(algo), before, 0)
    assert_close(xs[0], XS[0])
    assert_close(fs[0], jnp.ones((3, 1)))
    h = before[H]
    assert_close(jacobians[0][:, 0, 0], 0.9 / jnp.cosh(h) ** 2)
    assert others == {}
    assert_close(out, hiddens[("h",)] @ algo.model4compile.v.value)


def test_grad_expon_accumulates_with_decay():
    acc = braintrace.GradExpon({"w": jnp.zeros(2)}, 0.5)
    acc({"w": jnp.ones(2)})
    got = acc({"w": jnp.ones(2)})
    assert_close(got, {"w": jnp.full(2, 1.5)})
    assert_close(acc.gradients.value, got)


def test_deep_copy_of_a_learner_is_independent():
    algo = learner_of(leaky(), XS[0])
    algo(XS[0])
    twin = copy.deepcopy(algo)
    before = values(algo)
    got = online(twin, XS[1:3])
    assert_close(values(algo), before, 0)
    assert_close(got, online(algo, XS[1:3]))
    assert_close(values(twin), values(algo))


def test_states_saved_and_put_back_continue_the_sequence():
    algo = learner_of(recurrent(), XS[0])
    algo(XS[0])
    saved = values(algo)
    first = online(algo, XS[1:])
    restore(algo, saved)
    assert_close(online(algo, XS[1:]), first)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_small_types_are_kept(dtype, tolerance):
    def make():
        model = leaky()
        for state in model.states().values():
            state.value = state.value.astype(dtype)
        return model

    xs = XS.astype(dtype)
    algo = learner_of(make(), xs[0])
    got = online(algo, xs)
    assert {a.dtype for a in jax.tree.leaves((got, values(algo)[H], traces_of(algo)))} == {
        jnp.dtype(dtype)
    }
    assert_close(got, bptt(make(), xs), tolerance)


def passed_on(model, x):
    h = model.h.value
    model.h.value = model.g.value + braintrace.matmul(x, model.w.value)
    model.g.value = h


def stored_twice(model, x):
    model.h.value = 0.5 * model.h.value + braintrace.matmul(x, model.w.value)
    model.g.value = model.h.value


def forgotten(model, x):
    model.h.value = 0.5 * model.h.value + model.g.value + braintrace.matmul(x, model.w.value)
    model.g.value = jnp.zeros(3)


def rematerialised(model, x):
    step = jax.checkpoint(lambda h, w: jnp.tanh(h) * 0.5 + braintrace.matmul(x, w))
    model.h.value = step(model.h.value, model.w.value)


def nested_jit(model, x):
    @brainstate.transform.jit
    def step(x):
        model.h.value = 0.5 * jnp.tanh(model.h.value) + braintrace.matmul(x, model.w.value)

    step(x)


def mapped_inside(model, x):
    w = model.w.value.T[:, :, None]
    y = jax.vmap(lambda v: braintrace.matmul(x, v))(w).reshape(3)
    model.h.value = 0.5 * model.h.value + y


STEPS = [passed_on, stored_twice, forgotten, rematerialised, nested_jit, mapped_inside]


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_unusual_steps_equal_bptt(step):
    class Unusual(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(0, 2, 3))
            self.h = brainstate.HiddenState(jnp.zeros(3))
            self.g = brainstate.HiddenState(jnp.ones(3))

        def update(self, x):
            step(self, x)
            return self.h.value * self.g.value + self.h.value

    got = online(learner_of(Unusual(), XS[0]), XS)
    assert_alive(got)
    assert_close(got, bptt(Unusual(), XS))


def test_states_of_a_learner_that_met_two_programs_can_be_listed_and_reset():
    class Switched(Leaky):
        def update(self, x):
            return super().update(2 * x if brainstate.environ.get("fit") else x)

    model = Switched()
    brainstate.nn.init_all_states(model)
    with brainstate.environ.context(fit=True):
        algo = learner_of(model, jnp.ones(2))
    with brainstate.environ.context(fit=False):
        algo(jnp.ones(2))
    assert any("etraces" in map(str, path) for path in algo.states())
    brainstate.nn.reset_all_states(algo)


def test_trace_dtype_keeps_the_imaginary_part_of_a_complex_weight():
    class Turning(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(1, 2, 3) + 1j * normal(2, 2, 3))
            self.h = brainstate.HiddenState(jnp.zeros(3, complex))

        def update(self, x):
            self.h.value = (0.8 + 0.3j) * self.h.value + braintrace.matmul(x + 0j, self.w.value)
            return jnp.abs(self.h.value) ** 2

    def gradient(**options):
        algo = learner_of(Turning(), jnp.ones(2), **options)
        return algo.etrace_grad(normal(3, 4, 2), step_fn=lambda x: algo(x).sum())[("w",)]

    exact, rounded = gradient(), gradient(trace_dtype=jnp.bfloat16)
    assert np.abs(np.asarray(exact).imag).max() > 0.1
    np.testing.assert_allclose(rounded, exact, rtol=1e-5)


def test_static_parameters_of_the_call_are_used():
    scaled = braintrace.register_primitive("scaled_by", lambda x, w, fn: fn(x @ w))

    class Model(Leaky):
        fn = staticmethod(lambda y: y)

        def update(self, x):
            self.h.value = 0.5 * self.h.value + scaled.bind(x, self.w.value, fn=self.fn)
            return self.h.value

    model = Model()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    first = algo(jnp.ones(2))
    model.fn = lambda y: 100 * y
    brainstate.nn.init_all_states(model)
    np.testing.assert_allclose(algo(jnp.ones(2)), 100 * first)


@pytest.mark.parametrize("block_size", [None, 1])
def test_an_operator_registered_again_is_the_one_a_learner_uses(block_size):
    register = lambda f: braintrace.register_primitive("registered_twice", f)
    gain = register(lambda x, w: x @ w)

    class Model(Leaky):
        def update(self, x):
            self.h.value = 0.5 * self.h.value + gain.bind(x, self.w.value)
            return self.h.value

    model = Model()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, XS[0])
    step = lambda net, x: squares(net(x)) + squares(gain.bind(x, model.w.value))

    def gradients():
        algo.reset()
        options = {"reduction": "sum", "block_size": block_size}
        found = algo.etrace_grad(XS, step_fn=lambda x: step(algo, x), **options)
        algo.reset()
        return found["w",], braintrace.verify.bptt_grad(model, step, XS)["w",]

    old, truth = gradients()
    assert_close(old, truth)
    gain = register(lambda x, w: jnp.tanh(x @ w))
    new, truth = gradients()
    assert_close(new, truth)
    assert np.abs(new - old).max() > 0.1
    np.testing.assert_array_equal(algo(XS[0]), gain.bind(XS[0], model.w.value))
    register(lambda x, w: 0 * (x @ w))  # the model still holds the one before
    assert_close(gradients()[0], truth)


def test_report_names_what_the_tail_of_a_weight_loses():
    class Centred(Leaky):
        def update(self, x):
            y = braintrace.matmul(x, self.w.value)
            self.h.value = 0.5 * self.h.value + (y - y.mean()) * self.b.value
            return self.h.value

    model = Centred()
    brainstate.nn.init_all_states(model)
    text = learner_of(model, jnp.ones(2)).report.to_str()
    assert "w -> h: reduce_sum adds up units (" in text
    assert "test_learner.py:" in text


def test_side_effects_of_a_step_happen_once(capfd):
    class Talking(Leaky):
        def update(self, x):
            jax.debug.print("said once")
            return super().update(x)

    model = Talking()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    jax.effects_barrier()
    assert "said once" not in capfd.readouterr().out
    algo(jnp.ones(2))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("said once") == 1


def test_spikes_as_booleans_are_filtered_as_numbers():
    product = braintrace.register_primitive("spiking_product", lambda x, w: x.astype(float) @ w)

    class Model(Leaky):
        def update(self, x):
            self.h.value = jnp.tanh(0.5 * self.h.value + product.bind(x, self.w.value))
            return self.h.value

    def gradient(xs):
        model = Model()
        brainstate.nn.init_all_states(model)
        algo = braintrace.pp_prop(model, 0.9)
        algo.compile_graph(xs[0])
        return algo.etrace_grad(xs, step_fn=lambda x: (algo(x) ** 2).sum())[("w",)]

    spikes = normal(3, 5, 2) > 0
    np.testing.assert_allclose(gradient(spikes), gradient(spikes.astype(float)), rtol=1e-12)


def test_integer_parameters_are_left_out_of_the_gradient():
    class Indexed(Leaky):
        def __init__(self):
            super().__init__()
            self.order = brainstate.ParamState(jnp.asarray([1, 0]))

        def update(self, x):
            return super().update(x[self.order.value])

    model = Indexed()
    brainstate.nn.init_all_states(model)
    algo = learner_of(model, jnp.ones(2))
    grads = algo.etrace_grad(jnp.ones((3, 2)), step_fn=lambda x: squares(algo(x)))
    assert ("order",) not in grads and ("w",) in grads


def test_batch_larger_than_one_block_of_the_contraction_gives_the_same_gradient():
    xs = normal(4, 3, 70, 2)

    def gradient(batch_first):
        model = leaky(batch_first.shape[1])
        algo = learner_of(model, batch_first[0])
        return algo.etrace_grad(batch_first, step_fn=lambda x: squares(algo(x)), reduction="sum")

    parts = [gradient(xs[:, i : i + 10]) for i in range(0, 70, 10)]
    assert_close(gradient(xs), jax.tree.map(lambda *p: sum(p), *parts))
