"""`choose`: the assignment is what its table says, and never worse than the best rule that fits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from braintrace._online import choose_for
from braintrace._online._assignment import Limits, Part, Tried, best, cosine_of, mixtures

B, N, I, T = 2, 3, 2, 4


def drawn(seed, *shape):
    return jnp.asarray(0.8 * np.random.default_rng(seed).normal(size=shape))


def step(p, state, x):
    """An element-wise layer under a recurrent one."""
    a, g = state
    a = jax.nn.sigmoid(p["a"]["decay"]) * a + x @ p["a"]["w"]
    g = jnp.tanh(a @ p["g"]["w"] + g @ p["g"]["r"])
    return (a, g), g


PARAMS = {
    "a": {"decay": drawn(0, N), "w": drawn(1, I, N)},
    "g": {"w": drawn(2, N, N), "r": drawn(3, N, N)},
}
STATE = (jnp.zeros((B, N)),) * 2
XS, YS = drawn(4, T, B, I), drawn(5, T, B, N)


def loss(out, y):
    return jnp.mean((out - y) ** 2)


@pytest.fixture(scope="module")
def choice():
    with jax.enable_x64(True):
        return bt.choose(step, PARAMS, STATE, XS, YS, loss, memory="2GB", time=1e6)


def test_cosines_of_the_table_are_those_of_the_gradients(choice):
    def total(params):
        def body(s, slices):
            s, out = step(params, s, slices[0])
            return s, loss(out, slices[1])

        return jax.lax.scan(body, STATE, (XS, YS))[1].sum()

    with jax.enable_x64(True):
        flat = lambda tree: np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
        truth = flat(jax.grad(total)(PARAMS))
        for row in choice.tried:
            rule, options = row.uniform
            net = bt.online(step, rule, **dict(options))
            found = flat(net.grad(loss)(PARAMS, net.init(PARAMS, STATE, XS[0]), XS, YS)[0])
            cosine = found @ truth / np.linalg.norm(found) / np.linalg.norm(truth)
            assert row.cosine == pytest.approx(cosine, abs=1e-9)
            assert row.traces == net.memory


def test_without_limits_the_choice_is_exact_and_follows_from_its_table(choice):
    assert choice.best.cosine == pytest.approx(1) and choice.best in choice.tried
    assert best(choice.tried, choice.limits) is choice.best
    net = bt.online(step, choice.rule)
    net.init(PARAMS, STATE, XS[0])
    lines = str(choice).splitlines()
    assert "chosen" in lines[1] and "Chosen:" in lines and len(lines) < 30


def test_a_choice_is_saved_with_its_table(choice, tmp_path):
    choice.save(tmp_path / "choice.json")
    again = bt.Choice.load(tmp_path / "choice.json")
    assert again == choice and str(again) == str(choice)


def test_mixtures_are_measured_where_they_are_better_than_one_rule():
    """Limits that windows of the whole sequence do not fit in: found by the table alone."""
    single, window = ("d_rtrl", ()), ("no_trace", (("window", 8),))
    parts = lambda a, g: {"a": Part(a, a * a, 100), "g": Part(g, g * g, 0)}
    squares = {"a": 1.0, "g": 1.0}
    rows = [
        ("d_rtrl", single, {"a": Part(1, 1, 100), "g": Part(0.2, 1, 300)}),
        ("window", window, {"a": Part(0.3, 1, 0), "g": Part(1, 1, 0)}),
        ("none", ("no_trace", ()), {"a": Part(0.1, 1, 0), "g": Part(0.1, 1, 0)}),
    ]
    tried = [
        Tried(dict.fromkeys(squares, rule), cosine_of(of, squares), 1000, 0, 1.0, parts=of)
        for _, rule, of in rows
    ]
    first, *_ = mixtures(tried, squares, Limits(2000, 3.0))
    assert first == {"a": single, "g": window}
    assert cosine_of(parts(1, 1), squares) == pytest.approx(1)
    worse = Tried({"a": single, "g": window}, 0.5, 1000, 100, 1.0)
    assert best([*tried, worse], Limits(2000, 3.0)) is tried[1]
    better = Tried({"a": single, "g": window}, 1.0, 1000, 100, 1.5)
    assert best([*tried, better], Limits(2000, 3.0)) is better
    assert best([*tried, better], Limits(1050, 3.0)) is tried[1]
    assert best([*tried, better], Limits(10, 3.0)) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_never_worse_than_the_best_rule_that_fits(seed):
    rng, names = np.random.default_rng(seed), ("a", "b", "c")
    squares = dict.fromkeys(names, 1.0)
    rules = [("d_rtrl", ()), ("no_trace", ()), ("no_trace", (("window", 4),)), ("rtrl", ())]
    tried = []
    for rule in rules:
        of = {n: Part(float(rng.uniform(-1, 1)), 1.0, int(rng.integers(100))) for n in names}
        sizes = int(rng.integers(1000)), sum(p.bytes for p in of.values())
        cosine, seconds = cosine_of(of, squares), float(rng.uniform(0.5, 4))
        tried.append(Tried(dict.fromkeys(names, rule), cosine, *sizes, seconds, parts=of))
    limits = Limits(900, 3.0)
    uniform = best(tried, limits)
    for mixture in mixtures(tried, squares, limits):
        alone = {n: next(t for t in tried if t.uniform == r) for n, r in mixture.items()}
        cosine = cosine_of({n: t.parts[n] for n, t in alone.items()}, squares)
        traces = sum(t.parts[n].bytes for n, t in alone.items())
        working, seconds = (max(getattr(t, k) for t in alone.values()) for k in ("working", "time"))
        tried.append(Tried(mixture, cosine, working, traces, 1.3 * seconds))
    top = best(tried, limits)
    assert (top is None) == (uniform is None)
    assert top is None or top.cosine >= uniform.cosine - 1e-4


def scaled(seed, *shape):
    return drawn(seed, *shape) / (0.8 * shape[0] ** 0.5)


def stack(layers, n, seed=10):
    """Layers of minGRU, whose gates open slowly."""
    square = lambda k: scaled(k, n, n)
    each = {f"layer{i}": {"z": square(seed + i), "h": square(seed + 9 + i)} for i in range(layers)}

    def step(p, state, x):
        new, x = [], x @ p["enter"]
        for i, h in enumerate(state):
            z = jax.nn.sigmoid(x @ p[f"layer{i}"]["z"] - 2)
            x = (1 - z) * h + z * (x @ p[f"layer{i}"]["h"])
            new.append(x)
        return tuple(new), x

    return step, {**each, "enter": scaled(seed, I, n)}, (jnp.zeros((8, n)),) * layers


def under_a_gru(n, seed=30):
    """A leaky layer under a GRU."""
    gates = {k: 2 * scaled(seed + i, 2 * n, n) for i, k in enumerate("zrh")}

    def step(p, state, x):
        a, h = state
        a = 0.5 * a + x @ p["enter"]
        ah = jnp.concatenate([a, h], -1)
        z, r = jax.nn.sigmoid(ah @ p["gru"]["z"] - 1), jax.nn.sigmoid(ah @ p["gru"]["r"])
        h = (1 - z) * h + z * jnp.tanh(jnp.concatenate([a, r * h], -1) @ p["gru"]["h"])
        return (a, h), h

    return step, {"enter": scaled(seed, I, n), "gru": gates}, (jnp.zeros((8, n)),) * 2


PROGRAMS = {"four layers": stack(4, 24), "under a dense layer": under_a_gru(24)}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_one_call_beats_d_rtrl_in_its_memory(program):
    step, params, state = program
    xs = drawn(50, 64, 8, I)
    ys = jnp.roll(xs, 20, 0).sum(-1, keepdims=True)
    choice = choose_for(*program, xs, ys, loss, time=None, within=("d_rtrl", ()))
    d_rtrl = next(t for t in choice.tried if t.uniform == ("d_rtrl", ()))
    assert choice.best.bytes <= choice.limits.memory == d_rtrl.bytes
    assert choice.best.cosine >= d_rtrl.cosine + 0.05
    net = bt.online(step, choice.rule)
    assert net.init(params, state, xs[0]).state and net.memory == choice.best.traces


def test_a_chosen_replay_is_a_rule():
    choice = bt.choose(step, PARAMS, STATE, XS, YS, loss, time=None, stream=True)
    assert str(choice) and all("rolling" not in str(t.rule) for t in choice.tried)  # T is too short
    net = bt.online(step, {"*": ("rolling", {"window": 8})})
    assert str(net.rule) == str(bt.rules.rolling(8)) and net.window == 8


def test_limits_that_are_none_are_refused():
    ask = lambda **o: bt.choose(step, PARAMS, STATE, XS, YS, loss, **o)
    with pytest.raises(ValueError, match="'much'"):
        ask(memory="much")
    with pytest.raises(ValueError, match=r"time=-1.*\n.*\n.*positive"):
        ask(time=-1)
    with pytest.raises(TypeError, match=r"<lambda>.*\(x\)") as error:
        bt.choose(lambda x: x, PARAMS, STATE, XS, YS, loss)
    assert "why:" in str(error.value) and "do:" in str(error.value)
    with pytest.raises(TypeError, match="the loss has type int"):
        bt.choose(step, PARAMS, STATE, XS, YS, 3)


def test_what_cannot_fit_says_what_would():
    with pytest.raises(ValueError, match="no rule fits in 1 bytes") as error:
        bt.choose(step, PARAMS, STATE, XS, YS, loss, memory=1, time=None)
    assert "the smallest, " in str(error.value) and math.isfinite(1)


# ------------------------------------------------------------------------------- without data


def automatic(**options):
    net = bt.online(step, "auto", **options)
    net.init(PARAMS, STATE, XS[0])
    return net


def test_auto_is_the_fastest_exact_assignment_that_fits():
    net = automatic()
    assert all(p.exact for p in net.report.parameters.values()) and net.window is None
    assert not net.rule.shares or net.report.parameters["a", "w"].rule
    whole = automatic(length=T)  # one window over a sequence is cheaper, and exact
    assert (whole.rule.name, whole.window) == ("no_trace", T)


def test_auto_takes_the_longest_windows_where_nothing_exact_fits():
    n = 16
    params = {
        "a": {"decay": drawn(0, n), "w": drawn(1, I, n)},
        "g": {"w": drawn(2, n, n) / 4, "r": drawn(3, n, n) / 4},
    }
    state, ys, sizes = (jnp.zeros((B, n)),) * 2, drawn(5, T, B, n), []
    for memory in ("10kB", "20kB", "60kB"):
        net = bt.online(step, "auto", memory=memory, length=1000)
        carry = net.init(params, state, XS[0])
        sizes.append(net.window)
    assert sizes == sorted(sizes) and 2 <= sizes[0] < sizes[-1] < 1000
    assert all(size & (size - 1) == 0 for size in sizes)
    grads, _ = net.grad(loss)(params, carry, XS, ys)
    assert grads["g"]["r"].any()


def test_auto_says_what_it_needs():
    with pytest.raises(ValueError, match="10 bytes"):
        automatic(memory=10)
    with pytest.raises(ValueError, match="'auto' with decay"):
        bt.online(step, "auto", decay=0.9)
    with pytest.raises(ValueError, match="'auto' with window=8"):
        bt.online(step, "auto", window=8)
    with pytest.raises(RuntimeError, match="not chosen"):
        bt.online(step, "auto").grad(loss)
