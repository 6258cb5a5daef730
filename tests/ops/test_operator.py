"""Every operator, alone and under `vmap`, satisfies the mathematics of the operator record."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.ops import ETPPrimitive, Operator, register_primitive
from braintrace.program import trace


def close(a, b):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-9, atol=1e-9), a, b)


def inexact(args):
    return [i for i, a in enumerate(args) if jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact)]


def random_like(a, seed=1):
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.arange(int(np.prod(a.shape))).astype(a.dtype).reshape(a.shape)
    out = np.random.default_rng(seed).normal(size=a.shape)
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        out = out + 1j * np.random.default_rng(seed + 1).normal(size=a.shape)
    return jnp.asarray(out, a.dtype)


def uses(fun, *args):
    """The operators in a function, each with arbitrary values of its operands."""
    program, _ = trace(fun, *args)
    for eqn in program.equations:
        if isinstance(eqn.primitive, ETPPrimitive):
            op = Operator.of(eqn.primitive, eqn.params, eqn.inputs, eqn.outputs[0])
            yield op, [random_like(a, seed=2 + i) for i, a in enumerate(op.operands)]


def operands(op, values):
    i = op.primitive.x_invar_index
    raw = {k: jnp.asarray(values[p]) for k, p in op.positions.items()}
    return None if i is None else values[i], op.effective(raw), raw


def check(pairs, *args):
    """Compare pairs of arrays that one compiled function computes."""
    for a, b in jax.jit(pairs)(*args):
        close(a, b)


def check_record(op, values):
    """features × spread is the pull-back, the pull-back is reverse mode, shapes are as declared."""

    def pairs(values):
        x, effective, raw = operands(op, values)
        c = random_like(op.y)
        pulled = op.pull(x, c, effective)
        features = op.features(x, effective)
        assert set(features) == set(effective) == set(op.shapes)
        for key, w in effective.items():
            full = lambda a, key=key: jnp.broadcast_to(a, op.trace_shape(key))
            spread = full(op.spread(key, c))
            total = (spread * full(features[key])).sum(tuple(range(len(op.free_shape(key)))))
            yield total if jnp.iscomplexobj(w) else total.real, pulled[key]
            # More leading and trailing axes: what a trace of several states asks for.
            many = op.spread(key, jnp.stack([c, 2 * c])[..., None], lead=1)
            yield full(many[1, ..., 0]), 2 * spread
        # Reverse mode of the function as called, through the effective weights.
        direct = jax.vjp(lambda w: op.call(x, w), raw)[1](c)[0]
        yield jax.vjp(op.effective, raw)[1](pulled)[0], direct
        # The represented input is the same input.
        yield op.apply(op.represent(x), effective), op.call(x, raw)
        yield op.pull(op.represent(x), c, effective), pulled

    check(lambda v: list(pairs(v)), values)


def test_operator_value_and_derivatives_are_those_of_the_formula(case):
    at = inexact(case.args)
    point = [case.args[i] for i in at]
    c = random_like(case.plain(*case.args))
    close(case.call(*case.args), case.plain(*case.args))

    def everything(fun, point):
        def of(point):
            full = list(case.args)
            for i, a in zip(at, point, strict=True):
                full[i] = a
            return fun(*full)

        slope = jax.grad(lambda p: jnp.vdot(c, jnp.sin(of(p))))
        tangents = [random_like(a) for a in point]
        return jax.jvp(of, (point,), (tangents,)), jax.jvp(slope, (point,), (tangents,))

    check(lambda p: [(everything(case.call, p), everything(case.plain, p))], point)


def test_operator_record_holds(case):
    ((op, values),) = uses(case.call, *case.args)
    check_record(op, values)


def at_every_output(op, key, features):
    """dy/dw of shape (*y, *weight), from features and spread."""
    n = int(np.prod(op.y.shape))
    unit = jnp.eye(n).reshape((n, *op.y.shape))
    full = jnp.broadcast_to(op.spread(key, unit, lead=1) * features, (n, *op.trace_shape(key)))
    free = len(op.free_shape(key))
    return full.sum(tuple(range(1, 1 + free))).reshape((*op.y.shape, *op.shapes[key].shape))


def test_operator_gives_the_jacobian(case):
    ((op, values),) = uses(case.call, *case.args)

    def pairs(values):
        x, effective, _ = operands(op, values)
        features = op.features(x, effective)
        jacobian = jax.jacrev(lambda w: op.apply(x, w))(effective)
        return [(at_every_output(op, k, features[k]), jacobian[k]) for k in effective]

    check(pairs, values)


def test_operator_features_equal_the_derived_ones(case):
    ((op, values),) = uses(case.call, *case.args)
    primitive = op.primitive
    bare = ETPPrimitive(
        primitive.name,
        primitive.function,
        weights=primitive.weights,
        trainable_invars_fn=primitive.trainable_invars,
        x_invar_index=primitive.x_invar_index,
        rules=replace(primitive.rules, features=None, spread=None, free=None),
    )
    derived = Operator(bare, op.params, op.operands, op.y)

    def pairs(values):
        x, effective, _ = operands(op, values)
        written, expected = op.features(x, effective), derived.features(x, effective)
        for k in effective:
            if derived.trace_shape(k) == op.trace_shape(k):
                yield jnp.broadcast_to(written[k], op.trace_shape(k)), expected[k]
            else:  # a hand-written spread ties what the derived one leaves free
                yield at_every_output(op, k, written[k]), at_every_output(derived, k, expected[k])

    check(lambda v: list(pairs(v)), values)


def stack(a, n=2):
    a = jnp.asarray(a)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.stack([a] * n)
    return jnp.stack([a * (i + 1.0) for i in range(n)])


def mappings(case):
    """Which operands each of two nested vmaps runs over."""
    n = len(case.args)
    everything = (0,) * n
    if case.x is None:
        return [[everything], [everything, everything]]
    x_only, weights_only = (0,) + (None,) * (n - 1), (None,) + (0,) * (n - 1)
    return [
        [x_only],
        [weights_only],
        [everything],
        [x_only, x_only],
        [weights_only, x_only],
    ]


def mapped(case, axes_list):
    call, plain, args = case.call, case.plain, list(case.args)
    for axes in axes_list:
        call, plain = jax.vmap(call, axes), jax.vmap(plain, axes)
        args = [a if axis is None else stack(a) for a, axis in zip(args, axes, strict=True)]
    return call, plain, args


def test_operator_survives_vmap(case):
    uses_of = [mapped(case, axes_list) for axes_list in mappings(case)]
    for call, _, args in uses_of:
        assert len(list(uses(call, *args))) == 1
    check(
        lambda many: [(f(*a), g(*a)) for (f, g, _), a in zip(uses_of, many, strict=True)],
        [args for _, _, args in uses_of],
    )


def test_operator_record_holds_under_vmap(sample):
    n = len(sample.args)
    everything, weights_only = (0,) * n, (None,) + (0,) * (n - 1)
    for axes_list in [[everything]] if n == 1 else [[weights_only], [everything, everything]]:
        call, _, args = mapped(sample, axes_list)
        ((op, values),) = uses(call, *args)
        if "equation" in op.params:  # a letter each
            assert "mapped" not in op.params
            assert op.plain and len(op.y.shape) == len(axes_list) + sample.plain(*sample.args).ndim
        else:
            assert len(op.params["mapped"]) == len(axes_list)
        check_record(op, values)


def test_vmap_over_the_last_axis_equals_moving_it_first(axes_sample):
    axes = (-1,) + (None,) * len(axes_sample.weights)
    args = [jnp.moveaxis(stack(axes_sample.x), 0, -1), *axes_sample.weights]
    call, plain = jax.vmap(axes_sample.call, axes), jax.vmap(axes_sample.plain, axes)
    check(lambda a: [(call(*a), plain(*a))], args)


def test_vmap_over_the_input_keeps_one_shared_weight(one_input):
    axes = (0,) + (None,) * len(one_input.weights)
    ((op, _),) = uses(jax.vmap(one_input.call, axes), stack(one_input.x), *one_input.weights)
    ((one, _),) = uses(one_input.call, one_input.x, *one_input.weights)
    assert op.shapes == one.shapes and "mapped" not in op.params
    assert op.is_batched or one_input.name == "conv2d_mixed_axes"  # whose last axis is the batch


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_operator_keeps_its_dtype(sample, dtype):
    cast = lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else a
    args = [cast(a) for a in sample.args]
    out = sample.call(*args)
    assert out.dtype == jnp.dtype(dtype)
    tol = {"bfloat16": 0.2}.get(dtype, 1e-4)
    exact = np.asarray(sample.plain(*sample.args))
    np.testing.assert_allclose(np.asarray(out).astype(complex), exact, rtol=tol, atol=tol)


@pytest.mark.parametrize("x, w", [("complex128", "float64"), ("float64", "complex128")])
def test_operator_record_holds_for_mixed_complex(floating_sample, x, w):
    turn = lambda a, d: a.astype(d) * (1 + 0.5j) if d == "complex128" else a
    args = [turn(floating_sample.x, x), *(turn(a, w) for a in floating_sample.weights)]
    check(lambda a: [(floating_sample.call(*a), floating_sample.plain(*a))], args)
    ((op, values),) = uses(floating_sample.call, *args)
    check_record(op, values)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_operator_takes_spikes_as_integers(floating_sample, dtype):
    spikes = (floating_sample.x > 0).astype(dtype)
    out = floating_sample.call(spikes, *floating_sample.weights)
    assert out.dtype == jnp.float64
    close(out, floating_sample.plain(spikes.astype(float), *floating_sample.weights))


def test_operator_takes_numpy(sample):
    close(sample.call(*map(np.asarray, sample.args)), sample.plain(*sample.args))


# ------------------------------------------------------------------------------ custom operators


def scale_rows(x, w, *, power=1):
    return x * w[:, None] ** power


def test_custom_operator_needs_only_its_function():
    primitive = register_primitive("scale_rows", scale_rows)
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.asarray([2.0, 3.0])
    call = lambda x, w: primitive.bind(x, w, power=2)
    close(call(x, w), scale_rows(x, w, power=2))
    close(jax.grad(lambda w: call(x, w).sum())(w), 2 * w * x.sum(1))
    ((op, values),) = uses(call, x, w)
    assert op.ties == {"weight": ((0, 0),)} and op.trace_shape("weight") == (3, 2)
    check_record(op, values)
    for axes in [(0, None), (None, 0), (0, 0)]:
        args = [a if axis is None else stack(a) for a, axis in zip((x, w), axes, strict=True)]
        ((op, values),) = uses(jax.vmap(call, axes), *args)
        assert op.primitive is primitive
        check_record(op, values)


def test_custom_operator_may_mix_everything():
    primitive = register_primitive("mixer", lambda x, w: jnp.cumsum(x[::-1] * jnp.sort(w)))
    ((op, values),) = uses(primitive.bind, jnp.arange(3.0), jnp.asarray([3.0, 1.0, 2.0]))
    assert op.trace_shape("weight") == (3, 3)
    check_record(op, values)


def test_custom_operator_with_several_weights():
    primitive = register_primitive(
        "affine",
        lambda gain, x, offset: gain * x + offset,
        trainable_invars_fn=lambda params: {"gain": 0, "offset": 2},
        x_invar_index=1,
    )
    ((op, values),) = uses(primitive.bind, jnp.ones(3), jnp.arange(3.0), jnp.ones(3))
    assert op.constant_keys == {"offset"}
    check_record(op, values)


def test_constant_keys_are_the_weights_whose_input_is_one(case):
    ((op, _),) = uses(case.call, *case.args)
    assert op.constant_keys == (
        frozenset({"weight"}) if case.x is None else set(op.shapes) & {"bias"}
    )


def test_every_operator_with_an_input_is_linear_in_it(case):
    ((op, values),) = uses(case.call, *case.args)
    assert op.is_linear == (case.x is not None)
    if op.is_linear:
        x, effective, _ = operands(op, values)
        c, x = random_like(op.y), op.represent(x)
        pull = lambda x: {
            k: g for k, g in op.pull(x, c, effective).items() if k not in op.constant_keys
        }
        other = random_like(x, seed=7)
        both = jax.tree.map(lambda a, b: 2 * a - b, pull(x), pull(other))
        close(pull(2 * x - other), both)


@pytest.mark.parametrize(
    ("function", "linear"),
    [
        (lambda x, w: jnp.tanh(w) @ x, True),
        (lambda x, w: w @ (1 + x), False),  # affine
        (lambda x, w: w @ (x * x), False),
        (lambda x, w: jnp.tanh(w @ x), False),
    ],
    ids=["of_another_weight", "affine", "square", "tanh"],
)
def test_linear_in_the_input_is_derived_from_the_function(function, linear):
    primitive = register_primitive("maybe_linear", function)
    ((op, _),) = uses(primitive.bind, jnp.ones(3), jnp.ones((4, 3)))
    assert op.is_linear == linear
    ((op, _),) = uses(jax.vmap(primitive.bind, (0, 0)), jnp.ones((2, 3)), jnp.ones((2, 4, 3)))
    assert op.is_linear == linear


@pytest.mark.parametrize("dtype", [int, bool])
def test_linear_in_the_input_counts_spikes_of_any_type(dtype):
    spikes = jnp.asarray([1, 0, 1], dtype)
    times = register_primitive("times", lambda x, w: w @ x.astype(w.dtype))
    count = register_primitive("count", lambda x, w: w * (1 + x))
    pick = register_primitive("pick", lambda x, w: w[x])
    for primitive, linear in ((times, True), (count, False)):
        ((op, _),) = uses(primitive.bind, spikes, jnp.ones((4, 3)))
        assert (op.is_linear, op.is_representable) == (linear, True)
    if dtype is int:
        ((op, _),) = uses(pick.bind, spikes, jnp.ones((4, 3)))
        assert (op.is_linear, op.is_representable) == (False, False)


def test_pull_of_many_steps_is_the_sum_of_their_pulls(pulled):
    ((op, values),) = uses(pulled.call, *pulled.args)
    assert op.primitive.rules.pull is not None
    x, effective, _ = operands(op, values)
    xs = jnp.stack([x, x[..., ::-1], x])
    cs = jnp.stack([random_like(op.y, seed=i) for i in range(3)])
    each = [op.pull(x, c, effective) for x, c in zip(xs, cs, strict=True)]
    got = op.pull_all(xs, cs, effective, list(effective))
    close(got, jax.tree.map(lambda *g: sum(g), *each))


def test_register_primitive_refuses_what_it_cannot_use():
    with pytest.raises(TypeError, match="must be a function"):
        register_primitive("bad", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="y_outvar_index"):
        register_primitive("bad", scale_rows, y_outvar_index=1)


def test_rules_written_for_hand_derived_operators_are_not_used_and_one_warning_says_so():
    scale = register_primitive("scale_accepted", lambda x, w: x * w)
    scale.register_etp_rules(xy_to_dw=None)  # None is no rule
    with pytest.warns(UserWarning, match="scale_accepted.*xy_to_dw") as seen:
        scale.register_xy_to_dw(lambda x, y, w: w)
        scale.register_init_drtrl(lambda *a: None)
        scale.register_etp_rules(dt_to_t=lambda y, w: w, fast_path=print)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    other = register_primitive("scale_warned", lambda x, w: x * w)
    with pytest.warns(UserWarning, match="dt_to_t, init_pp") as seen:
        other.register_etp_rules(dt_to_t=lambda y, w: w, init_pp=lambda *a: None, xy_to_dw=None)
    assert seen[0].filename == __file__


def test_unknown_rules_of_an_operator_are_refused():
    scale = register_primitive("scale_refused", lambda x, w: x * w)
    with pytest.raises(TypeError, match=r"dt_to_t.*callable"):
        scale.register_etp_rules(dt_to_t=3)
    with pytest.raises(TypeError, match=r"xy_to_dv.*xy_to_dw"):
        scale.register_etp_rules(xy_to_dv=lambda x, y, w: w)
    with pytest.raises(AttributeError, match=r"register_nonsense'\.$"):
        scale.register_nonsense(lambda x: x)
    with pytest.raises(AttributeError, match="'register_xy_to_dw'"):
        scale.register_xy_dw(lambda x, y, w: w)
    with pytest.raises(AttributeError, match="'trainable'"):
        scale.trainable  # noqa: B018
