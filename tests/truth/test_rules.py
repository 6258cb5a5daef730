"""The rules as learners: each against its reference, and the same battery for all of them."""

from dataclasses import dataclass, field
from functools import cache

import brainstate
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models import (
    EXACT,
    OPERATORS,
    RECURRENT,
    TIGHT,
    Draw,
    T,
    assert_equal,
    different,
    living,
    matmul,
    net,
    seen,
    spike,
    step_fn,
)

import braintrace as bt
from braintrace.verify._compare import _window_losses, comparison, online_grad
from interpret import program
from oracle import compare_to_rule, definition, rule_on

LIVE: dict = {}


@models.case(LIVE)
def alif(draw):
    params = {"w": draw(3, 4, scale=1.5), "r": draw(4, 4), "out": draw(4, 2), "b": draw(2)}

    @net(params, {"z": draw(2, 4), "v": draw(2, 4), "a": abs(draw(2, 4))})
    def model(m, x):
        y = matmul(x, m.w.value) + matmul(m.z.value, m.r.value)
        v = 0.9 * m.v.value - 0.3 * m.z.value + y
        m.z.value = spike(v - 0.3 - 0.5 * m.a.value)
        m.a.value = 0.8 * m.a.value + m.z.value
        m.v.value = v
        return matmul(m.z.value + 0.1 * m.v.value, m.out.value, m.b.value)

    return model, (2, 3)


# Traces of A on two states, of B on the second and a third: the first passes its cotangent on to
# the third. In the longer chain the states have other shapes, and operators are inside of bodies.


@models.case(LIVE)
def overlapping(draw):
    params = {k: draw(3, 3) for k in "ABC"}

    @net(params, {"h1": draw(3), "h2": draw(3), "h3": draw(3)})
    def model(m, x):
        a, b = matmul(x, m.A.value), matmul(x, m.B.value)
        m.h1.value = 0.9 * m.h1.value + a
        m.h2.value = 0.9 * m.h2.value + a + b
        m.h3.value = 0.9 * m.h3.value + b + matmul(m.h1.value, m.C.value)
        return m.h3.value

    return model, (3,)


@models.case(LIVE)
def overlapping_chain(draw):
    params = {"A": draw(3, 4), "B": draw(3, 4), "C": draw(2, 4), "D": draw(4, 2), "E": draw(4, 3)}

    @net(params, {"h1": draw(4), "h2": draw(2, 2), "h3": draw(2, 1), "h4": draw(2), "h5": draw(3)})
    def model(m, x):
        w = m.A.value
        a = jax.lax.cond(x[0] > 0, lambda: matmul(x, w), lambda: jnp.tanh(matmul(x, 0.5 * w)))
        b = jax.lax.scan(lambda c, v: (c + matmul(v, m.B.value), None), a * 0, x * jnp.eye(3))[0]
        m.h1.value = 0.9 * m.h1.value + a
        m.h2.value = 0.8 * m.h2.value + (a * b).reshape(2, 2)
        m.h3.value = 0.7 * m.h3.value + b[:2, None] + matmul(m.h1.value, m.D.value)[:, None]
        c = matmul(m.h3.value[:, 0], m.C.value)
        m.h4.value = 0.6 * m.h4.value + c[2:] + m.h2.value[0]
        m.h5.value = jnp.tanh(0.6 * m.h5.value + c[:3] + matmul(m.h1.value, m.E.value))
        return jnp.concatenate([m.h4.value, m.h5.value])

    return model, (3,)


ALL = {**EXACT, **RECURRENT, **OPERATORS, **LIVE}


@dataclass(frozen=True)
class Rule:
    """A learner by name, its options, and what it is called with besides the input."""

    name: str
    options: dict = field(default_factory=dict)
    called_with: str | None = None
    windows: bool = True


KINDS = {
    "eprop": bt.EProp,
    "rflo": bt.RFLO,
    "ostl_recurrent": bt.OSTLRecurrent,
    "ostl_feedforward": bt.OSTLFeedforward,
    "ottt": bt.OTTT,
    "otpe": bt.OTPE,
    "osttp": bt.OSTTP,
    "three_factor": bt.ThreeFactor,
    "decolle": bt.DECOLLE,
    "stllr": bt.STLLR,
    "no_trace": bt.NoTrace,
}
RULES = {
    "eprop": Rule("eprop", {"kappa_filter_decay": 0.6}),
    "eprop unfiltered": Rule("eprop"),
    "rflo": Rule("rflo", {"random_feedback_key": None}),
    "rflo leak": Rule("rflo", {"leak": 0.7, "random_feedback_key": None}),
    "ostl_recurrent": Rule("ostl_recurrent"),
    "ostl_feedforward": Rule("ostl_feedforward", {"decay_or_rank": 0.3}),
    "ottt": Rule("ottt", {"leak": 0.7}),
    "ottt O": Rule("ottt", {"leak": 0.7, "mode": "O"}),
    "otpe": Rule("otpe", {"leak": 0.7}),
    "otpe clipped": Rule("otpe", {"leak": 0.7, "trace_clip_abs": 0.5}),
    "otpe approx": Rule("otpe", {"leak": 0.7, "mode": "approx"}),
    "osttp": Rule("osttp", called_with="y_target", windows=False),
    "three_factor": Rule("three_factor", called_with="modulator", windows=False),
    "decolle": Rule("decolle", called_with="y_target", windows=False),
    "stllr": Rule("stllr", {"leak_pre": 0.7, "leak_post": 0.6, "alpha_post": -0.5}, windows=False),
    "no_trace": Rule("no_trace"),
}
BATTERY = [r for r in RULES if r not in ("eprop unfiltered", "rflo", "ottt O", "ostl_feedforward")]
battery = pytest.mark.parametrize("rule", BATTERY)
others = pytest.mark.parametrize("rule", BATTERY[1:])


# ----------------------------------------------------------------------------------- the pieces


def batch_of(name):
    """The leading axes of the states that count samples."""
    return {"alif": (2,), "learnable_decay": (2,), "sparse_batched": (2,), "conv": (2, 3)}.get(
        name, ()
    )


@cache
def given(name, rule):
    """What a rule needs on a model: (learner's options, reference's options, its sequence)."""
    draw, r = Draw(f"{name} {rule}"), RULES[rule]
    step = seen(name).structure
    widths = [(step.hidden[g[0]].varshape or (1,))[-1] for g in step.groups]
    hidden = {k: v for k, v in r.options.items() if k != "random_feedback_key"}
    if r.name == "osttp":
        y, matrices = draw(T, *batch_of(name), 2), [draw(2, n) for n in widths]
        return {"B_list": matrices}, {"B_list": matrices, "y_target": y}, y
    if r.name == "decolle":
        y, matrices = draw(T, *batch_of(name), 2), [draw(n, 2) for n in widths]
        reference = {"readouts": matrices, "y_target": y}
        return {"n_target": 2, "readouts": matrices}, reference, y
    if r.name == "three_factor":
        m = draw(T)
        return {}, {"modulator": m}, m
    return r.options, hidden, None


def truth(name, rule, window=None):
    """The reference of a rule on a model."""
    kind, options = definition(RULES[rule].name, given(name, rule)[1])
    return rule_on(seen(name), kind, window, **options)


def learner_of(name, rule, **options):
    c = living(name)
    found = KINDS[RULES[rule].name](c.model, **given(name, rule)[0], **options)
    found.compile_graph(c.x0)
    return found


def gradient(learner, name, rule, chunk_size=None, mask=None, **options):
    """The summed gradient of the case's sequence, compiled fast."""
    extra = given(name, rule)[2]
    keyword = RULES[rule].called_with
    sequences = living(name).sequences if extra is None else (*living(name).sequences, extra)

    def loss(x, target, *more):
        return step_fn(lambda v: learner(v, **({keyword: more[0]} if more else {})), x, target)

    window = lambda *slices: _window_losses(learner, step_fn, slices)
    step = window if (chunk_size or 1) > 1 else loss

    def run(sequences, mask):
        return dict(
            learner.etrace_grad(
                *sequences,
                step_fn=step,
                chunk_size=chunk_size,
                mask=mask,
                reduction="sum",
                **options,
            )
        )

    saved = {k: s.value for k, s in living(name).model.states().items()}
    try:
        return program(run)(sequences, mask)
    finally:
        for k, s in living(name).model.states().items():
            s.value = saved[k]


# ------------------------------------------------------------------------ against the references

CORE = ["alif", "lstm", "stacked_layers", "hidden_group_state"]
FURTHER = ["gru", "conv", "learnable_decay", "sparse_batched", "operators_inside_bodies"]
FURTHER += ["loss_reads_before_reset", "delay_line", "weight_also_used_plainly"]
OWN_TRACES = ["eprop", "otpe", "otpe approx", "stllr"]
SINGLE = [(m, r) for r in RULES for m in CORE] + [(m, r) for m in FURTHER for r in OWN_TRACES]
SINGLE += [("weight_also_used_plainly", "three_factor")]
SINGLE += [("operators_inside_bodies", "otpe clipped"), ("conv", "otpe clipped")]


@pytest.mark.parametrize("name, rule", SINGLE)
def test_single_step(name, rule):
    found = gradient(learner_of(name, rule), name, rule)
    assert_equal(found, truth(name, rule))


CHAINS = [(m, r) for m in ("overlapping", "overlapping_chain") for r in OWN_TRACES]
CHAINS += [("overlapping", "ostl_recurrent"), ("overlapping_chain", "ostl_recurrent")]


@pytest.mark.parametrize("name, rule", CHAINS)
def test_sharing_a_trace_is_not_transitive(name, rule):
    size = {"overlapping": 1, "overlapping_chain": 2}[name]
    found = gradient(learner_of(name, rule), name, rule, block_size=size)
    assert_equal(found, truth(name, rule))


FILTERED = ["eprop", "otpe", "otpe approx", "ottt"]
IN_WINDOWS = [("alif", r, 3) for r in RULES if RULES[r].windows]
IN_WINDOWS += [("stacked_layers", r, 2) for r in FILTERED]
IN_WINDOWS += [("hidden_group_state", r, c) for r in ("eprop", "ottt") for c in (1, T)]


@pytest.mark.parametrize("name, rule, chunk", IN_WINDOWS)  # T = 5: the last may be shorter
def test_windows(name, rule, chunk):
    learner = learner_of(name, rule, vjp_method="multi-step")
    found = gradient(learner, name, rule, chunk_size=chunk)
    assert_equal(found, truth(name, rule, chunk))


@battery
def test_blocks(rule):
    for name, size in (("alif", 1), ("hidden_group_state", 2)):
        found = gradient(learner_of(name, rule), name, rule, block_size=size)
        assert_equal(found, truth(name, rule))


@pytest.mark.parametrize("rule", ["eprop", "otpe", "otpe approx", "ottt"])
def test_blocks_of_windows(rule):
    learner = learner_of("alif", rule, vjp_method="multi-step")
    found = gradient(learner, "alif", rule, chunk_size=2, block_size=2)
    assert_equal(found, truth("alif", rule, 2))


@pytest.mark.parametrize("rule", [r for r in RULES if not RULES[r].windows])
def test_windows_are_refused_where_the_signal_is_no_derivative(rule):
    with pytest.raises(ValueError) as error:
        learner_of("alif", rule, vjp_method="multi-step")
    assert "why:" in str(error.value) and "do:" in str(error.value)


# --------------------------------------------------------------------------- synthetic gradients


def with_synthesizer(name, scale=0.5, **options):
    c = living(name)
    learner = bt.DNI(c.model, **options)
    learner.compile_graph(c.x0)
    guess = bt.SyntheticGradient(learner.group_signal_shapes(), scale=scale, seed=1)
    learner.attach_synthesizer(guess)

    def synthesizer(groups):
        found = guess.apply(guess.param_values(), dict(enumerate(groups)))
        return [found[i] for i in range(len(groups))]

    return learner, synthesizer


@pytest.mark.parametrize("name", ["gru", "plain_recurrent_weight"])  # weights without a trace
@pytest.mark.parametrize("chunk", [1, 3, T])
def test_dni_in_windows(name, chunk):
    learner, synthesizer = with_synthesizer(name)
    run = lambda s: online_grad(learner, step_fn, *s, chunk_size=chunk)
    found = program(run)(living(name).sequences)
    assert_equal(found, rule_on(seen(name), "dni", chunk, synthesizer=synthesizer))
    assert different(found, rule_on(seen(name), "d_rtrl", chunk))


def test_dni_without_a_guess_is_d_rtrl():
    learner, _ = with_synthesizer("gru", scale=0.0)
    found = online_grad(learner, step_fn, *living("gru").sequences, chunk_size=2)
    assert_equal(found, rule_on(seen("gru"), "d_rtrl", 2))


def test_dni_in_single_steps():
    learner, synthesizer = with_synthesizer("gru", vjp_method="single-step")
    found = online_grad(learner, step_fn, *living("gru").sequences)
    assert_equal(found, rule_on(seen("gru"), "dni", synthesizer=synthesizer))
    assert different(found, rule_on(seen("gru"), "d_rtrl"))


# -------------------------------------------------------------------------------------- compare


# Whether the feedback of rflo is random is not seen from outside.
SEEN = [r for r in RULES if RULES[r].called_with is None and RULES[r].name != "rflo"]


@pytest.mark.parametrize("rule", SEEN)
def test_compare_knows_the_rule(rule):
    learner = learner_of("leaky", rule)
    found = compare_to_rule(learner, step_fn, *living("leaky").sequences)
    assert found.max_error <= TIGHT


def test_compare_says_what_it_cannot_know():
    signals = learner_of("hidden_group_state", "three_factor")
    random = bt.EProp(living("alif").model, feedback="random", random_feedback_key=0)
    random.compile_graph(living("alif").x0)
    for learner, name in ((signals, "hidden_group_state"), (random, "alif")):
        with pytest.raises(ValueError, match="reference_grad"):
            compare_to_rule(learner, step_fn, *living(name).sequences)


# ------------------------------------------------------------------------ the battery of all rules


class Cell(brainstate.nn.Module):
    """Spiking units with adaptation, recurrent, and a read-out; states by sample."""

    def __init__(self):
        super().__init__()
        draw = Draw("cell")
        for name, shape in {"w": (2, 3), "r": (3, 3), "out": (3, 2)}.items():
            setattr(self, name, brainstate.ParamState(draw(*shape, scale=1.2)))

    def init_state(self, batch_size=None, **_):
        shape = (3,) if batch_size is None else (batch_size, 3)
        self.v, self.a = (brainstate.HiddenState(jnp.zeros(shape)) for _ in range(2))

    def reset_state(self, batch_size=None, **_):
        shape = (3,) if batch_size is None else (batch_size, 3)
        self.v.value, self.a.value = jnp.zeros(shape), jnp.zeros(shape)

    def update(self, x):
        z = spike(self.v.value - 0.2)
        v = 0.8 * self.v.value - 0.5 * z + matmul(x, self.w.value) + matmul(z, self.r.value)
        self.a.value = 0.7 * self.a.value + z
        self.v.value = v - 0.3 * self.a.value
        return matmul(jnp.tanh(self.v.value), self.out.value)


STEPS, SAMPLES = 4, 3
_draw = Draw("battery")
INPUTS, SIGNALS = _draw(STEPS, SAMPLES, 2, scale=1.5), _draw(STEPS, SAMPLES, 2)
EXTRA = {
    "osttp": {"B_list": [_draw(2, 3)]},
    "decolle": {
        "n_target": 2,
        "readouts": [_draw(3, 2)],
        "local_loss": lambda y, target: 0.5 * jnp.sum((y - target) ** 2),
    },
}


def compiled(rule, x=INPUTS[0], **options):
    r = RULES[rule]
    return bt.compile(Cell(), r.name, x, **r.options, **EXTRA.get(r.name, {}), **options)


def loss_of(learner, rule):
    """The loss of a step; a third factor is one number per sample, at all its units."""

    def loss(x, signal):
        match RULES[rule].called_with:
            case None:
                out = learner(x)
            case "modulator":
                out = learner(x, modulator=jnp.repeat(signal[..., :1], 3, -1))
            case keyword:
                out = learner(x, **{keyword: signal})
        return 0.5 * jnp.sum((out - 0.3) ** 2)

    return loss


def summing(learner, rule, **options):
    """The summed gradient of a sequence as a program."""
    step = loss_of(learner, rule)
    run = lambda xs, signals: dict(
        learner.etrace_grad(xs, signals, step_fn=step, reduction="sum", **options)
    )
    return program(run)


@cache
def batched(rule):
    """A learner of all samples, and its gradient as a function."""
    learner = compiled(rule, batch_size=SAMPLES)
    return learner, summing(learner, rule)


@cache
def each_sample(rule):
    learner = compiled(rule, INPUTS[0, 0])
    run, found = summing(learner, rule), []
    for i in range(SAMPLES):
        learner.reset()
        found.append(run(INPUTS[:, i], SIGNALS[:, i]))
    return found


@cache
def each_step(rule):
    """The gradients of single calls, and how often the loss was traced after the first one."""
    learner, traced = compiled(rule, batch_size=SAMPLES), []
    loss = loss_of(learner, rule)

    def counted(*slices):
        traced.append(1)
        return loss(*slices)

    grad = brainstate.transform.grad(counted, learner.param_states)
    step = brainstate.transform.jit(grad)
    first = step(INPUTS[0], SIGNALS[0])
    once = len(traced)
    rest = [step(*slices) for slices in zip(INPUTS[1:], SIGNALS[1:], strict=True)]
    return [first, *rest], len(traced) - once


def total(grads):
    return jax.tree.map(lambda *g: sum(g), *grads)


def whole(rule):
    """The gradient of the sequence from the beginning."""
    learner, run = batched(rule)
    learner.reset()
    return run(INPUTS, SIGNALS)


@others
def test_a_batch_is_the_sum_of_its_samples(rule):
    want = total(each_sample(rule))
    assert all(jnp.abs(g).max() > 1e-3 for g in jax.tree.leaves(want))
    assert_equal(whole(rule), want)


@battery
def test_mapped_samples_are_a_batch(rule):
    mapped = compiled(rule, batch_size=SAMPLES, vmap=True)
    assert_equal(summing(mapped, rule)(INPUTS, SIGNALS), whole(rule))


@others
def test_steps_add_up_and_are_compiled_once(rule):
    found, again = each_step(rule)
    assert again == 0
    assert_equal(total(found), whole(rule))


@battery
def test_one_gradient_through_a_scan_of_calls(rule):
    learner = compiled(rule, batch_size=SAMPLES)
    loss = loss_of(learner, rule)
    through = lambda: brainstate.transform.for_loop(loss, INPUTS, SIGNALS).sum()
    once = brainstate.transform.grad(through, learner.param_states)
    assert_equal(program(once)(), whole(rule))


@others
def test_states_are_all_that_is_remembered(rule):
    learner, run = batched(rule)
    first = whole(rule)
    saved = jax.tree.map(np.asarray, {k: s.value for k, s in learner.states().items()})
    second = run(INPUTS, SIGNALS)
    assert different(second, first)
    assert_equal(whole(rule), first)
    for k, s in learner.states().items():
        s.value = jax.tree.map(jnp.asarray, saved[k])
    assert_equal(run(INPUTS, SIGNALS), second)


@battery
def test_reset_to_another_batch_size(rule):
    learner = compiled(rule, batch_size=SAMPLES)
    learner.reset(batch_size=2)
    found = summing(learner, rule)(INPUTS[:, :2], SIGNALS[:, :2])
    assert_equal(found, total(each_sample(rule)[:2]))


@others
def test_masks_choose_steps(rule):
    steps, mask = each_step(rule)[0], jnp.array([1.0, 0.0, 0.0, 1.0])
    for size in (1, None):
        learner = compiled(rule, batch_size=SAMPLES)
        run = summing(learner, rule, mask=mask, block_size=size)
        assert_equal(run(INPUTS, SIGNALS), total([steps[0], steps[3]]))


@pytest.mark.parametrize("rule", [r for r in BATTERY if r != "no_trace"])
def test_traces_in_low_precision(rule):
    learner = compiled(rule, batch_size=SAMPLES, trace_dtype=jnp.bfloat16)
    stored = [a for t in learner.etraces.values() for a in jax.tree.leaves(t.value) if a.ndim]
    assert stored and all(a.dtype == jnp.bfloat16 for a in stored)
    found = summing(learner, rule, block_size=1)(INPUTS, SIGNALS)
    assert 1e-6 < comparison(found, whole(rule)).max_error < 3e-2
