"""Rules with random numbers: feedback through random operands, unbiased estimates of RTRL."""

from functools import cache
from itertools import product

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TIGHT, Draw, Net, T, assert_equal, different, matmul, spike, step_fn

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._compare import _window_losses, comparison, online_grad
from interpret import program
from oracle import definition, dense, kf_step, rule_on, uoro_step

I, N = 3, 4


def compiled(kind, model, x=None, **options):
    learner = kind(model, **options)
    learner.compile_graph(jnp.zeros(I) if x is None else x)
    return learner


# ----------------------------------------------------------------------------- random feedback

FEEDBACK = [
    ("eprop", {"kappa_filter_decay": 0.5}),
    ("rflo", {}),
    ("rflo", {"leak": 0.6}),
]
feedback = pytest.mark.parametrize("rule, options", FEEDBACK)


def fed_back(rule, model, key=3, **options):
    if rule == "eprop":
        return compiled(bt.EProp, model, feedback="random", random_feedback_key=key, **options)
    return compiled(bt.RFLO, model, random_feedback_key=key, **options)


@cache
def layers():
    """Two layers, the first recurrent, and a read-out as wide as they are."""

    def update(m, x):
        back = matmul(m.a.value, m.r.value)
        m.a.value = jnp.tanh(0.8 * m.a.value + matmul(x, m.w.value) + back)
        m.b.value = jnp.tanh(0.7 * m.b.value + matmul(m.a.value, m.u.value))
        return matmul(m.b.value, m.out.value)

    draw = Draw("layers with feedback")
    params = {"w": draw(I, N), "r": draw(N, N), "u": draw(N, N), "out": draw(N, N)}
    return Net(update, params, {"a": draw(N), "b": draw(N)}), (draw(T, I), draw(T, N))


def each_output(learner, x, width=N):
    """The gradients of one step from zero traces whose loss is one of the outputs."""
    picked = lambda net, x, c: jnp.sum(net(x) * c)
    run = lambda c: online_grad(learner, picked, x[None], c[None])
    run = program(run)
    return [run(c) for c in jnp.eye(width)]


def operands_of(learner):
    """The random operands of the two layers, from the gradients of one step."""
    net, x = layers()[0], jnp.ones(I)
    w, r, u = (np.asarray(p.value) for p in (net.w, net.r, net.u))
    a = np.tanh(0.8 * net.a.value + x @ w + net.a.value @ r)
    b = np.tanh(0.7 * net.b.value + a @ u)
    grads = each_output(learner, x)
    at_b = np.stack([g["u",][0] / a[0] for g in grads])  # (1 - b²) times rows of out'
    at_a = np.stack([g["w",][0] / (1 - a**2) for g in grads])  # at_b @ u'
    return {("out",): (at_b / (1 - b**2)).T, ("u",): np.linalg.solve(at_b, at_a).T}


@cache
def with_operands():
    net, sequences = layers()
    operands = operands_of(fed_back("rflo", net))
    return operands, dense(net, step_fn, *sequences, feedback=operands)


@cache
def recorded():
    net, sequences = layers()
    return dense(net, step_fn, *sequences)


def learn(learner, sequences, window=None):
    run = lambda s: online_grad(learner, step_fn, *s, chunk_size=window)
    return program(run)(sequences)


@feedback
@pytest.mark.parametrize("window", [None, 2])
def test_random_operands_on_the_way_back(rule, options, window):
    net, sequences = layers()
    method = {} if window is None else {"vjp_method": "multi-step"}
    learner = fed_back(rule, net, **options, **method)
    found = learn(learner, sequences, window)
    kind, constants = definition(rule, options)
    assert_equal(found, rule_on(with_operands()[1], kind, window, **constants))
    own = rule_on(recorded(), kind, window, **constants)
    assert different(found, own)
    np.testing.assert_allclose(found["out",], own["out",], rtol=1e-9)


def test_random_operands_belong_to_the_key():
    net, _ = layers()
    first = with_operands()[0]
    for key, same in ((3, True), (jax.random.key(3), True), (4, False)):
        found = operands_of(fed_back("eprop", net, key))
        for path, operand in first.items():
            assert np.allclose(found[path], operand) == same
    assert not np.allclose(first["out",], first["u",])


def test_size_of_random_operands():
    # 60 units, 8 outputs in each of 2 samples: a standard deviation of 1 / sqrt(8)
    def update(m, x):
        m.h.value = 0.5 * m.h.value + matmul(x, m.w.value)
        return matmul(m.h.value, m.out.value)

    draw = Draw("size of feedback")
    net = Net(update, {"w": draw(1, 60), "out": draw(60, 8)}, {"h": draw(2, 60)})
    x, found = jnp.ones((2, 1)), {}
    for scale in (1.0, 2.0):
        learner = compiled(bt.RFLO, net, x, random_feedback_key=1, feedback_scale=scale)
        found[scale] = np.stack([g["w",][0] for g in each_output(learner, x, 8)]) / 2
    assert abs(found[1.0].std() * np.sqrt(8) - 1) < 0.1
    assert abs(found[1.0].mean()) < 0.06
    np.testing.assert_allclose(found[2.0], 2 * found[1.0], rtol=1e-9)


@cache
def without_readout(n=N):
    """A voltage and its adaptation, both read by the loss without an operator between."""

    def update(m, x):
        v = 0.9 * m.v.value + matmul(x, m.w.value)
        z = jax.nn.sigmoid(v - 0.5 * m.a.value)
        m.v.value = v - 0.3 * z
        m.a.value = 0.8 * m.a.value + z
        return m.v.value + 0.2 * m.a.value

    draw = Draw("no read-out")
    net = Net(update, {"w": draw(I, n)}, {"v": draw(n), "a": draw(n)})
    return net, (draw(T, I), draw(T, n))


def matrix_of(learner, n=N):
    """The square matrix, from the gradients of one step whose loss is one of the outputs."""
    net, x = without_readout(n)[0], jnp.ones(I)
    tails = dense(net, lambda net, x: net(x).sum(), x[None]).steps[0].f[0]
    sizes = [1 / (1 + 1e-8), 0.2 / (0.2 + 1e-8)]  # both states say the same, normalised
    f = sum(np.diag(tails[i * n : (i + 1) * n]) * size for i, size in enumerate(sizes))
    return np.stack([g["w",][0] / f for g in each_output(learner, x, n)])


@cache
def with_matrix():
    net, sequences = without_readout()
    return matrix_of(fed_back("rflo", net)), dense(net, step_fn, *sequences)


@feedback
@pytest.mark.parametrize("window", [None, 2])
def test_square_feedback_without_a_readout(rule, options, window):
    net, sequences = without_readout()
    method = {} if window is None else {"vjp_method": "multi-step"}
    learner = fed_back(rule, net, **options, **method)
    found = learn(learner, sequences, window)
    B, seen = with_matrix()
    kind, constants = definition(rule, {**options, "group_feedback": [B]})
    assert_equal(found, rule_on(seen, kind, window, **constants))
    own = rule_on(seen, kind, window, **{**constants, "group_feedback": None})
    assert different(found, own)


def test_size_of_square_feedback():
    B = matrix_of(fed_back("rflo", without_readout(16)[0]), 16)
    assert abs(B.std() / 0.1 - 1) < 0.15
    assert abs(B.mean()) < 0.03


# -------------------------------------------------------------------------- unbiased estimates


@cache
def tiny():
    def update(m, x):
        into = matmul(x, m.w.value) + x @ m.p.value
        m.h.value = jnp.tanh(0.5 * m.h.value + into + matmul(m.h.value, m.r.value))
        return m.h.value

    draw = Draw("tiny")
    params = {"w": draw(2, 2), "p": draw(2, 2), "r": draw(2, 2)}
    net = Net(update, params, {"h": draw(2)})
    sequences = draw(3, 2), draw(3, 2)
    return net, sequences, dense(net, step_fn, *sequences)


def parts(window):
    """Where windows begin and end; None is single steps, which is windows of one."""
    return [range(i, min(i + (window or 1), 3)) for i in range(0, 3, window or 1)]


def exactly(steps):
    """The gradient of a window by parameters and by the states at its entry."""
    J, S, G, lam = np.eye(2), 0.0, 0.0, 0.0
    for s in steps:
        G, lam = G + s.g + s.l @ S if np.ndim(S) else G + s.g, lam + s.l @ J
        S, J = s.A @ S + s.B if np.ndim(S) else s.B, s.A @ J
    return G, lam


@cache
def uoro_gradients(window):
    """What UORO can return: one gradient for all signs of all steps but the last."""
    steps, found = tiny()[2].steps, []
    signs = np.array(list(product([-1.0, 1.0], repeat=2)))
    for nus in product(signs, repeat=3):
        s, w, total = np.zeros(2), np.zeros(len(steps[0].g)), 0.0
        for part in parts(window):
            G, lam = exactly([steps[t] for t in part])
            total = total + G + (lam @ s) * w
            for t in part:
                s, w = uoro_step(s, w, nus[t], steps[t].A, steps[t].B, 1e-12)
        found.append(total)
    return [tiny()[2].by_path(v) for v in found]


@cache
def kf_gradients(window):
    """What KF-RTRL can return, per weight of an operator."""
    net, (xs, _), seen = tiny()
    steps, found = seen.steps, {}
    inputs = {"w": np.asarray(xs), "r": [np.asarray(net.h.value), *(s.h for s in steps)]}
    names = {s.entry: s.path for s in seen.structure.params}
    paths = [names[o.equation.inputs[1]] for o in seen.structure.steady]
    for i, path in enumerate(paths):
        runs = []
        for signs in product([-1.0, 1.0], repeat=3):
            u, K, total = np.zeros(2), np.zeros((2, 2)), 0.0
            for part in parts(window):
                G, lam = exactly([steps[t] for t in part])
                total = total + np.asarray(seen.by_path(G)[path]) + np.outer(u, lam @ K)
                for t in part:
                    x = inputs[path[0]][t]
                    u, K = kf_step(u, K, signs[t], x, steps[t].A, steps[t].F[i], 1e-12)
            runs.append(total)
        found[path] = runs
    return found


def runs_of(learner, sequences, count, window=None):
    """Gradients from the beginning, again and again; the random signs go on."""
    states = learner.model4compile.states()
    start = {k: s.value for k, s in states.items()}

    def step(*slices):
        if window is not None:
            return _window_losses(learner, step_fn, slices)
        return step_fn(learner, *slices)

    def begin():
        for k, s in states.items():
            s.value = start[k]

    def once(_):
        begin()
        learner.reset_state()
        return dict(
            learner.etrace_grad(*sequences, step_fn=step, chunk_size=window, reduction="sum")
        )

    many = lambda: brainstate.transform.for_loop(once, jnp.arange(count))
    found = brainstate.transform.jit(many)()
    begin()
    return found


def estimator(kind, window, model=None, x=None):
    method = "single-step" if window is None else "multi-step"
    return compiled(kind, tiny()[0] if model is None else model, x, vjp_method=method)


@pytest.mark.parametrize("window", [None, 2])
def test_uoro_is_its_definition_for_some_signs(window):
    learner = estimator(bt.UORO, window, x=jnp.zeros(2))
    found = runs_of(learner, tiny()[1], 12, window)
    met = set()
    for i in range(12):
        one = jax.tree.map(lambda g, i=i: g[i], found)
        errors = [comparison(one, g).max_error for g in uoro_gradients(window)]
        assert min(errors) < TIGHT
        met.add(int(np.argmin(errors)))
    assert len(met) > 2  # other signs in every run


@pytest.mark.parametrize("window", [None, 2])
def test_kf_rtrl_is_its_definition_for_some_signs(window):
    _, sequences, seen = tiny()
    found = runs_of(estimator(bt.KFRTRL, window, x=jnp.zeros(2)), sequences, 12, window)
    for path, runs in kf_gradients(window).items():
        met = set()
        for one in np.asarray(found[path]):
            errors = [abs(one - g).max() for g in runs]
            assert min(errors) < TIGHT
            met.add(int(np.argmin(errors)))
        assert len(met) > 1
    plain = rule_on(seen, "no_trace", window)["p",]  # it has no operator
    for one in np.asarray(found["p",]):
        np.testing.assert_allclose(one, plain, rtol=1e-9)


def spiking():
    """Recurrent spikes with adaptation, a batch of two, and a layer of plain weights."""

    def update(m, x):
        y = matmul(x, m.w.value) + matmul(m.z.value, m.r.value)
        m.v.value = 0.8 * m.v.value - 0.3 * m.z.value + y
        m.z.value = spike(m.v.value - 0.2)
        m.k.value = 0.6 * m.k.value + jnp.tanh(m.z.value + m.v.value) @ m.p.value
        return m.k.value

    draw = Draw("spiking estimates")
    params = {"w": draw(2, 3), "r": draw(3, 3), "p": draw(3, 2)}
    states = {"z": draw(2, 3), "v": draw(2, 3), "k": draw(2, 2)}
    return Net(update, params, states), (draw(4, 2, 2, scale=1.5), draw(4, 2, 2))


def scores(found, truth):
    """The distances of the mean over the runs from the truth, in standard errors."""
    out = []
    for path, runs in found.items():
        runs = np.asarray(runs)
        error = runs.std(0, ddof=1) / np.sqrt(len(runs))
        distance = abs(runs.mean(0) - np.asarray(truth[path]))
        out.append(np.where(distance < TIGHT, 0, distance / np.maximum(error, 1e-300)).ravel())
    return np.concatenate(out)


@pytest.mark.parametrize("kind, rule", [(bt.UORO, "rtrl"), (bt.KFRTRL, "kf_rtrl")])
@pytest.mark.parametrize("window", [None, 2])
def test_the_mean_is_that_of_the_reference(kind, rule, window):
    model, sequences = spiking()
    found = runs_of(estimator(kind, window, model, sequences[0][0]), sequences, 2000, window)
    seen = dense(model, step_fn, *sequences)
    assert scores(found, rule_on(seen, rule, window)).max() < 5
    assert scores(found, rule_on(seen, "d_rtrl", window)).max() > 5  # and of no other
    assert scores(found, rule_on(seen, "no_trace", window)).max() > 5


def test_what_uoro_averages_to_is_bptt():
    model, sequences = spiking()
    seen = dense(model, step_fn, *sequences)
    assert_equal(rule_on(seen, "rtrl"), bptt_grad(model, step_fn, *sequences))


@pytest.mark.parametrize("kind", [bt.UORO, bt.KFRTRL])
def test_the_mean_is_bptt_where_no_weight_has_moved_a_state_under_a_root(kind):
    def update(m, x):
        m.v.value = 0.9 * m.v.value + jax.nn.relu(matmul(x, m.w.value))
        return jnp.sqrt(m.v.value)

    draw = Draw("a root of zero")
    model = Net(update, {"w": draw(2, 3)}, {"v": jnp.zeros((2, 3))})
    sequences = draw(4, 2, 2), draw(4, 2, 3)
    truth = bptt_grad(model, step_fn, *sequences)
    found = runs_of(estimator(kind, None, model, sequences[0][0]), sequences, 2000)
    assert np.isfinite(truth["w",]).all() and np.asarray(found["w",]).std(0).max() > 1e-3
    assert scores(found, truth).max() < 5


@pytest.mark.parametrize("kind", [bt.UORO, bt.KFRTRL])
def test_signs_belong_to_the_key(kind):
    name = {bt.UORO: "projection_key", bt.KFRTRL: "key"}[kind]
    net, sequences, _ = tiny()
    runs = [
        runs_of(compiled(kind, net, jnp.zeros(2), vjp_method="single-step", **{name: key}),
                sequences, 6)
        for key in (0, 0, jax.random.key(0), 1)
    ]  # fmt: skip
    for one in runs[1:3]:
        assert_equal(one, runs[0])
    assert different(runs[3], runs[0])
