"""Learning while the sequence runs: gradients and updates in turn, in one scan."""

import gc
import sys

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from interpret import program

from .block_models import CASES
from .blocks import (
    Noisy,
    Recurrent,
    assert_same,
    called_twice,
    closed_loop,
    counter,
    designed,
    encoder_with_memory,
    learner,
    noise_in_the_loss,
    plain,
    readout_outside,
    running_loss,
)
from .reference import compiles, normal, restore
from .reference import values as values_of

T = 11
XS, YS = normal(7, T, 2), normal(8, T, 2)
ADAM = optax.adam(1e-2)


def trained_in_blocks(algo):
    return algo.last_run.in_blocks


def kept(algo):
    """What is left of a learner, besides the state of the optimizer."""
    return {k: v for k, v in values_of(algo).items() if k[0] != "optimizer_state"}


def remembered(algo):
    """What the optimizer remembers."""
    return [] if algo.optimizer_state is None else jax.tree.leaves(algo.optimizer_state.value)


def loop(algo, step, sequences, update, every, weights=None, mask=None, **options):
    """The reference: a gradient of a few steps one by one, an update, and so on."""
    weights = algo.param_states if weights is None else weights

    def piece(mask, *slices):
        found = algo.etrace_grad(
            *slices,
            step_fn=step,
            block_size=1,
            weights=weights,
            mask=mask,
            return_value=True,
            **options,
        )
        update(weights, found[0])
        return found[1:]

    fast = program(piece)
    length = len(jax.tree.leaves(sequences)[0])
    cut = lambda i: jax.tree.map(lambda a: a[i : i + every], (mask, *sequences))
    parts = [fast(*cut(i)) for i in range(0, length, every)]
    joined = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return joined if options.get("has_aux") else joined[0]


def by_optax(optimizer, weights):
    """An update of states by an optax transformation, and the state of the transformation."""
    values = lambda: {k: s.value for k, s in weights.items()}
    memory = brainstate.LongTermState(optimizer.init(values()))

    def update(weights, grads):
        change, memory.value = optimizer.update(grads, memory.value, values())
        for k, s in weights.items():
            s.value = optax.apply_updates(s.value, change[k])

    return update, memory


def check(
    make=learner,
    step=plain,
    sequences=(XS, YS),
    every=1,
    optimizer=ADAM,
    blocks=True,
    chosen=None,
    calls=1,
    **options,
):
    """Training leaves what the loop leaves: losses, weights, states, traces, optimizer."""
    algo, other = make(), make()
    losses = step(algo), step(other)
    weights = [a.param_states if chosen is None else chosen(a) for a in (algo, other)]
    leaves = jax.tree.leaves
    start = leaves([s.value for s in weights[0].values()])
    update, memory = by_optax(optimizer, weights[1])
    for _ in range(calls):
        brainstate.random.seed(1)
        got = algo.etrace_train(
            *sequences,
            step_fn=losses[0],
            optimizer=optimizer,
            update_every=every,
            weights=weights[0],
            **options,
        )
        brainstate.random.seed(1)
        want = loop(other, losses[1], sequences, update, every, weights[1], **options)
        assert_same(got, want)
    assert_same(kept(algo), kept(other))
    assert_same(remembered(algo), leaves(memory.value))
    assert trained_in_blocks(algo) == blocks
    end = leaves([s.value for s in weights[0].values()])
    assert all(np.abs(a - b).max() > 1e-6 for a, b in zip(end, start, strict=True))
    return algo


# ------------------------------------------------------------------------------ rules and rhythms


@pytest.mark.parametrize("every", [1, 2, 3, 5, 8, T])
def test_training_equals_gradients_and_updates_in_turn(every):
    check(every=every)


@pytest.mark.parametrize("rule, every", [("pp_prop", 1), ("snap1", 2), ("snap2", 1), ("rtrl", 3)])
def test_training_by_every_rule(rule, every):
    check(lambda: learner(rule), every=every)


def windows(chunk):
    wrap = bt.MultiStepData if chunk > 1 else lambda x: x
    return lambda algo: lambda x, y: jnp.sum((algo(wrap(x)) - y) ** 2, -1)


@pytest.mark.parametrize(
    "rule, chunk, every",
    [
        ("d_rtrl", 1, 2),
        ("d_rtrl", 3, 6),
        ("d_rtrl", 4, 12),
        ("pp_prop", 2, 4),
    ],
)
def test_training_in_windows(rule, chunk, every):
    make = lambda: learner(rule, vjp_method="multi-step")
    check(make, windows(chunk), every=every, chunk_size=chunk)


def test_training_in_windows_made_by_the_step_function():
    sequences = (normal(1, 5, 3, 2), normal(2, 5, 3, 2))
    step = lambda algo: lambda x, y: jnp.sum((algo(bt.MultiStepData(x)) - y) ** 2)
    check(step=step, sequences=sequences, every=2, optimizer=optax.sgd(1e-3))


# `custom` is not linear in its weight, `lora` is the product of two, `delay_line` has many slots:
# their steps do not wait beside the traces.
TRAINED = (
    *("gru_batched", "learnable_decay", "conv", "embedding_batched", "lora_batched", "custom"),
    *("complex_state", "operators_inside_bodies", "operator_in_a_branch", "delay_line"),
)


@pytest.mark.parametrize("name", TRAINED)
def test_training_of_every_kind_of_model(name):
    def make():
        brainstate.random.seed(0)
        case = CASES[name]()
        algo = bt.D_RTRL(case.model)
        algo.compile_graph(case.x0)
        return algo

    twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), CASES[name]().sequences)
    check(make, sequences=twice, every=1 + len(name) % 2, optimizer=optax.sgd(1e-2))


tanh_product = bt.register_primitive("train_tanh_product", lambda x, w: x @ jnp.tanh(w))


class Bounded(Recurrent):
    """An operator that is not linear in its weight."""

    def update(self, x):
        y = tanh_product.bind(x, self.w.value) + self.b.value * 0
        self.h.value = 0.9 * jnp.tanh(self.h.value) + y + bt.matmul(self.h.value, self.r.value)
        return self.h.value @ self.v.value + self.b.value[:2].sum()


@pytest.mark.parametrize("every", [1, 3])
def test_training_of_an_operator_that_is_not_linear_in_its_weight(every):
    check(lambda: learner(model=Bounded), every=every, optimizer=optax.sgd(0.05))


# -------------------------------------------------------------------------------------- optimizers

OPTAX = {
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.adam(1e-2)
    ),
    "schedule": lambda: optax.adamw(optax.exponential_decay(1e-2, 2, 0.5), weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTAX)
def test_optax_transformations(name):
    check(every=2, optimizer=OPTAX[name]())


def test_state_of_the_optimizer_continues_in_the_next_call():
    algo = check(every=2, calls=2)
    assert int(remembered(algo)[0]) == 12


@pytest.mark.parametrize("second", ["w", "u"], ids=["another shape", "the same shape"])
def test_other_weights_start_anew(second):
    algo = learner()
    algo.model4compile.u = brainstate.ParamState(normal(9, 3, 2))  # of the shape of v
    m = algo.model4compile
    step = lambda x, y: jnp.sum((algo(x) - y) ** 2) + jnp.sum(m.u.value**2)
    train = lambda w: algo.etrace_train(XS, YS, step_fn=step, optimizer=ADAM, weights=[w])
    train(m.v)
    train(getattr(m, second))
    assert int(remembered(algo)[0]) == T


def test_another_transformation_starts_anew():
    algo = learner()
    count = lambda: int(remembered(algo)[0])
    run = lambda optimizer: algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=optimizer)
    run(ADAM), run(ADAM)
    assert count() == 2 * T
    for optimizer in (optax.adam(1e-3), optax.adam(1e-4)):  # a schedule by hand
        run(optimizer), run(optimizer)
        assert count() == 2 * T
    run(optax.adam(1e-3))
    assert count() == T
    with pytest.warns(UserWarning, match="optimizer(.|\n)*why:(.|\n)*do:") as seen:
        run(optax.adam(1e-3))  # one for every call
    assert seen[0].filename == __file__


@pytest.mark.parametrize("pair", [(1e-2, 1e-1), (jnp.asarray(1e-2), jnp.asarray(1e-1))])
def test_learning_rate_is_that_of_the_optimizer_that_is_passed(pair):
    algo = learner()
    start = {k: s.value for k, s in algo.model4compile.states().items()}
    moved = []
    for rate in pair:
        restore(algo.model4compile, start)
        algo.reset_state()
        algo.etrace_train(XS[:1], YS[:1], step_fn=plain(algo), optimizer=optax.sgd(rate))
        moved.append(algo.model4compile.v.value - start[("v",)])
    assert_same(moved[1], 10 * moved[0])


@pytest.mark.parametrize("kind, registered", [("Adam", False), ("SGD", True)])
def test_optimizers_of_braintools(kind, registered):
    make = lambda: getattr(braintools.optim, kind)(1e-2)
    algo, other = learner(), learner()
    optimizer, reference = make(), make()
    reference.register_trainable_weights(other.param_states)
    if registered:
        optimizer.register_trainable_weights(algo.param_states)
    update = lambda weights, grads: reference.update(grads)
    for _ in range(2):
        got = algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=optimizer, update_every=3)
        assert_same(got, loop(other, plain(other), (XS, YS), update, 3))
    assert_same(kept(algo), kept(other))
    own = lambda o: jax.tree.leaves((o.opt_state.value, o.step_count.value))
    assert_same(own(optimizer), own(reference))


# ------------------------------------------------------------------------- options, step functions


MASKS = {
    "bool": np.array([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0], bool),
    "float": np.array([0.5, 0, 2, 1, 0, 0, 0, 1, 1, 0, 3]),
}


@pytest.mark.parametrize(
    "kind, every, reduction", [("bool", 1, "mean"), ("float", 3, "mean"), ("float", 2, "sum")]
)
def test_masks_while_training(kind, every, reduction):
    check(every=every, mask=jnp.asarray(MASKS[kind]), reduction=reduction)


def test_nan_of_uncounted_steps_reaches_no_weight():
    mask = jnp.asarray([1.0] * 8 + [0] * 3)
    late = (XS.at[8:].set(jnp.nan), YS.at[8:].set(jnp.nan))
    algo = check(sequences=late, every=2, mask=mask, optimizer=optax.sgd(1e-2))
    assert all(np.isfinite(s.value).all() for s in algo.param_states.values())


def test_auxiliary_values_while_training():
    def step(algo):
        def loss(x, y):
            out = algo(bt.MultiStepData(x))
            return jnp.sum((out - y) ** 2, -1), {"out": out, "y": y}

        return loss

    make = lambda: learner(vjp_method="multi-step")
    check(make, step, every=4, chunk_size=2, has_aux=True)


CHOSEN = {
    "state": (lambda m: m.w, lambda m: {0: m.w}),
    "list": (lambda m: [m.v, m.w], lambda m: {0: m.v, 1: m.w}),
    "dict": (lambda m: {"z": m.w, "a": m.v}, lambda m: {"z": m.w, "a": m.v}),
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_training_of_chosen_weights(kind):
    algo, other = learner(), learner()
    weights, same = CHOSEN[kind][0](algo.model4compile), CHOSEN[kind][1](other.model4compile)
    options = {"optimizer": ADAM, "update_every": 2, "weights": weights}
    got = algo.etrace_train(XS, YS, step_fn=plain(algo), **options)
    update, _ = by_optax(ADAM, same)
    assert_same(got, loop(other, plain(other), (XS, YS), update, 2, same))
    assert_same(kept(algo), kept(other))
    still, start = algo.model4compile.r.value, learner().model4compile.r.value
    assert np.array_equal(still, start)


def with_own(name):
    return lambda algo: {"own": getattr(algo, name), "w": algo.model4compile.w}


AROUND = {
    "readout_outside": (readout_outside, with_own("out")),
    "encoder_with_memory": (encoder_with_memory, with_own("encoder")),
    "noise_in_the_loss": (noise_in_the_loss, None),
    "counter": (counter, None),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_the_learner_is_trained(name):
    step, chosen = AROUND[name]
    check(step=step, chosen=chosen, every=2)


def test_noise_of_the_model_while_training():
    check(lambda: learner(model=Noisy), every=2)


LOOPS = [(closed_loop, 1), (running_loss, 4), (called_twice, 2)]


@pytest.mark.parametrize("step, every", LOOPS)
def test_loops_through_the_step_function_are_trained(step, every):
    check(step=step, every=every, optimizer=optax.sgd(1e-4))


def test_training_of_a_mapped_learner():
    xs, ys = normal(1, 7, 3, 2), normal(2, 7, 3, 2)
    algo = bt.compile(Recurrent(), "d_rtrl", xs[0], batch_size=3, vmap=True)
    other = bt.compile(Recurrent(), "d_rtrl", xs[0], batch_size=3)
    update, memory = by_optax(ADAM, other.param_states)
    for _ in range(2):
        got = algo.etrace_train(xs, ys, step_fn=plain(algo), optimizer=ADAM, update_every=2)
        assert_same(got, loop(other, plain(other), (xs, ys), update, 2))
    found = {k: s.value for k, s in algo.module.model4compile.states().items()}
    assert_same(found, {k: s.value for k, s in other.model4compile.states().items()})
    assert_same(remembered(algo), jax.tree.leaves(memory.value))


def test_batched_model_while_training():
    xs, ys = normal(1, 9, 3, 2), normal(2, 9, 3, 2)
    check(lambda: learner(x=xs[0], batch=3), sequences=(xs, ys))


def test_states_saved_before_training_can_be_put_back():
    algo = learner()
    run = lambda: algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=optax.sgd(1e-2))
    algo.etrace_evolve(XS[:2])
    saved = values_of(algo)
    first, end = run(), kept(algo)
    for k, s in algo.states().items():
        if k in saved:
            s.value = saved[k]
    assert_same((run(), kept(algo)), (first, end))


# ----------------------------------------------------------------------------------- cost of a call


@pytest.mark.parametrize("every", [1, 3])
def test_second_call_compiles_nothing(every):
    algo, optimizer = learner(), optax.sgd(1e-2)

    def run(xs):
        target = jnp.zeros(2)
        algo.etrace_train(
            xs,
            step_fn=lambda x: jnp.sum((algo(x) - target) ** 2),
            optimizer=optimizer,
            update_every=every,
        )

    run(XS)
    assert compiles(lambda: run(YS)) == 0


def test_calls_hold_on_to_nothing():
    algo = learner()
    run = lambda: algo.etrace_train(XS, YS, step_fn=plain(algo), optimizer=ADAM)
    counts = []
    for _ in range(3):  # the first calls compile
        for _ in range(4):
            run().block_until_ready()
        algo._losses.look()  # losses are held until they are computed and looked at
        gc.collect()
        counts.append((len(gc.get_objects()), len(jax.live_arrays())))
    _, (objects, arrays), (after, now) = counts
    assert after < objects + 4 and now == arrays, counts


@pytest.mark.parametrize("lengths", [(8, 11), (11, 3)])
def test_sequences_of_another_length_with_the_same_learner(lengths):
    algo, other = learner(), learner()
    update, _ = by_optax(ADAM, other.param_states)
    for n in lengths:
        got = algo.etrace_train(XS[:n], YS[:n], step_fn=plain(algo), optimizer=ADAM)
        assert_same(got, loop(other, plain(other), (XS[:n], YS[:n]), update, 1))
    assert_same(kept(algo), kept(other))


def test_training_under_jit():
    """Called twice: what the optimizer remembers continues."""
    algo, other = learner(), learner()
    train = lambda a: (
        lambda x, y: a.etrace_train(x, y, step_fn=plain(a), optimizer=ADAM, update_every=2)
    )
    fast = brainstate.transform.jit(train(algo))
    with pytest.raises(ValueError) as error:
        fast(XS, YS)
    designed(error, "learner.init_optimizer")
    algo.init_optimizer(ADAM)
    for sequences in ((XS, YS), (YS, XS)):
        assert_same(fast(*sequences), train(other)(*sequences))
    assert_same((kept(algo), remembered(algo)), (kept(other), remembered(other)))
    assert compiles(lambda: fast(XS, YS)) == 0


def test_training_lowers_the_loss():
    algo = bt.compile(bt.nn.GRUCell(1, 8), "d_rtrl", jnp.zeros(1), seed=0)
    algo.out = brainstate.ParamState(normal(0, 8, 1) / 3)
    xs = jnp.sin(0.3 * jnp.arange(400.0))[:, None]
    step = lambda x, y: jnp.sum((algo(x) @ algo.out.value - y) ** 2)
    weights = [algo.out, *algo.param_states.values()]
    losses = algo.etrace_train(
        xs[:-1], xs[1:], step_fn=step, optimizer=optax.adam(1e-2), weights=weights
    )
    assert losses[-50:].mean() < 0.1 * losses[:50].mean()


# ------------------------------------------------------------------------------ errors, progress


def refused(kind, *parts, algo=None, **options):
    algo = learner() if algo is None else algo
    given = {"step_fn": plain(algo), "optimizer": ADAM} | options
    with pytest.raises(kind) as error:
        algo.etrace_train(XS, YS, **given)
    designed(error, *parts)
    assert int(algo.running_index.value) == 0


@pytest.mark.parametrize(
    "bad, kind",
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)],
)
def test_wrong_number_of_steps_between_updates(bad, kind):
    refused(kind, "update_every", update_every=bad)


def test_updates_within_a_window_are_refused():
    algo = learner(vjp_method="multi-step")
    refused(ValueError, "update_every=3", "chunk_size=2", algo=algo, update_every=3, chunk_size=2)


@pytest.mark.parametrize("bad", [None, "adam", 0.1, optax.adam])
def test_what_is_no_optimizer_is_refused(bad):
    refused(TypeError, "optimizer", optimizer=bad)


@pytest.mark.parametrize("bad", [None, "loss"])
def test_training_without_a_step_function(bad):
    refused(TypeError, "etrace_train", "step_fn", step_fn=bad)


def test_training_with_an_unknown_reduction():
    refused(ValueError, "reduction", reduction="max")


def test_optimizer_of_other_weights_is_refused():
    optimizer = braintools.optim.SGD(0.1)
    optimizer.register_trainable_weights(learner().param_states)
    refused(ValueError, "weights", optimizer=optimizer)


def test_progress_without_tqdm_says_how_to_get_it(monkeypatch):
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(ImportError, "tqdm", "pip install 'braintrace-online[progress]'", progress=True)


@pytest.mark.parametrize("step", [plain, closed_loop], ids=["blocks", "steps"])
def test_progress_bar_reaches_its_end(step, capsys):
    algo = learner()
    algo.etrace_train(XS, YS, step_fn=step(algo), optimizer=ADAM, update_every=2, progress=True)
    assert f"{T}/{T}" in capsys.readouterr().err
