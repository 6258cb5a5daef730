from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
import scipy.sparse
from jax.experimental import sparse as jax_sparse

import braintrace
from braintrace import verify
from braintrace.ops import _sparse, sparse_matmul
from braintrace.ops._operator import Operator
from braintrace.ops._structure import Structure, compiled, structure_of

brainevent = pytest.importorskip("brainevent")

RNG = np.random.default_rng(0)
DENSE = RNG.normal(size=(4, 5)) * (RNG.random((4, 5)) < 0.5)
X = jnp.asarray(RNG.normal(size=(2, 4)))

FORMATS = {
    "saiunit_csr": u.sparse.CSR.fromdense,
    "saiunit_csc": u.sparse.CSC.fromdense,
    "saiunit_coo": u.sparse.COO.fromdense,
    "brainevent_csr": brainevent.CSR.fromdense,
    "brainevent_csc": brainevent.CSC.fromdense,
    "jax_bcoo": jax_sparse.BCOO.fromdense,
    "jax_bcsr": jax_sparse.BCSR.fromdense,
    "jax_csr": jax_sparse.CSR.fromdense,
    "jax_csc": jax_sparse.CSC.fromdense,
    "jax_coo": jax_sparse.COO.fromdense,
    "scipy_csr": scipy.sparse.csr_matrix,
    "scipy_csc": scipy.sparse.csc_array,
    "scipy_coo": scipy.sparse.coo_array,
}


@pytest.mark.parametrize("name", FORMATS)
def test_sparse_matmul_reads_the_format_in_its_own_order(name):
    dense = DENSE if name.startswith("scipy") else jnp.asarray(DENSE)
    matrix = FORMATS[name](dense)
    out = sparse_matmul(X, jnp.asarray(matrix.data), sparse_mat=matrix)
    np.testing.assert_allclose(out, X @ DENSE, rtol=1e-12)


@pytest.mark.parametrize("name", ["lil", "dok", "dia", "bsr"])
def test_sparse_matmul_reads_other_scipy_formats_in_coo_order(name):
    matrix = scipy.sparse.csr_matrix(DENSE).asformat(name)
    out = sparse_matmul(X, matrix.tocoo().data, sparse_mat=matrix)
    np.testing.assert_allclose(out, X @ DENSE, rtol=1e-12)


def test_sparse_matmul_adds_repeated_positions():
    matrix = scipy.sparse.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(4, 5))
    out = sparse_matmul(X, jnp.array([1.0, 2.0]), sparse_mat=matrix)
    np.testing.assert_allclose(out[:, 1], 3 * X[:, 0])


@pytest.mark.parametrize("kind", [jax_sparse.BCOO, jax_sparse.BCSR, jax_sparse.CSR])
def test_sparse_matmul_ignores_padding(kind):
    matrix = kind.fromdense(jnp.asarray(DENSE), nse=np.count_nonzero(DENSE) + 3)
    out = sparse_matmul(X, jnp.asarray(matrix.data).at[-3:].set(9.0), sparse_mat=matrix)
    np.testing.assert_allclose(out, X @ DENSE, rtol=1e-12)


def test_structure_is_static_and_equal_by_content():
    one, two = (structure_of(scipy.sparse.csr_matrix(DENSE)) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one is not two
    assert one != structure_of(scipy.sparse.csc_matrix(DENSE))
    assert structure_of(one) is one and isinstance(one, Structure)
    traces = []

    @partial(jax.jit, static_argnums=2)
    def run(x, w, structure):
        traces.append(1)
        return sparse_matmul(x, w, sparse_mat=structure)

    run(X, jnp.ones(one.size), one)
    run(X, jnp.ones(one.size), two)
    assert len(traces) == 1


def test_sparse_matmul_has_two_spellings_and_shares_one_number():
    matrix = scipy.sparse.csr_matrix(DENSE)
    w = jnp.asarray(matrix.data)
    out = sparse_matmul(X, weight_data=w, sparse_mat=matrix)
    np.testing.assert_allclose(out, sparse_matmul(X, w, sparse_mat=matrix))
    shared = sparse_matmul(X, jnp.asarray(2.0), sparse_mat=matrix)
    np.testing.assert_allclose(shared, X @ (2.0 * (DENSE != 0)), rtol=1e-12)
    for arguments in ({}, {"weight": w, "weight_data": w}):
        with pytest.raises(TypeError, match="two names"):
            sparse_matmul(X, sparse_mat=matrix, **arguments)


class OnlyDense:
    shape = (4, 5)

    def todense(self):
        return DENSE


@pytest.mark.parametrize("matrix", [OnlyDense(), DENSE, None, "csr"])
def test_sparse_matmul_refuses_what_has_no_indices(matrix):
    with pytest.raises(TypeError, match=r"cannot use a \w+ as sparse_mat(.|\n)*why: (.|\n)*do: "):
        sparse_matmul(X, jnp.ones(3), sparse_mat=matrix)


def test_sparse_matmul_refuses_traced_and_batched_indices():
    with pytest.raises(TypeError, match="traced"):
        matrix = jax_sparse.BCOO.fromdense(DENSE)
        jax.jit(lambda m: sparse_matmul(X, m.data, sparse_mat=m))(matrix)
    with pytest.raises(TypeError, match="two axes"):
        matrix = jax_sparse.BCOO.fromdense(np.ones((2, 3)), n_batch=1)
        sparse_matmul(X, jnp.ones(3), sparse_mat=matrix)


@pytest.mark.parametrize(
    "x, size, bias, text",
    [
        (jnp.ones((1, 2, 4)), 0, None, r"x \(1, 2, 4\) has 3 axes"),
        (jnp.ones(5), 0, None, r"x \(5,\) does not fit sparse_mat \(4, 5\)"),
        (X, 1, None, r"does not have the shape"),
        (X, 0, jnp.ones(4), r"bias \(4,\) does not have the shape \(5,\)"),
    ],
)
def test_sparse_matmul_refuses_shapes_that_do_not_fit(x, size, bias, text):
    w = jnp.ones(np.count_nonzero(DENSE) + size)
    with pytest.raises(ValueError, match="sparse_matmul: (.|\n)*" + text):
        sparse_matmul(x, w, sparse_mat=scipy.sparse.csr_matrix(DENSE), bias=bias)


@pytest.mark.parametrize("gathered", [1, 40, 2**18])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_sums_over_steps_go_by_chunks_of_non_zeros(batch, gathered, monkeypatch):
    monkeypatch.setattr(_sparse, "_gathered", lambda: gathered)
    rng = np.random.default_rng(0)
    matrix = (rng.random((4, 3)) < 0.6) * 1.0
    structure = structure_of(jax_sparse.BCOO.fromdense(matrix, nse=np.count_nonzero(matrix) + 2))
    primitive = _sparse.etp_sp_mm if batch else _sparse.etp_sp_mv
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float64)
    params = {"structure": structure}
    operands = (shape(*batch, 4), shape(structure.size), shape(3))
    op = Operator(primitive, params, operands, shape(*batch, 3))
    x, c = (jnp.asarray(rng.normal(size=(5, *batch, n))) for n in (4, 3))
    weights = {"weight": jnp.zeros(structure.size), "bias": jnp.zeros(3)}
    grads = op.pull_all(x, c, weights, ["weight", "bias"])
    steps = [op.pull(x[i], c[i], weights) for i in range(5)]
    for k in weights:
        np.testing.assert_allclose(grads[k], sum(g[k] for g in steps), rtol=1e-12)
    values = jnp.asarray(rng.normal(size=(5, 2, *batch, 3, 2)))  # two lanes, two slots
    total = op.sum_steps("weight", x, values)
    ones = [op.features(a, weights, ["weight"])["weight"] for a in x]
    want = sum(
        one[..., None] * op.spread("weight", v, 1) for one, v in zip(ones, values, strict=True)
    )
    np.testing.assert_allclose(total, want, rtol=1e-12)
    assert not np.any(total[..., np.count_nonzero(matrix) :, :])
    D = jnp.asarray(rng.normal(size=(2, *batch, 3, 2, 2)))
    eps = jnp.asarray(rng.normal(size=total.shape))
    mixed = lambda D, eps: jnp.einsum("...ij,...j->...i", D, eps)
    onward = op.sum_steps("weight", x, values, (D, eps, mixed))
    np.testing.assert_allclose(
        onward, total + mixed(op.spread("weight", D, 1), eps), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("bias", [None, jnp.arange(5.0)])
def test_indices_are_arguments_of_compiled_programs(bias):
    structure = structure_of(scipy.sparse.csr_matrix(DENSE))
    weight = jnp.arange(1.0, 1 + structure.size)
    product = lambda x, w: sparse_matmul(x, w, sparse_mat=structure, bias=bias)

    def both(x, w):
        y, pull = jax.vjp(product, x, w)
        return y, pull(jnp.cos(y)), jax.vmap(product, (0, None))(jnp.stack([x, 2 * x]), w)

    run = compiled(both, [structure])
    jax.tree.map(np.testing.assert_allclose, run(X, weight), both(X, weight))
    text = str(jax.make_jaxpr(run)(X, weight))
    assert "sparse_product" in text and "etp_sp" not in text
    # Its derivative from outside, where the indices are not arguments any more.
    total = lambda f: jax.grad(lambda w: jnp.sum(jnp.sin(f(X, w)[0])))(weight)
    np.testing.assert_allclose(total(run), total(both))


def test_a_product_in_a_loop_of_the_step_is_learned():
    # JAX differentiates the body of a loop by itself: there, indices are no arguments.
    matrix = scipy.sparse.csr_array(np.array([[1.0, 0, 2], [0, 3, 0], [4, 5, 0]]))

    class Looped(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.linspace(-0.5, 0.7, 5))
            self.h = brainstate.HiddenState(jnp.array([0.3, -0.2, 0.1]))

        def update(self, x):
            def row(carry, v):
                y = sparse_matmul(v * x, self.w.value, sparse_mat=matrix)
                return 0.5 * carry + v, y.sum()

            rows = jax.lax.scan(row, 0.0, self.h.value)[1]
            self.h.value = jnp.tanh(rows + self.h.value)
            return self.h.value

    model, xs = Looped(), jnp.linspace(-1, 1, 12).reshape(4, 3)
    step = lambda net, x: (net(x) ** 2).sum()
    truth = verify.bptt_grad(model, step, xs)
    learner = braintrace.compile(model, "rtrl", xs[0])
    found = learner.etrace_grad(xs, step_fn=lambda x: step(learner, x), reduction="sum")
    np.testing.assert_allclose(found["w",], truth["w",], rtol=1e-12)


def test_a_product_in_a_while_of_the_step_belongs_to_no_call():
    # The loop without what mixes in it is kept from one call to the next.
    matrix = scipy.sparse.csr_array(np.array([[1.0, 0, 2], [0, 3, 0], [4, 5, 0]]))
    turn = lambda i, c: sparse_matmul(c @ jnp.ones((3, 3)), jnp.arange(5.0), sparse_mat=matrix)

    class Looped(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.linspace(-0.5, 0.7, 9).reshape(3, 3))
            self.h = brainstate.HiddenState(jnp.zeros(3))

        def update(self, x):
            y = braintrace.matmul(x, self.w.value) + self.h.value
            self.h.value = jnp.tanh(jax.lax.fori_loop(0, (x[0] > 0) + 1, turn, y))
            return self.h.value

    xs = jnp.linspace(-1, 1, 12).reshape(4, 3)
    model, step = Looped(), lambda x: (learner(x) ** 2).sum()
    learner = braintrace.compile(model, "d_rtrl", xs[0])
    found = []
    for size in (4, 1):
        model.h.value = jnp.zeros(3)
        learner.reset_state()
        found.append(learner.etrace_grad(xs, step_fn=step, reduction="sum", block_size=size))
    np.testing.assert_allclose(found[0]["w",], found[1]["w",], rtol=1e-12)


def products_of_events(active, monkeypatch):
    """Whether a product with so many non-zero inputs of 40 reads the others; it is compared."""
    monkeypatch.setattr(_sparse, "_LARGE", 0)
    monkeypatch.setattr(_sparse, "_on_cpu", lambda: True)  # what it runs on others, too
    rng = np.random.default_rng(active)
    matrix = (rng.random((40, 6)) < 0.5) * (rng.random((40, 1)) < 0.8)  # some have no row
    structure = structure_of(scipy.sparse.csr_matrix(matrix))
    assert structure.by_row and not structure_of(scipy.sparse.csc_matrix(matrix)).by_row
    x = np.zeros(40)
    x[rng.permutation(40)[:active]] = rng.normal(size=active)
    x, w, b = jnp.asarray(x), jnp.asarray(rng.normal(size=structure.size)), jnp.arange(6.0)
    product = lambda x, w: sparse_matmul(x, w, sparse_mat=structure, bias=b)

    def both(x, w):
        y, pull = jax.vjp(product, x, w)
        two = jnp.stack([x, 2 * x]), jnp.stack([w, w + 1])
        mapped = [jax.vmap(product, (0, None))(two[0], w), jax.vmap(product)(*two)]
        return y, pull(jnp.cos(y)), mapped

    got = compiled(both, [structure])(x, w)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), got, both(x, w))
    spikes = compiled(product, [structure])((x != 0).astype(jnp.int8), w)
    np.testing.assert_allclose(spikes, product((x != 0) * 1.0, w), rtol=1e-12, atol=1e-12)
    # What is zero is not read: 0 times infinity is no number.
    unread = np.isin(structure.rows, np.flatnonzero(x == 0))
    y = compiled(product, [structure])(x, jnp.where(unread, jnp.inf, w))
    return not bool(jnp.isfinite(y).all())


@pytest.mark.parametrize("active, events", [(0, 3), (5, 3), (4, 2**15), (9, 3)])  # at most 40 / 8
def test_a_few_inputs_are_events(active, events, monkeypatch):
    monkeypatch.setattr(_sparse, "_event_loop", lambda: None)
    monkeypatch.setattr(_sparse, "_EVENTS", events)
    assert products_of_events(active, monkeypatch) == (active > 5)


@pytest.mark.parametrize("active", [0, 5, 9, 40])
def test_events_are_a_loop_of_numba(active, monkeypatch):
    pytest.importorskip("numba")
    if jax.default_backend() != "cpu":
        pytest.skip("numba compiles for CPUs")
    assert _sparse._event_loop() is not None
    assert not products_of_events(active, monkeypatch)
