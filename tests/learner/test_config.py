"""The coordinates of rules: every preset has them, they make it again, nonsense is refused."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace as bt
from braintrace import ETraceConfig
from braintrace.compat._compile import RULES, class_of, options_of

XS = jax.random.normal(jax.random.PRNGKey(0), (5, 2, 3))
YS = jax.random.normal(jax.random.PRNGKey(1), (5, 2, 2))


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = bt.nn.GRUCell(3, 4), bt.nn.Linear(4, 2)

    def update(self, x):
        return self.out(self.cell(x))


def made(algorithm, **options):
    with brainstate.random.seed_context(0):
        return bt.compile(Net(), algorithm, XS[0], batch_size=2, **options)


def gradient(learner, **given):
    def step(x, y):
        return ((learner(x, **{k: f(y) for k, f in given.items()}) - y) ** 2).sum()

    return learner.etrace_grad(XS, YS, step_fn=step, reduction="sum")


B = [jnp.asarray(np.random.RandomState(0).randn(2, 4))]
TARGET = {"y_target": lambda y: y}
PRESETS = {
    "d_rtrl": ({}, {}),
    "pp_prop": ({"decay_or_rank": 0.9}, {}),
    "es_d_rtrl": ({"decay_or_rank": (0.5, 0.8)}, {}),
    "eprop": ({"kappa_filter_decay": 0.5}, {}),
    "rflo": ({"leak": 0.7, "random_feedback_key": 1}, {}),
    "ostl_recurrent": ({}, {}),
    "ostl_feedforward": ({}, {}),
    "ottt": ({"leak": 0.8}, {}),
    "otpe": ({"leak": 0.8, "mode": "approx"}, {}),
    "osttp": ({"B_list": B}, TARGET),
    "snap": ({"n": 2}, {}),
    "rtrl": ({}, {}),
    "three_factor": ({}, {"modulator": lambda y: y.sum()}),
    "decolle": ({"n_target": 2}, TARGET),
    "stllr": ({}, {}),
    "uoro": ({}, {}),
    "kf_rtrl": ({}, {}),
    "no_trace": ({}, {}),
}
NEEDED = {"rflo": ("random_feedback_key",), "osttp": ("B_list",), "decolle": ("n_target",)}


def test_every_name_has_coordinates():
    assert set(RULES) - set(PRESETS) == {"esd_rtrl", "dni"}
    for name, (options, _) in PRESETS.items():
        config = RULES[name](Net(), **options).config
        needed = {k: options[k] for k in NEEDED.get(name, ())}
        assert class_of(config)(Net(), **options_of(config), **needed).config == config


@pytest.mark.parametrize(
    "name", ["pp_prop", "eprop", "rflo", "ostl_recurrent", "otpe", "osttp", "decolle", "stllr"]
)
def test_a_preset_is_made_again_from_its_coordinates(name):
    options, given = PRESETS[name]
    learner = made(name, **options)
    again = made(learner.config, **{k: options[k] for k in NEEDED.get(name, ())})
    assert again.config == learner.config
    for a, b in zip(
        jax.tree.leaves(gradient(learner, **given)),
        jax.tree.leaves(gradient(again, **given)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_dni_is_made_from_its_coordinates():
    config = made("dni").config
    assert config.learning_signal == "bootstrapped"
    assert isinstance(made(config), bt.DNI)


def test_coordinates_that_mean_the_same_are_equal():
    assert ETraceConfig(trace_filter="kappa", kappa=0.0) == ETraceConfig()
    assert ETraceConfig(recurrence_scope="sparse_n", sparse_n=1) == ETraceConfig(
        recurrence_scope="coupled"
    )
    leak = ETraceConfig(temporal_recursion="scalar_leak", decay=0.0)
    assert leak == ETraceConfig(temporal_recursion="none")
    pair = ETraceConfig("io_factorized", decay=(0.9, 0.0))
    assert pair.temporal_recursion == ("scalar_leak", "none")
    assert (pair.recursion_x, pair.recursion_f, pair.decay_x, pair.decay_f) == (
        "scalar_leak",
        "none",
        0.9,
        0.0,
    )


def test_one_choice_can_be_changed_and_is_described():
    config = ETraceConfig().replace(trace_filter="kappa", kappa=0.5)
    assert config.describe() == "trace_factorization=per_param, trace_filter=kappa, kappa=0.5"
    assert not config.is_factorized and not config.include_recurrent_mixing
    with pytest.raises(AttributeError, match="no sides"):
        _ = config.decay_x


ILLEGAL = [
    dict(trace_factorization="io_factorized", decay=0.9, trace_filter="kappa", kappa=0.5),
    dict(recurrence_scope="coupled", temporal_recursion="scalar_leak", decay=0.9),
    dict(
        trace_factorization="io_factorized",
        temporal_recursion=("jacobian", "jacobian"),
        decay=0.9,
    ),
    dict(decay=0.9),
    dict(temporal_recursion="scalar_leak"),
    dict(trace_factorization="io_factorized"),
    dict(kappa=0.5),
    dict(sparse_n=2),
    dict(window_size=3),
    dict(trace_filter="kappa", kappa=1.0),
    dict(temporal_recursion="scalar_leak", decay=1.0),
    dict(temporal_recursion="none", decay=0.5),
    dict(update_schedule="window"),
    dict(update_schedule="daily"),
    dict(trace_factorization="io_factorized", decay=0.9, recurrence_scope="sparse_n", sparse_n=2),
    dict(recurrence_scope="sparse_n", sparse_n=0),
    dict(trace_factorization="random_projection"),
    dict(trace_factorization="none", recurrence_scope="coupled"),
    dict(trace_factorization="none", learning_signal="modulatory"),
    dict(alphas=(1, 1)),
    dict(normalized=False),
    dict(temporal_recursion=("scalar_leak", "jacobian"), decay=0.5),
    dict(trace_factorization="unheard"),
]


@pytest.mark.parametrize("choice", ILLEGAL, ids=lambda c: "-".join(c))
def test_nonsense_is_refused_with_what_is_legal(choice):
    with pytest.raises(ValueError, match=r"(?s)ETraceConfig: .*choose ."):
        ETraceConfig(**choice)


@pytest.mark.parametrize("choice", [dict(sparse_n=1.5), dict(sparse_n=True), dict(decay="much")])
def test_what_is_no_number_is_refused(choice):
    with pytest.raises(TypeError):
        ETraceConfig(recurrence_scope="sparse_n", **{"sparse_n": 2, **choice})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m: bt.D_RTRL(m, config="d_rtrl"), TypeError, "config has type str"),
        (lambda m: bt.D_RTRL(m, config=ETraceConfig("none")), ValueError, "its trace is"),
        (
            lambda m: bt.D_RTRL(m, config=ETraceConfig(learning_signal="modulatory")),
            ValueError,
            "with the signal 'modulatory'",
        ),
        (lambda m: bt.pp_prop(m), TypeError, "without decay_or_rank"),
        (lambda m: bt.EProp(m, feedback="loud"), ValueError, "choose one of 'symmetric', 'random'"),
        (lambda m: bt.EProp(m, "random", random_feedback_key=None), ValueError, "feedback_key"),
        (lambda m: bt.EProp(m, kappa_filter_decay=1.0), ValueError, "kappa_filter_decay"),
        (lambda m: bt.OTTT(m, leak=1.5), ValueError, "leak=1.5"),
        (lambda m: bt.OTTT(m, "B", leak=0.5), ValueError, "mode='B'"),
        (
            lambda m: bt.OTPE(m, "approx", leak=0.5, trace_clip_abs=1.0),
            ValueError,
            "trace_clip_abs",
        ),
        (lambda m: bt.STLLR(m, vjp_method="multi-step"), ValueError, "no windows"),
        (lambda m: bt.ThreeFactor(m, vjp_method="multi-step"), ValueError, "no windows"),
        (lambda m: bt.UORO(m, projection_eps=0.0), ValueError, "projection_eps"),
        (lambda m: bt.OSTLRecurrent(m, n=2), TypeError, "takes no n"),
        (lambda m: bt.OSTTP(m, B, target_timing="never"), ValueError, "target_timing"),
    ],
)
def test_mistakes_in_making_a_rule(make, error, text):
    with pytest.raises(error, match=text):
        make(Net())


def test_mistakes_in_calling_a_rule():
    with pytest.raises(RuntimeError, match="without a modulator"):
        made("three_factor")(XS[0])
    with pytest.raises(TypeError, match="modulator has type list"):
        made("three_factor")(XS[0], modulator=[1.0])
    with pytest.raises(ValueError, match="a modulator of shape"):
        gradient(made("three_factor"), modulator=lambda y: jnp.ones(7))
    with pytest.raises(ValueError, match="without y_target"):
        made("osttp", B_list=B)(XS[0])
    with pytest.raises(ValueError, match="B_list has matrices to"):
        made("osttp", B_list=[jnp.ones((2, 5))])
    with pytest.raises(ValueError, match="DECOLLE"):
        made("decolle", n_target=2)(XS[0])
    with pytest.raises(RuntimeError, match="no synthesizer"):
        made("dni")(XS[0])
    with pytest.raises(ValueError, match="advance in lockstep"):
        windows = bt.MultiStepData(XS), bt.MultiStepData(jnp.ones(3))
        made("three_factor")(windows[0], modulator=windows[1])


def test_a_signal_of_ones_own_meets_the_traces():
    class Twice(bt.D_RTRL):
        takes = ("factor",)

        def learning_signal(self, group, cotangent, state, extra):
            return extra["factor"][:, None, None, None] * cotangent

    plain, double = gradient(made("d_rtrl")), made(Twice)
    found = gradient(double, factor=lambda y: 2.0)
    # The loss reads the stored state, so the signal at it is all that D-RTRL has.
    for name, scale in ((("cell", "Wz", "weight"), 2), (("out", "weight"), 1)):
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(plain[name]), strict=True):
            np.testing.assert_allclose(a, scale * b, rtol=1e-10)
    assert not double.report.parameters["cell", "Wz", "weight"].exact


def test_no_signal_of_ones_own_without_a_trace_for_it():
    class Odd(bt.UORO):
        def learning_signal(self, group, cotangent, state, extra):
            return cotangent

    with pytest.raises(TypeError, match="no trace for it"):
        Odd(Net())


def test_random_signs_go_on_after_a_reset():
    learner = made("uoro")
    first, _ = gradient(learner), learner.reset()
    second = gradient(learner)
    again = gradient(made("uoro"))
    name = ("cell", "Wz", "weight")
    equal = lambda a, b: all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
    assert equal(first[name], again[name]) and not equal(first[name], second[name])


def test_filters_and_feedback():
    f = bt.KappaFilter(jnp.zeros((2, 3)), 0.5)
    f.update(jnp.ones((2, 3)))
    np.testing.assert_allclose(f.update(jnp.ones((2, 3))), 0.75)
    a = bt.PresynapticTrace(jnp.zeros((2, 3)), 0.5)
    a.update(jnp.ones((2, 3)))
    np.testing.assert_allclose(a.update(jnp.ones((2, 3))), 1.5)
    a.reset_state(batch_size=4)
    assert a.value.shape == (4, 3) and not a.value.any()
    with pytest.raises(ValueError):
        bt.PresynapticTrace(jnp.zeros(2), 1.0)
    with pytest.raises(ValueError):
        bt.KappaFilter(jnp.zeros(2), 1.0)
    B = bt.FixedRandomFeedback(2, 5, key=0)
    y = jnp.ones((3, 2))
    np.testing.assert_allclose(B.project(y), y @ B.B)
    assert float(jnp.abs(jax.grad(lambda b: (y @ b).sum())(B.B)).sum()) > 0


def test_training_a_synthetic_gradient_lowers_its_error():
    learner = made("dni")
    learner.attach_synthesizer(bt.SyntheticGradient(learner.group_signal_shapes()))
    found = bt.train_synthetic_gradient(learner, XS, chunk_size=1, lr=0.5, epochs=6)
    assert len(found) == 6 and found[-1] < 0.9 * found[0]
    with pytest.raises(ValueError, match="positive divisor"):
        bt.train_synthetic_gradient(learner, XS, chunk_size=2)
    with pytest.raises(RuntimeError, match="no synthesizer"):
        bt.train_synthetic_gradient(made("dni"), XS)


@pytest.mark.parametrize("name", ["three_factor", "decolle", "osttp"])
def test_a_signal_of_its_own_also_trains(name):
    options, given = PRESETS[name]
    first, second = made(name, **options), made(name, **options)
    given = given if name != "three_factor" else {"modulator": lambda y: 0.1}

    def step_of(learner):
        return lambda x, y: ((learner(x, **{k: f(y) for k, f in given.items()}) - y) ** 2).sum()

    xs, ys = jnp.tile(XS, (4, 1, 1)), jnp.tile(YS, (4, 1, 1))
    first.etrace_train(xs, ys, step_fn=step_of(first), optimizer=optax.sgd(0.01), reduction="sum")
    weights = second.param_states
    for x, y in zip(xs, ys, strict=True):
        grads = brainstate.transform.grad(lambda x=x, y=y: step_of(second)(x, y), weights)()
        for path, state in weights.items():
            state.value = jax.tree.map(lambda w, g: w - 0.01 * g, state.value, grads[path])
    for path, state in first.param_states.items():
        for a, b in zip(
            jax.tree.leaves(state.value), jax.tree.leaves(weights[path].value), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_matrices_of_a_signal_may_change_and_belong_to_their_learner():
    learner = made("osttp", B_list=B)
    once = gradient(learner, **TARGET)
    learner.reset()
    learner.B_list = [2 * b for b in learner.B_list]
    twice = gradient(learner, **TARGET)
    path = ("cell", "Wz", "weight")
    for a, b in zip(jax.tree.leaves(twice[path]), jax.tree.leaves(once[path]), strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-12)
    other = copy.deepcopy(learner)
    other.reset()
    other.B_list = [0 * b for b in other.B_list]
    assert not any(map(np.any, jax.tree.leaves(gradient(other, **TARGET)[path])))


def test_a_target_for_all_samples():
    shared = {"y_target": lambda y: y[0]}
    a = gradient(made("osttp", B_list=B), **shared)
    b = gradient(made("osttp", B_list=B), y_target=lambda y: jnp.tile(y[:1], (2, 1)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def test_a_signal_of_the_wrong_shape_is_refused():
    class Wrong(bt.D_RTRL):
        def learning_signal(self, group, cotangent, state, extra):
            return cotangent.sum((1, 3))

    with pytest.raises(ValueError, match="learning signal"):
        gradient(made(Wrong))


@pytest.mark.parametrize("base", [bt.NoTrace, bt.STLLR])
def test_no_signal_without_traces(base):
    kind = type("Odd", (base,), {"learning_signal": lambda self, g, c, s, e: c})
    with pytest.raises(TypeError, match="no trace for it"):
        kind(Net())


def test_what_a_call_gives_the_rule_has_no_windows():
    class Given(bt.D_RTRL):
        takes = ("gain",)

    with pytest.raises(ValueError, match="belongs to its steps"):
        Given(Net(), vjp_method="multi-step")


def test_a_signal_of_ones_own_wins_over_random_feedback():
    class Bare(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = bt.nn.GRUCell(3, 2)

        def update(self, x):
            return self.cell(x)

    class Silent(bt.EProp):
        def learning_signal(self, group, cotangent, state, extra):
            return 0 * cotangent

    learner = bt.compile(
        Bare(), Silent, XS[0], batch_size=2, feedback="random", random_feedback_key=0
    )
    assert not any(map(np.any, jax.tree.leaves(gradient(learner)["cell", "Wz", "weight"])))


def test_random_feedback_is_exact_for_the_last_read_out_only():
    class Deep(Net):
        def __init__(self):
            super().__init__()
            self.last = bt.nn.Linear(2, 2)

        def update(self, x):
            return self.last(jnp.tanh(super().update(x)))

    with brainstate.random.seed_context(0):
        learner = bt.compile(Deep(), "rflo", XS[0], batch_size=2)
    exact = {path[0]: p.exact for path, p in learner.report.parameters.items()}
    assert exact == {"cell": False, "out": False, "last": True}


def factor_shapes(learner):
    """One factor per sample, or one for all."""
    return {t.value.shape for name, t in learner.etraces.items() if name.endswith(" one")}


def test_samples_are_told_apart_inside_of_jit():
    learner = made("kf_rtrl")
    assert factor_shapes(learner) == {(2,)}
    xs, ys = jnp.ones((4, 3, 3)), jnp.ones((4, 3, 2))

    @brainstate.transform.jit
    def run():
        learner.reset(batch_size=3)
        step = lambda x, y: ((learner(x) - y) ** 2).sum()
        return learner.etrace_grad(xs, ys, step_fn=step)["cell", "Wz", "weight"]["weight"]

    assert np.isfinite(run()).all() and factor_shapes(learner) == {(3,)}


MISFITS = [
    ("osttp", {"B_list": B}, {"y_target": lambda y: jnp.ones((2, 5))}, "a target of shape"),
    ("osttp", {"B_list": B}, {"y_target": lambda y: jnp.ones((3, 2))}, "a target of shape"),
    ("decolle", {"n_target": 2}, {"y_target": lambda y: jnp.ones((2, 1))}, "a target of shape"),
    ("three_factor", {}, {"modulator": lambda y: {7: 1.0}}, "modulators of the groups"),
]


@pytest.mark.parametrize(("name", "options", "given", "text"), MISFITS)
def test_signals_that_fit_no_sample(name, options, given, text):
    with pytest.raises(ValueError, match=text):
        gradient(made(name, **options), **given)


@pytest.mark.parametrize(
    "choice",
    [
        dict(learning_signal="bootstrapped", trace_filter="kappa", kappa=0.5),
        dict(learning_signal="target_projection"),
        dict(learning_signal="modulatory", trace_factorization="io_factorized", decay=0.5),
    ],
)
def test_signals_whose_learners_have_other_traces(choice):
    with pytest.raises(ValueError, match=r"ETraceConfig.*signal"):
        ETraceConfig(**choice)


def test_samples_that_meet_are_not_told_apart():
    class Meeting(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.h = (
                brainstate.ParamState(jnp.ones((3, 2))),
                brainstate.HiddenState(jnp.zeros((2, 2))),
            )

        def update(self, x):
            now = self.h.value
            mixed = x[:, :1] * now[::-1].cumsum(0)[::-1]
            self.h.value = jnp.tanh(0.5 * now + bt.matmul(x, self.w.value) + mixed)
            return self.h.value

    learner = bt.KFRTRL(Meeting())
    learner.compile_graph(XS[0])
    assert factor_shapes(learner) == {()}
    with pytest.raises(ValueError, match="eps=0"):
        bt.KFRTRL(Meeting(), eps=0.0)


@pytest.mark.parametrize(
    ("shape", "full"),
    [((2,), (2, 1, 1)), ((4,), (1, 4, 1)), ((2, 4), (2, 4, 1)), ((2, 4, 1), (2, 4, 1))],
)
def test_a_modulator_for_samples_units_or_both(shape, full):
    m = jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    whole = jnp.broadcast_to(m.reshape(full), (2, 4, 1))
    found, want = (gradient(made("three_factor"), modulator=lambda y, m=m: m) for m in (m, whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
