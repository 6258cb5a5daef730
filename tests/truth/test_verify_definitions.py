"""What the references keep and cut, against models and numbers written by hand."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import EXACT, RECURRENT, Draw, Net, T, spike_by_pullback, step_fn

import braintrace as bt
from braintrace import element_wise, matmul
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison
from braintrace.verify._sequence import at
from oracle import Structure, compare_to_rule, dense, reference_grad, rule_on

RULES = [
    ("d_rtrl", {}),
    ("pp_prop", {"decays": (0.8, 0.5)}),
    ("snap", {"n": 1}),
    ("snap", {"n": 2}),
]


def data(*shape, out=(4,)):
    draw = Draw("data")
    return draw(T, *shape, scale=1.0), draw(T, *out)


def assert_same_rules(one, other, sequences, windows=(None, 2)):
    a, b = (dense(net, step_fn, *sequences) for net in (one, other))
    for rule, options in RULES:
        for window in windows:
            result = comparison(*(rule_on(d, rule, window, **options) for d in (a, b)))
            assert result.max_error < 1e-10, f"{rule} {options} {window}\n{result}"


def assert_bptt(net, sequences, rule="d_rtrl", **options):
    found = rule_on(dense(net, step_fn, *sequences), rule, **options)
    result = comparison(found, bptt_grad(net, step_fn, *sequences))
    assert result.max_error < 1e-10, f"\n{result}"


# ------------------------------------------------------------------------------- control flow


def for_each(body, carry, xs):
    """`lax.scan` in Python."""
    outs = []
    for i in range(len(jax.tree.leaves(xs)[0])):
        carry, out = body(carry, at(xs, i))
        outs.append(out)
    return carry, jnp.stack(outs)


@pytest.mark.parametrize("reverse", [False, True])
def test_operators_in_a_scan_are_those_of_the_turns(reverse):
    def model(scan):
        def update(m, x):
            def body(h, turn):
                w, gain = turn
                y = matmul(x, w) + matmul(h, m.r.value)
                return 0.7 * h + 0.3 * jnp.tanh(gain * y), h + y

            turns = (m.w.value, jnp.arange(1.0, 4.0))
            m.h.value, seen = scan(body, m.h.value, turns)
            return m.h.value + seen[0]

        draw = Draw("turns")
        return Net(update, {"w": draw(3, 3, 4), "r": draw(4, 4)}, {"h": draw(4)})

    def backwards(body, carry, xs):
        carry, outs = for_each(body, carry, jax.tree.map(lambda a: a[::-1], xs))
        return carry, outs[::-1]

    scan = lambda *a: lax.scan(*a, reverse=reverse)
    assert_same_rules(model(scan), model(backwards if reverse else for_each), data(3))


def test_nested_bodies_are_written_out():
    def model(scan, cond):
        def update(m, x):
            def inner(h, gain):
                drive = lambda h: h + gain * matmul(x, m.w.value)
                return cond(h[0] > gain, drive, lambda h: 0.5 * h, h), h

            def outer(h, _):
                return scan(inner, h, jnp.array([0.1, 0.2]))

            m.h.value, _ = scan(outer, 0.9 * m.h.value, jnp.zeros(2))
            return m.h.value

        draw = Draw("nested")
        return Net(update, {"w": draw(3, 4)}, {"h": draw(4)})

    both = lambda p, yes, no, h: jnp.where(p, yes(h), no(h))
    a, b = model(lax.scan, lax.cond), model(for_each, both)
    xs = data(3)
    for rule in ("d_rtrl", "rtrl"):
        found = [rule_on(dense(net, step_fn, *xs), rule) for net in (a, b)]
        assert comparison(*found).max_error < 1e-10
    assert_bptt(a, xs)


def test_an_operator_that_is_not_executed_sees_zeros():
    def chosen(m, x):
        yes = lambda h: 0.5 * h + matmul(x, m.w.value)
        no = lambda h: jnp.tanh(h) + matmul(x, m.u.value) * element_wise(m.g.value)
        m.h.value = lax.cond(x[0] > 0, yes, no, m.h.value)
        return m.h.value

    def selected(m, x):
        taken, h = x[0] > 0, m.h.value
        yes = 0.5 * h + matmul(jnp.where(taken, x, 0), m.w.value)
        no = jnp.tanh(h) + matmul(jnp.where(taken, 0, x), m.u.value) * element_wise(m.g.value)
        m.h.value = jnp.where(taken, yes, no)
        return m.h.value

    def model(update):
        draw = Draw("sides")
        return Net(update, {"w": draw(3, 4), "u": draw(3, 4), "g": draw(4)}, {"h": draw(4)})

    assert_same_rules(model(chosen), model(selected), data(3))
    assert_bptt(model(chosen), data(3))


def test_a_side_that_is_not_taken_poisons_nothing():
    def update(m, x):
        def root(h):
            z = jnp.sqrt(x[0]) + jnp.log(h) * 0
            return 0.5 * h + m.p.value * z + matmul(jnp.sqrt(x[0]) * x, m.w.value)

        m.h.value = lax.cond(
            jnp.all(m.h.value > 0) & (x[0] > 0), root, lambda h: 0.1 - h, m.h.value
        )
        return m.h.value

    draw = Draw("poison")
    net = Net(update, {"w": draw(3, 4), "p": draw(4)}, {"h": jnp.ones(4)})
    xs = jnp.ones((T, 3)).at[1::2].set(-1.0), jnp.zeros((T, 4))  # taken once, then NaN inside
    found = dense(net, step_fn, *xs)
    for rule, options in RULES:
        grads = rule_on(found, rule, **options)
        assert all(np.isfinite(g).all() for g in grads.values())
    truth = bptt_grad(net, step_fn, *xs)
    assert comparison(rule_on(found, "rtrl"), truth).max_error < 1e-10


def test_copies_of_an_operator_are_one():
    # a_1 = h + tanh(w h) is stored, a_2 = a_1 + tanh(w a_1) is read. The second copy does not lead
    # back to h, the first does: both entries are cut, dL/dh is dL/da_2.
    def update(m, x):
        def body(a, _):
            a = a + jnp.tanh(matmul(a, m.w.value))
            return a, a

        _, (m.h.value, out) = lax.scan(body, m.h.value, None, 2)
        return out

    net = Net(update, {"w": jnp.array([[0.7]])}, {"h": jnp.array([0.3])})
    step = dense(net, lambda net, x: net(x).sum(), jnp.zeros((1, 1))).steps[0]
    np.testing.assert_allclose(step.lam, [1.0])
    a = 0.3 + np.tanh(0.21)
    slopes = [1 + 0.7 * (1 - np.tanh(v) ** 2) for v in (0.21, 0.7 * a)]
    np.testing.assert_allclose(step.l, [slopes[0] * slopes[1]])


@pytest.mark.parametrize("custom", [jax.custom_jvp, jax.custom_vjp])
def test_a_custom_derivative_around_an_operator_is_one_operator(custom):
    act = custom(lambda x, w: jnp.tanh(matmul(x, w)))
    plain = lambda x, w: jnp.tanh(x @ w)
    if custom is jax.custom_jvp:
        act.defjvp(lambda point, moved: jax.jvp(plain, point, moved))
    else:
        act.defvjp(lambda x, w: jax.vjp(plain, x, w), lambda pull, ct: pull(ct))

    def model(act):
        def update(m, x):
            m.h.value = 0.8 * m.h.value + act(jnp.concatenate([x, m.h.value]), 2 * m.w.value)
            return m.h.value

        draw = Draw("custom call")
        return Net(update, {"w": draw(7, 4)}, {"h": draw(4)})

    a, b = model(act), model(lambda x, w: jnp.tanh(matmul(x, w)))
    xs = data(3)
    for rule, options in [r for r in RULES if r[0] != "pp_prop"]:
        found = [rule_on(dense(net, step_fn, *xs), rule, **options) for net in (a, b)]
        assert comparison(*found).max_error < 1e-10


# -------------------------------------------------------------------- sums, choices and trees


def kept_of(net):
    """The kept pairs of a model by names of states."""
    step = Structure(net, lambda net, x: jnp.sum(net(x)), (jnp.ones(3),))
    rows = dict(zip((s.path[0] for s in step.hidden), _rows(step), strict=True))
    return {(a, b): step.kept[rows[a]][:, rows[b]] for a in rows for b in rows}


def _rows(step):
    ends = np.cumsum([s.entry.size for s in step.hidden])
    return [slice(e - s.entry.size, e) for e, s in zip(ends, step.hidden, strict=True)]


def ring(m, x):
    buffer, h, i = m.buffer.value, m.h.value, m.i.value
    buffer = buffer.at[i].set(jnp.tanh(h) + matmul(x, m.w.value))
    m.h.value = 0.5 * h + lax.dynamic_index_in_dim(buffer, (i + 1) % 3, keepdims=False)
    m.buffer.value, m.i.value = 0.9 * buffer, (i + 1) % 3
    return m.h.value


def test_a_ring_buffer_is_kept():
    draw, one = Draw("ring"), jnp.asarray(1)
    states = {"buffer": draw(3, 4), "h": draw(4), "i": brainstate.ShortTermState(one)}
    net = Net(ring, {"w": draw(3, 4)}, states)
    kept = kept_of(net)
    rows = np.arange(12) % 4
    same = rows[:, None] == np.arange(4)
    np.testing.assert_array_equal(kept["buffer", "buffer"], np.eye(12))
    np.testing.assert_array_equal(kept["buffer", "h"], same)
    np.testing.assert_array_equal(kept["h", "buffer"], same.T)
    assert_bptt(net, data(3))


def test_gathers_and_scatters_at_unknown_places():
    def update(m, x):
        at = jnp.argsort(x)[:2]
        m.a.value = m.a.value.at[:, at].set(jnp.tanh(m.b.value)) + matmul(x, m.w.value)
        m.b.value = 0.5 * m.a.value[:, at] + m.b.value.at[:, at[:1]].add(m.c.value)
        m.c.value = 0.9 * m.c.value
        return m.a.value

    draw = Draw("places")
    states = {"a": draw(2, 4), "b": draw(2, 2), "c": draw(2, 1)}
    kept = kept_of(Net(update, {"w": draw(3, 4)}, states))
    np.testing.assert_array_equal(kept["a", "a"], np.eye(8))  # and no unit of b: four read each
    assert not kept["a", "b"].any() and not kept["b", "a"].any()
    # c (row r) may be added to either unit of b in its row, and each reads one position of c.
    np.testing.assert_array_equal(kept["b", "c"], [[1, 0], [1, 0], [0, 1], [0, 1]])


def synapses(total, feedback):
    def update(m, x):
        back = m.v.value if feedback else 0.0
        m.s.value = 0.8 * m.s.value + x[:, None] * element_wise(m.w.value) + back
        m.v.value = jnp.tanh(0.5 * m.v.value + total(m.s.value, m.k.value))
        return m.v.value

    draw = Draw("tree")
    params = {"w": draw(3, 4), "k": draw(3, 4)}
    return Net(update, params, {"s": draw(3, 4), "v": draw(4)})


TOTALS = {
    "sum": lambda s, k: s.sum(0),
    "max": lambda s, k: s.max(0),
    "batched product": lambda s, k: jnp.einsum("io,io->o", s, k),
}


@pytest.mark.parametrize("total", TOTALS)
def test_synapses_summed_to_a_neuron_are_a_tree(total):
    tree = np.arange(4)[:, None] == np.arange(12) % 4
    # With feedback what a sum makes reaches three synapses one step later: it is cut.
    for feedback, kept in ((False, tree), (True, np.zeros_like(tree))):
        found = kept_of(synapses(TOTALS[total], feedback))
        np.testing.assert_array_equal(found["v", "s"], kept)


def test_the_gradient_through_a_tree_is_exact():
    for total in ("sum", "batched product"):
        args = synapses(TOTALS[total], False), step_fn, *data(3)
        found, truth = reference_grad("d_rtrl", *args), bptt_grad(*args)
        np.testing.assert_allclose(found["w",], truth["w",], rtol=1e-9)  # k is used plainly


def test_layer_norm_keeps_its_direct_path_only():
    def update(m, x):
        h = m.h.value
        m.h.value = h - h.mean(-1, keepdims=True) + h.mean(0) + matmul(x, m.w.value)
        return m.h.value

    net = Net(update, {"w": jnp.ones((3, 4))}, {"h": Draw("norm")(2, 4)})
    step = dense(net, step_fn, *data(2, 3, out=(2, 4))).steps[0]
    np.testing.assert_allclose(step.D[0], np.eye(8))
    assert abs(step.A - step.D[0]).max() > 0.2


def test_the_last_sum_that_mixes_is_cut_first():
    # The first sum makes one number per row, the second one of all rows: without the second the
    # first keeps rows apart.
    def update(m, x):
        r = m.s.value.sum(1)
        m.v.value = 0.5 * m.v.value + r - r.sum()
        m.s.value = 0.9 * m.s.value + matmul(x, m.w.value)
        return m.v.value

    states = {"s": jnp.ones((2, 4)), "v": jnp.ones(2)}
    kept = kept_of(Net(update, {"w": jnp.ones((3, 4))}, states))
    np.testing.assert_array_equal(kept["v", "s"], np.arange(2)[:, None] == np.arange(8) // 4)


# ------------------------------------------------------------------------------ SnAp and RTRL

ALIVE = ["vanilla", "lstm", "loop_of_three_layers", "neighbours", "layer_norm"]
ALIVE += ["weight_behind_weight", "operators_inside_bodies", "moved_beside_own", "three_states"]


@pytest.mark.parametrize("name", ALIVE)
def test_enough_crossings_are_rtrl_and_bptt(name):
    c = {**EXACT, **RECURRENT}[name]()
    seen, truth = dense(c.model, step_fn, *c.sequences), bptt_grad(c.model, step_fn, *c.sequences)
    for window in (None, 2):
        for rule, options in (("rtrl", {}), ("snap", {"n": 8})):
            assert comparison(rule_on(seen, rule, window, **options), truth).max_error < 1e-9
    if name in RECURRENT:
        assert comparison(rule_on(seen, "snap", n=1), truth).max_error > 1e-3


def test_snap_1_of_a_vanilla_rnn_by_hand():
    def update(m, x):
        m.h.value = jnp.tanh(matmul(jnp.concatenate([x, m.h.value]), m.w.value))
        return m.h.value

    draw = Draw("by hand")
    net = Net(update, {"w": draw(7, 4)}, {"h": draw(4)})
    xs, targets = data(3)
    w, h = np.asarray(net.w.value), np.asarray(net.h.value)
    E, total = np.zeros((7, 4)), np.zeros((7, 4))  # dh[o]/dw[i, o]
    for x, target in zip(np.asarray(xs), np.asarray(targets), strict=True):
        z = np.concatenate([x, h])
        h = np.tanh(z @ w)
        slope = 1 - h**2
        E = slope * np.diag(w[3:]) * E + slope * z[:, None]
        total += (h - target) * E
    found = reference_grad("snap", net, step_fn, xs, targets, n=1)["w",]
    np.testing.assert_allclose(found, total, rtol=1e-10)


def test_slots_grow_by_one_neighbour_per_crossing():
    def update(m, x):
        m.h.value = 0.5 * m.h.value + 0.3 * jnp.roll(m.h.value, 1) + matmul(x, m.w.value)
        return m.h.value

    net = Net(update, {"w": jnp.ones((3, 4))}, {"h": jnp.ones(4)})
    step = Structure(net, step_fn, (jnp.ones(3), jnp.ones(4)))
    shift = np.roll(np.eye(4), 1, axis=0)
    band = np.eye(4)
    for n in (1, 2, 3):
        np.testing.assert_array_equal(step.slots(n)[0], band != 0)
        band = band + shift @ band


def test_batch_members_never_meet():
    def update(m, x):
        m.h.value = jnp.tanh(matmul(x, m.w.value) + matmul(m.h.value, m.r.value))
        return m.h.value

    net = Net(update, {"w": jnp.ones((3, 4)), "r": jnp.ones((4, 4))}, {"h": jnp.ones((2, 4))})
    step = Structure(net, step_fn, (jnp.ones((2, 3)), jnp.ones((2, 4))))
    row = np.arange(8) // 4
    for slots in step.slots(5):
        np.testing.assert_array_equal(slots, row[:, None] == row)


class SnAp(bt.D_RTRL):
    n = 1


class RTRL(bt.D_RTRL):
    pass


@pytest.mark.parametrize("rule", [SnAp, RTRL])
def test_compare_knows_snap_and_rtrl(rule):
    c = EXACT["three_states"]()  # where D-RTRL is both
    learner = rule(c.model)
    learner.compile_graph(c.x0)
    result = compare_to_rule(learner, step_fn, *c.sequences)
    assert result.max_error < 1e-9


# -------------------------------------------------------------------------------------- while


def adaptive(loop, mix=0.0, fire=jnp.tanh):
    def update(m, x):
        y = matmul(x, m.w.value)
        body = lambda v: v + 0.2 * (y - jnp.sinh(v)) + (mix * v.sum() if mix else 0.0)
        m.h.value = fire(loop(body, m.h.value) + 0.1 * y)
        return m.h.value

    draw = Draw("adaptive")
    return Net(update, {"w": draw(3, 4)}, {"h": draw(4)})


def turns(body, v):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1])), (0, v))[1]


written = lambda body, v: body(body(body(v)))


@pytest.mark.parametrize("fire", [jnp.tanh, lambda v: 0.5 * v + spike_by_pullback(v)])
def test_a_while_is_differentiated_forward(fire):
    xs = data(3)
    one, other = adaptive(turns, fire=fire), adaptive(written, fire=fire)
    for reduction in ("sum", "mean"):
        pair = [bptt_grad(net, step_fn, *xs, reduction=reduction) for net in (one, other)]
        assert comparison(*pair).max_error < 1e-10
    assert_same_rules(one, other, xs)
    assert_bptt(one, xs)


def test_a_while_that_mixes_is_cut():
    seen = dense(adaptive(turns, mix=0.1), step_fn, *data(3))
    assert not np.any(seen.steps[0].D) and seen.steps[0].A.all()
    truth = bptt_grad(adaptive(written, mix=0.1), step_fn, *data(3))
    for rule, options in (("rtrl", {}), ("snap", {"n": 2})):
        assert comparison(rule_on(seen, rule, **options), truth).max_error < 1e-9


def test_forward_mode_of_chosen_and_complex_weights():
    def model(loop):
        def update(m, x):
            y = matmul(x.astype(complex), m.w.value)
            m.h.value = loop(lambda v: 0.5 * v + 0.1 * jnp.sin(y.real * v) + y.imag, m.h.value)
            return m.h.value + m.b.value

        draw = Draw("complex while")
        return Net(update, {"w": draw.complex(3, 4), "b": draw(4)}, {"h": draw(4)})

    a, b = model(turns), model(written)
    found = bptt_grad(a, step_fn, *data(3), weights=a.w)
    assert set(found) == {("w",)}
    truth = bptt_grad(b, step_fn, *data(3), weights=b.w)
    assert comparison(found, truth).max_error < 1e-10
