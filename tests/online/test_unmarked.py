"""Plain JAX is recognised: every trained value that meets a varying one is an operator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace as bt
from braintrace._errors import dotted
from interpret import computed

B, N, I, T = 2, 4, 3, 8


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape, scale=0.5):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape))


XS = np.random.default_rng(0).normal(size=(T, B, I))


def gradient(step, rule, params, state, xs, loss=lambda out: jnp.sum(out**2), **options):
    net = bt.online(step, rule, **options)
    carry = net.init(params, state, *jax.tree.map(lambda a: a[0], (xs,)))
    # Several blocks: in a single one no trace is read.
    return computed(lambda: net.grad(loss, block_size=3)(params, carry, xs)[0]), net


def bptt(step, params, state, xs, loss=lambda out: jnp.sum(out**2)):
    def total(params):
        def body(state, x):
            state, out = step(params, state, x)
            return state, loss(out)

        return lax.scan(body, state, xs)[1].sum()

    return computed(lambda: jax.grad(total)(params))


def close(got, want, tolerance=1e-9):
    leaf = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    jax.tree.map(leaf, got, want)


SUMS = {
    "alone": (lambda x, h, b, c: x + (h + b + c), 3),  # a product has one bias
    "last": (lambda x, h, b, c: x + h + (b + c), 2),
    "one after the other": (lambda x, h, b, c: x + h + b + c, 2),
    "first": (lambda x, h, b, c: c + (b + (x + h)), 2),
    "behind a sum that is read": (lambda x, h, b, c: (s := x + h) + b + c + 0 * s, 4),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_bias_behind_a_sum_of_products_is_that_of_a_product(name):
    def stepping(total):
        def step(p, h, x):
            h = jnp.tanh(total(x @ p["w"], h @ p["r"], p["b"], p["c"]))
            return h, h

        return step

    weights = {"w": normal(1, I, N), "r": normal(2, N, N)}
    params = weights | {"b": normal(3, N), "c": normal(4, N)}
    total, operators = SUMS[name]
    args = (params, normal(5, B, N), XS)
    got, net = gradient(stepping(total), "d_rtrl", *args)
    assert len(net._last.graph.relations) == operators
    close(got, gradient(stepping(SUMS["alone"][0]), "d_rtrl", *args)[0])
    close(gradient(stepping(total), "d_rtrl", *args, window=T)[0], bptt(stepping(total), *args))


def recurrent(mm=jnp.matmul, elem=lambda a: a):
    """A leaky recurrent layer in plain JAX, or with operators."""

    def step(p, h, x):
        h = jnp.tanh(elem(p["a"]) * h + mm(x, p["w"]) + mm(h, p["r"]) + elem(p["b"]))
        return h, h @ p["o"]

    return step


PARAMS = {
    "a": np.full(N, 0.8),
    "b": np.asarray(normal(5, N)),
    "o": np.asarray(normal(4, N, 2)),
    "r": np.asarray(normal(3, N, N)),
    "w": np.asarray(normal(2, I, N)),
}


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


RULES = {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}, "rtrl": {}, "snap": {"n": 2}}


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_model_learns_like_its_marked_twin(rule):
    plain = recurrent()
    marked = recurrent(bt.matmul, bt.element_wise)
    zeros = jnp.zeros((B, N))
    got, net = gradient(plain, rule, params(), zeros, jnp.asarray(XS), **RULES[rule])
    want, other = gradient(
        marked, rule, params(), zeros, jnp.asarray(XS), marked_only=True, **RULES[rule]
    )
    close(got, want)
    how = lambda net: {k: (p.how, p.exact) for k, p in net.report.parameters.items()}
    assert how(net) == how(other) and net.memory <= other.memory


def test_marked_models_are_not_changed():
    marked, zeros = recurrent(bt.matmul, bt.element_wise), jnp.zeros((B, N))
    got, net = gradient(marked, "d_rtrl", params(), zeros, jnp.asarray(XS))
    want, other = gradient(marked, "d_rtrl", params(), zeros, jnp.asarray(XS), marked_only=True)
    close(got, want, 0)
    assert net.memory == other.memory


def test_without_recognition_a_plain_model_is_refused():
    with pytest.raises(bt.CompilationError, match="no parameter reaches a state"):
        gradient(
            recurrent(),
            "d_rtrl",
            params(),
            jnp.zeros((B, N)),
            jnp.asarray(XS),
            marked_only=True,
        )


# ------------------------------------------------------------------------- one step, one weight


def leak(write):
    """A layer without recurrent weights: D-RTRL is exact."""

    def step(p, h, x):
        h = 0.7 * h + jnp.tanh(write(p, x, h))
        return h, h

    return step


def conv_layer(p, x, h):
    dims = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=dims) + p["b"]


def in_a_scan(p, x, h):
    return lax.scan(lambda c, _: (jnp.tanh(c + x @ p["w"]), None), jnp.zeros((B, N)), None, 3)[0]


def in_a_branch(p, x, h):
    return lax.cond(x[0, 0] > 0, lambda x: x @ p["w"], lambda x: (2 * x) @ p["w"] + p["b"], x)


LAYERS = {
    "weight right": (lambda p, x, h: x @ p["w"], {"w": (I, N)}, (B, N)),
    "weight left": (lambda p, x, h: (p["w"] @ x.T).T, {"w": (N, I)}, (B, N)),
    "no batch": (lambda p, x, h: p["w"] @ x[0] + p["b"], {"w": (N, I), "b": (N,)}, (N,)),
    "mapped": (
        lambda p, x, h: jax.vmap(lambda x: p["w"] @ x + p["b"])(x),
        {"w": (N, I), "b": (N,)},
        (B, N),
    ),
    "batch of products": (
        lambda p, x, h: jnp.einsum("bi,bio->bo", x, jnp.stack([p["w"], 2 * p["w"]])),
        {"w": (I, N)},
        (B, N),
    ),
    "a bias per sample": (
        lambda p, x, h: x @ p["w"] + p["b"],
        {"w": (I, N), "b": (B, N)},
        (B, N),
    ),
    "heads": (
        lambda p, x, h: jnp.einsum("bi,hio->bho", x, p["w"]) + p["b"],
        {"w": (2, I, N), "b": (2, N)},
        (B, 2, N),
    ),
    "transposed weight": (lambda p, x, h: x @ p["w"].T, {"w": (N, I)}, (B, N)),
    "a function of the weight": (
        lambda p, x, h: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)),
        {"w": (I, N)},
        (B, N),
    ),
    "scale and shift": (
        lambda p, x, h: p["g"] * (x @ p["w"]) + p["b"] - p["c"],
        {"w": (I, N), "g": (N,), "b": (N,), "c": (1, N)},
        (B, N),
    ),
    "element-wise": (
        lambda p, x, h: jnp.where(x[:, :1] > 0, p["a"], jnp.maximum(p["b"], x[:, :1]) / p["c"]),
        {"a": (N,), "b": (N,), "c": (N,)},
        (B, N),
    ),
    "power": (lambda p, x, h: jnp.abs(x[:, :1]) ** jnp.exp(p["a"]), {"a": (N,)}, (B, N)),
    "masked weight": (
        lambda p, x, h: x @ (p["w"] * (x[0, :, None] > 0)),
        {"w": (I, N)},
        (B, N),
    ),
    "gain from the input": (
        lambda p, x, h: x @ (p["w"] * jnp.tanh(x[:1].T)),
        {"w": (I, N)},
        (B, N),
    ),
    "expert by index": (
        lambda p, x, h: x @ p["w"][(x[0, 0] > 0).astype(int)],
        {"w": (2, I, N)},
        (B, N),
    ),
    "rows of a table": (
        lambda p, x, h: p["w"][(x[:, 0] > 0).astype(int) + (x[:, 1] > 0)],
        {"w": (3, N)},
        (B, N),
    ),
    "rows, clipped": (
        lambda p, x, h: jnp.take(p["w"], 9 * (x[:, 0] > 0).astype(int) - 1, axis=0, mode="clip"),
        {"w": (3, N)},
        (B, N),
    ),
    "rows, filled": (
        lambda p, x, h: p["w"].at[4 * (x[:, 0] > 0).astype(int)].get(mode="fill", fill_value=2.0),
        {"w": (3, N)},
        (B, N),
    ),
    "conv": (conv_layer, {"w": (3, 1, 2), "b": (2,)}, (B, I, 2)),
    "in a scan": (in_a_scan, {"w": (I, N)}, (B, N)),
    "in a branch": (in_a_branch, {"w": (I, N), "b": (N,)}, (B, N)),
    "rematerialised": (
        lambda p, x, h: jax.checkpoint(lambda x: jnp.sin(x @ p["w"]))(x),
        {"w": (I, N)},
        (B, N),
    ),
    "softmax gate": (
        lambda p, x, h: jax.nn.softmax(p["a"]) * (x @ p["w"]),
        {"w": (I, N), "a": (N,)},
        (B, N),
    ),
    "complex": (
        lambda p, x, h: jnp.real((p["a"] + 1j * p["b"]) * (x @ p["w"]) * (1 + 2j)),
        {"w": (I, N), "a": (N,), "b": (N,)},
        (B, N),
    ),
    "low rank": (lambda p, x, h: x @ (p["u"] @ p["v"]), {"u": (I, 2), "v": (2, N)}, (B, N)),
}


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_recurrent_weights_is_exact(name, rule):
    write, shapes, state = LAYERS[name]
    step = leak(write)
    weights = {k: normal(i + 1, *s) for i, (k, s) in enumerate(shapes.items())}
    xs = jnp.asarray(XS)[..., None] if name == "conv" else jnp.asarray(XS)
    got, net = gradient(step, rule, weights, jnp.zeros(state), xs)
    want = bptt(step, weights, jnp.zeros(state), xs)
    close(got, want)
    assert all(p.exact and p.how == "trace" for p in net.report.parameters.values()), net.report
    assert all(jnp.abs(a).max() > 1e-6 for a in jax.tree.leaves(want))


def test_blocks_are_steps_are_the_gradient_of_a_scan():
    step, p, zeros, xs = recurrent(), params(), jnp.zeros((B, N)), jnp.asarray(XS)
    net = bt.online(step, "d_rtrl")
    carry = net.init(p, zeros, xs[0])
    loss = lambda out: jnp.sum(out**2)
    want = computed(lambda: net.grad(loss, block_size=1)(p, carry, xs)[0])
    close(computed(lambda: net.grad(loss, block_size=3)(p, carry, xs)[0]), want)
    scanned = lambda p: jnp.sum(net.scan(p, carry, xs)[1] ** 2)
    close(computed(lambda: jax.grad(scanned)(p)), want)

    def loop(p):
        at, total = carry, 0.0
        for x in xs:
            at, out = net(p, at, x)
            total = total + loss(out)
        return total

    close(computed(lambda: jax.grad(loop)(p)), want)


def test_precision_and_result_type_survive():
    def write(p, x, h):
        how = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        y = lax.dot_general(x.astype(jnp.bfloat16), p["w"], (((1,), (0,)), ((), ())), **how)
        return y.astype(jnp.float32)

    step = leak(write)
    weights = {"w": normal(1, I, N).astype(jnp.bfloat16)}
    xs, zeros = jnp.asarray(XS, jnp.float32), jnp.zeros((B, N), jnp.float32)
    got, net = gradient(step, "d_rtrl", weights, zeros, xs)
    assert got["w"].dtype == jnp.bfloat16 and net.report.parameters["w",].how == "trace"
    close(
        *(
            jax.tree.map(lambda a: a.astype(float), g)
            for g in (got, bptt(step, weights, zeros, xs))
        ),
        0.04,  # sums of up to 8 in eight bits, in the order of the blocks
    )


# ---------------------------------------------------------------------------- what stays plain


def attention(p, h, x):
    scores = jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).T)
    h = jnp.tanh(0.5 * h + scores @ h + x @ p["w"])
    return h, h


def fast_weights(p, state, x):
    h, fast = state
    key = jnp.tanh(h @ p["k"])
    fast = 0.9 * fast + key[:, :, None] * h[:, None, :]
    h = jnp.tanh(jnp.einsum("bkn,bk->bn", fast, jnp.sin(x @ p["q"])) + x @ p["w"])
    return (h, fast), h


def low_rank(p, h, x):
    h = jnp.tanh(0.5 * h + (x @ p["A"]) @ p["B"])
    return h, h


def in_a_while(p, h, x):
    body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["u"]))
    h = 0.5 * lax.while_loop(lambda c: c[0] < 3, body, (0, h))[1] + x @ p["w"]
    return h, h


H = (B, N)
PLAIN = {  # a step, the shapes of its parameters and states, and those without a trace
    "attention": (attention, {"q": (N, N), "k": (N, N), "w": (I, N)}, H, "qk"),
    "fast weights": (fast_weights, {"k": (N, 2), "q": (I, 2), "w": (I, N)}, (H, (B, 2, N)), "q"),
    "low rank": (low_rank, {"A": (I, 3), "B": (3, N)}, H, "A"),
    "while": (in_a_while, {"u": (N, N), "w": (I, N)}, H, "u"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_stays_plain_keeps_its_gradient_within_the_step_and_has_a_line(name):
    step, shapes, state, plain = PLAIN[name]
    weights = {k: normal(i + 1, *s) for i, (k, s) in enumerate(shapes.items())}
    state = jax.tree.map(lambda s: normal(9, *s), state, is_leaf=lambda s: isinstance(s[0], int))

    def forward(entry):  # a `while` has no reverse mode in JAX
        def total(weights):
            def body(state, x):
                state, out = step(weights, jax.tree.map(entry, state), x)
                return state, jnp.sum(out**2)

            return lax.scan(body, state, jnp.asarray(XS))[1].sum()

        return computed(lambda: jax.jacfwd(total)(weights))

    truth, within = forward(lambda a: a), forward(lax.stop_gradient)
    close(gradient(step, "rtrl", weights, state, jnp.asarray(XS))[0], truth)
    got, net = gradient(step, "d_rtrl", weights, state, jnp.asarray(XS))
    reports = {k: p for (k,), p in net.report.parameters.items()}
    assert [k for k in reports if reports[k].how == "within-step"] == sorted(plain)
    for k, p in reports.items():
        assert p.exact == bool(np.abs(got[k] - truth[k]).max() < 1e-9), p
    for k in plain:
        close(got[k], within[k])
        assert reports[k].dropped and all(d.line for d in reports[k].dropped)
        line = next(d.message for d in net.report.diagnostics if d.weight_path == (k,))
        assert "exact gradient within the step" in line and "the rule 'rtrl' follows it" in line


# --------------------------------------------------------------------------------- known pitfalls


def test_a_bias_is_part_of_its_product():
    for write, w in (
        (lambda p, x, h: x @ p["w"] + p["b"], (I, N)),
        (lambda p, x, h: jax.vmap(lambda x: p["b"] + p["w"] @ x)(x), (N, I)),
    ):
        net = bt.online(leak(write))
        net.init({"w": normal(1, *w), "b": normal(2, N)}, jnp.zeros((B, N)), jnp.asarray(XS[0]))
        w, b = net.report.parameters["w",], net.report.parameters["b",]
        assert len(net.report.etrace_weights) == 2 and w.operators == b.operators
        assert b.trace_shapes == ((B, N, 1),)  # its own, of the same relation


def test_parameters_are_named_by_their_path_in_the_tree():
    def step(p, states, x):
        new = []
        for layer, h in zip(p["layers"], states, strict=True):
            x = jnp.tanh(0.5 * h + x @ layer["w"])
            new.append(x)
        return new, x

    weights = {"layers": [{"w": normal(1, I, N)}, {"w": normal(2, N, N)}]}
    net = bt.online(step)
    net.init(weights, [jnp.zeros((B, N))] * 2, jnp.asarray(XS[0]))
    first, last = net.report.parameters
    assert (first, last) == (("layers", 0, "w"), ("layers", 1, "w"))
    assert f"{dotted(first)} -> {dotted(last)}" in str(net.report.parameters[first])


def test_what_recognition_cannot_follow_is_told_what_to_do():
    def step(p, h, x):
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"]))
        h = lax.while_loop(lambda c: c[0] < 3, body, (0, h))[1]
        return h, h

    with pytest.raises(bt.CompilationError, match="outside of a while_loop") as error:
        bt.online(step).init({"w": normal(1, N, N)}, jnp.zeros((B, N)), jnp.asarray(XS[0]))
    assert "braintrace.matmul" not in str(error.value) and "rtrl" in str(error.value)


def test_products_of_one_sample_at_a_time_are_those_of_all_samples():
    rng = np.random.default_rng(0)
    w, u, b = (jnp.asarray(rng.normal(size=s)) for s in ((2 * N, I), (2 * N, N), 2 * N))

    def one(p, h, x):
        g, c = jnp.split(p["w"] @ x + p["b"] + p["u"] @ h, 2)
        return h + jax.nn.sigmoid(g) * (jnp.tanh(c) - h)

    def together(p, h, x):
        g, c = jnp.split(x @ p["w"].T + p["b"] + h @ p["u"].T, 2, -1)
        return h + jax.nn.sigmoid(g) * (jnp.tanh(c) - h)

    p, zeros, xs = {"w": w, "u": u, "b": b}, jnp.zeros((B, N)), jnp.asarray(XS)

    def lowered(cell):
        def step(p, h, x):
            h = cell(p, h, x)
            return h, h

        net = bt.online(step)
        carry = net.init(p, zeros, xs[0])
        loss = lambda p: (net.scan(p, carry, xs)[1] ** 2).sum()
        return jax.grad(loss)(p), jax.jit(jax.grad(loss)).lower(p).as_text()

    got, text = lowered(jax.vmap(one, (None, 0, 0)))
    want, plain = lowered(together)
    close(got, want)
    assert text.count("stablehlo.transpose") <= plain.count("stablehlo.transpose")


def test_a_product_of_a_key_and_a_memory_leaves_the_key_its_operator():
    """A key is no weight with a varying factor: the memory is a state, and cannot be one."""

    def step(p, memory, x):
        places = jax.nn.softmax(jnp.einsum("bd,bnd->bn", x @ p["key"], memory), -1)
        memory = memory + 0.3 * places[..., None] * (jnp.tanh(x @ p["value"]) - 0.1)[:, None]
        return memory, jnp.einsum("bn,bnd->bd", places, memory)

    weights, state = {"key": normal(1, I, N), "value": normal(2, I, N)}, normal(3, B, 5, N)
    got, net = gradient(step, "snap", weights, state, jnp.asarray(XS), n=3)
    close(got, bptt(step, weights, state, jnp.asarray(XS)))
    assert all(p.how == "trace" and p.exact for p in net.report.parameters.values())
