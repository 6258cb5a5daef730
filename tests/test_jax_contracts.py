"""The JAX internals that `program` and `graph` rely on; a failure names what a release moved."""

import contextlib
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import source_info_util
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from braintrace import program as programs
from braintrace.program import _lines, _records

X = jnp.arange(3.0)


def equations(fun, *args):
    return programs.open_jaxpr(jax.make_jaxpr(fun)(*args)).eqns


def only(fun, *args):
    (eqn,) = equations(fun, *args)
    return eqn


@jax.custom_jvp
def soft(x):
    return jnp.sin(x)


soft.defjvp(lambda primals, tangents: (soft(primals[0]), 3.0 * tangents[0]))


@jax.custom_vjp
def hard(x):
    return jnp.sin(x)


hard.defvjp(lambda x: (hard(x), None), lambda _, ct: (5.0 * ct,))


# ------------------------------------------------------------------------------------------ jaxprs


def test_closed_jaxpr_has_constvars_and_consts_in_step():
    outside = jnp.arange(4.0)
    closed = jax.make_jaxpr(lambda x: x + outside.sum() + outside[:3])(X)
    jaxpr = programs.open_jaxpr(closed)
    assert len(jaxpr.constvars) == len(closed.consts) == 1
    assert np.array_equal(closed.consts[0], outside)
    assert [v.aval.shape for v in jaxpr.invars] == [(3,)]
    assert jaxpr.constvars[0].aval.dtype == outside.dtype


def test_a_program_is_a_jaxpr_of_jax_again():
    def fun(key, x):
        noise = jax.random.normal(key, x.shape)
        jax.debug.callback(lambda _: None, x)
        y = lax.scan(lambda c, k: (soft(c) + 2 * k, c.sum()), x, jnp.arange(3))[1]
        return jnp.where(x > 1, noise, hard(x)) @ jnp.ones((3, 3)), y, 7

    args = jax.random.key(0), X
    program, consts = programs.trace(fun, *args)
    closed = programs.closed_jaxpr_of(program, consts)
    assert programs.jaxpr_of(program).invars == programs.open_jaxpr(closed).invars
    assert closed.effects and "scan" in str(closed)
    for found in (jaxpr_as_fun(closed)(*args), jax.jit(jaxpr_as_fun(closed))(*args)):
        for a, b in zip(found, fun(*args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    grads = jax.grad(lambda x: jaxpr_as_fun(closed)(args[0], x)[0].sum())(X)
    np.testing.assert_allclose(grads, jax.grad(lambda x: fun(args[0], x)[0].sum())(X), rtol=1e-12)


def test_what_is_traced_under_a_marked_equation_carries_its_number():
    program, consts = programs.trace(lambda x: hard(jax.nn.softmax(soft(x))), X)
    number = {eqn: i for i, eqn in enumerate(program.equations)}

    def pushed(x, dx):
        apply = lambda eqn, values: programs.bind_forward(programs.marked(eqn, number[eqn]), values)
        return jax.jvp(lambda x: programs.evaluate(program, consts, [x], apply), (x,), (dx,))

    found = {}
    for eqn in programs.trace(pushed, X, X)[0].equations:
        plain, origin = programs.unmarked(eqn, program.equations)
        found.setdefault(origin and origin.name, []).append(plain.name)
        assert origin is None or plain.source.name_stack == origin.source.name_stack
    assert found["custom_jvp_call"] == ["custom_jvp_call", "mul"]
    assert found["exp"] == ["exp", "mul"] and found["reduce_sum"] == ["reduce_sum"] * 2


def test_literals_and_only_literals_have_a_val():
    eqn = only(lambda x: x * 2.0, X)
    var, literal = sorted(eqn.invars, key=lambda a: hasattr(a, "val"))
    assert not hasattr(var, "val")
    assert float(literal.val) == 2.0


def test_output_that_is_a_literal_has_a_val():
    jaxpr = programs.open_jaxpr(jax.make_jaxpr(lambda x: 1.5)(X))
    assert float(jaxpr.outvars[0].val) == 1.5


def test_closing_over_an_outer_tracer_makes_it_a_const():
    seen = []

    def outer(t):
        closed = jax.make_jaxpr(lambda x: x * t)(X)
        seen.append([isinstance(c, jax.core.Tracer) for c in closed.consts])
        program, consts = programs.flatten(closed)
        return programs.evaluate(program, consts, [X])[0]

    assert np.array_equal(jax.jit(outer)(jnp.asarray(2.0)), 2 * X)
    assert seen == [[True]]


def test_tracers_know_the_trace_they_belong_to():
    seen = []

    def inner(x, y):
        seen.append((programs.is_of_outer_trace(x), programs.is_of_outer_trace(y)))
        return x

    jax.jit(lambda y: jax.jit(lambda x: inner(x, y))(X))(X)
    jax.jit(lambda y: jax.vmap(lambda x: inner(x, y))(X))(X)
    jax.jit(lambda y: jax.grad(lambda x: inner(x, y).sum())(X))(X)
    inner(X, X)
    assert seen == [(False, True)] * 3 + [(False, False)]


def test_a_trace_lives_as_long_as_a_tracer_that_left_it():
    kept, traces = [], []

    def fun(x, keep):
        traces.append(programs.trace_of(x))
        y = jnp.sin(hard(x))
        doubled = 2 * y
        if keep:
            kept.append(doubled)
        return lax.scan(lambda c, _: (jnp.cos(c * y), None), x, None, 2)[0]

    jax.make_jaxpr(lambda x: fun(x, False))(X)
    assert programs.leaked(traces[-1]) is None
    jax.make_jaxpr(lambda x: fun(x, True))(X)
    assert programs.leaked(traces[-1]) is kept[0]  # not its operands, which it holds
    assert "test_jax_contracts.py" in programs.line_of(kept[0])
    kept.clear()
    assert programs.leaked(traces[-1]) is None


def test_callback_without_a_vmap_method_cannot_be_mapped():
    def called(x, **options):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, **options)

    def cannot(fun):
        program, _ = programs.trace(fun, X)
        return [programs.cannot_be_mapped(e) for e in program.equations]

    assert cannot(called) == [True]
    assert cannot(lambda x: called(x, vmap_method="sequential")) == [False]
    assert cannot(lambda x: jax.lax.cond(x[0] > 0, called, jnp.sin, x))[-1]
    assert not any(cannot(lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x)))


def test_compile_time_evaluation_inside_jit_gives_concrete_values():
    def fun(x):
        with jax.ensure_compile_time_eval():
            value = jnp.arange(3) + 1
        assert not isinstance(value, jax.core.Tracer)
        return x + np.asarray(value)

    assert np.array_equal(jax.jit(fun)(X), X + np.arange(1, 4))


# ------------------------------------------------------------------------------------------- calls

CALLS = {
    "jit": (jax.jit(jnp.sin), {"jit", "pjit"}, "jaxpr"),
    "checkpoint": (jax.checkpoint(jnp.sin), {"checkpoint", "remat", "remat2"}, "jaxpr"),
    "custom_jvp": (soft, {"custom_jvp_call"}, "call_jaxpr"),
    "custom_vjp": (hard, {"custom_vjp_call"}, "call_jaxpr"),
}


@pytest.mark.parametrize("fun, names, key", CALLS.values(), ids=CALLS)
def test_call_primitives_keep_their_name_and_hold_their_body(fun, names, key):
    eqn = only(fun, X)
    assert eqn.primitive.name in names
    body = programs.open_jaxpr(eqn.params[key])
    assert len(body.invars) == len(eqn.invars)
    assert len(body.outvars) == len(eqn.outvars)
    assert "sin" in [e.primitive.name for e in body.eqns]


def test_custom_derivative_parameters():
    assert "jvp_jaxpr_fun" in only(soft, X).params
    params = only(hard, X).params
    assert {"fwd_jaxpr_thunk", "bwd"} <= set(params)


def test_call_of_a_closed_jaxpr_is_inlined():
    closed = jax.make_jaxpr(jnp.sin)(X)
    program, consts = programs.trace(lambda x: jaxpr_as_fun(closed)(x)[0] * 2, X)
    assert [e.name for e in program.equations] == ["sin", "mul"]
    np.testing.assert_allclose(programs.evaluate(program, consts, [X])[0], 2 * jnp.sin(X))


def test_nested_calls_flatten_to_one_program():
    constant = jnp.arange(3.0)

    def fun(x):
        inner = jax.jit(lambda a: jax.checkpoint(lambda b: jnp.sin(b) + constant)(a) * 2)
        return inner(x) + jnp.where(x > 0, x, 0.0)

    program, consts = programs.trace(fun, X)
    names = {e.name for e in program.equations}
    assert not names & {"jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"}
    np.testing.assert_allclose(programs.evaluate(program, consts, [X])[0], fun(X), rtol=1e-6)


@pytest.mark.parametrize(
    "fun, names",
    [
        (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), {"cond"}),
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], {"scan"}),
        (lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, x), {"while"}),
    ],
    ids=["cond", "scan", "while"],
)
def test_control_flow_holds_its_bodies_in_parameters(fun, names):
    eqn = equations(fun, X)[-1]
    assert eqn.primitive.name in names
    assert list(programs.inner_jaxprs(eqn.params))
    assert list(programs.inner_equations(eqn))


# ------------------------------------------------------------------------------------- evaluation


BOUND = {
    "plain": jnp.sin,
    "two results": lambda x: jnp.stack(jnp.split(x[:2], 2)).sum() * x,
    "custom_jvp": soft,
    "custom_vjp": hard,
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, x),
    "gather": lambda x: x[jnp.asarray([2, 0])],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
}


@pytest.mark.parametrize("fun", BOUND.values(), ids=BOUND)
def test_equations_can_be_bound_again_from_their_parameters(fun):
    program, consts = programs.trace(fun, X)
    for run in (programs.evaluate, jax.jit(programs.evaluate, static_argnums=0)):
        np.testing.assert_allclose(run(program, consts, [X])[0], fun(X), rtol=1e-6)


def test_get_bind_params_is_a_pair_or_one_dictionary():
    for fun in (jnp.sin, soft, hard):
        eqn = only(fun, X)
        found = eqn.primitive.get_bind_params(eqn.params)
        assert isinstance(found, dict) or (isinstance(found, tuple) and len(found) == 2)


def rebound(fun, bind):
    program, consts = programs.trace(fun, X)
    return lambda x: programs.evaluate(program, consts, [x], bind)[0]


@pytest.mark.parametrize("fun, slope", [(soft, 3.0), (hard, 5.0)], ids=["jvp", "vjp"])
def test_custom_derivatives_survive_a_rebind(fun, slope):
    got = jax.grad(lambda x: rebound(fun, programs.bind)(x).sum())(X)
    assert np.array_equal(got, np.full(3, slope))


@pytest.mark.parametrize("fun, slope", [(soft, 3.0), (hard, 5.0)], ids=["jvp", "vjp"])
def test_custom_derivatives_can_be_taken_forward(fun, slope):
    again = rebound(fun, programs.bind_forward)
    out, tangent = jax.jvp(again, (X,), (jnp.ones(3),))
    np.testing.assert_allclose(out, jnp.sin(X), rtol=1e-6)
    assert np.array_equal(tangent, np.full(3, slope))


# ------------------------------------------------------------------------------------- primitives


def test_stop_gradient_is_visible_as_the_primitive_the_analyses_stop_at():
    program, _ = programs.trace(lambda x: lax.stop_gradient(jnp.sin(x)) * x, X)
    assert "stop_gradient" in [e.name for e in program.equations]


NAMES = {
    "slice": lambda x: x[1:],
    "rev": lambda x: x[::-1],
    "reshape": lambda x: x.reshape(3, 1),
    "transpose": lambda x: x.reshape(1, 3).T,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 3)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 1, 0)]),
    "gather": lambda x: x[jnp.asarray([2, 0])],
    "scatter": lambda x: x.at[jnp.asarray([0])].set(1.0),
    "scatter-add": lambda x: x.at[jnp.asarray([0])].add(1.0),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.asarray(1),), (2,)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1], (jnp.asarray(1),)),
    "dot_general": lambda x: jnp.outer(x, x) @ x,
    "reduce_sum": lambda x: x.sum(),
    "select_n": lambda x: jnp.where(x > 0, x, 0.0),
    "custom_jvp_call": soft,
}


@pytest.mark.parametrize("name", NAMES)
def test_primitive_names_of_the_tables(name):
    program, _ = programs.trace(NAMES[name], X)
    assert name in {e.name for e in program.equations}


def test_parameters_the_influence_maps_read():
    def params(name):
        program, _ = programs.trace(NAMES[name], X)
        return next(e.params for e in program.equations if e.name == name)

    assert {"start_indices", "limit_indices", "strides"} <= set(params("slice"))
    assert "dimensions" in params("rev")
    assert "permutation" in params("transpose")
    assert "broadcast_dimensions" in params("broadcast_in_dim")
    assert "dimension" in params("concatenate")
    assert "padding_config" in params("pad")
    assert "axes" in params("reduce_sum")
    (contract, batch) = params("dot_general")["dimension_numbers"]
    assert len(contract) == len(batch) == 2


def test_prng_keys_have_an_extended_dtype():
    key = jax.random.key(0)
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.extended)
    assert not programs.is_inexact(key.dtype)


def test_elementwise_names_are_jax_primitives():
    # A name that no release knows protects nothing: keep the table honest.
    known = {p.name for p in mlir._lowerings} | {
        p.name for table in mlir._platform_specific_lowerings.values() for p in table
    }
    newer = {"log2", "one_minus_square", "polynomial"}  # of JAX 0.12
    assert not newer & known or newer <= known
    optional = {"stop_gradient", *newer}
    assert len(programs.ELEMENTWISE - optional - known) <= 2, (
        programs.ELEMENTWISE - optional - known
    )


def test_activations_and_their_derivatives_are_elementwise():
    # A new primitive in one of them would keep every loop with it out of a kernel.
    x = jnp.linspace(-1, 1, 3)
    for name in "tanh sigmoid softplus silu relu leaky_relu elu gelu exp log_sigmoid".split():
        f = getattr(jax.nn, name, None) or getattr(jnp, name)
        program, _ = programs.trace(lambda x, t, f=f: jax.jvp(f, (x,), (t,)), x, x)
        names = {eqn.name for eqn in programs.deep_equations(program)}
        assert names <= programs.ELEMENTWISE | {"broadcast_in_dim", "custom_jvp_call"}, name


# ------------------------------------------------------------------------------------ source lines


def test_source_info_has_user_frames_with_file_line_and_function():
    eqn = only(lambda x: jnp.sin(x), X)
    frame = next(iter(source_info_util.user_frames(eqn.source_info.traceback)))
    assert frame.file_name == __file__
    assert frame.start_line > 0
    assert "lambda" in frame.function_name


def test_user_line_names_this_file_through_jit_and_vmap():
    def step(x):
        return jax.jit(jax.vmap(lambda a: jnp.sin(a)))(x)

    program, _ = programs.trace(step, X)
    (eqn,) = [e for e in program.equations if e.name == "sin"]
    assert eqn.where().startswith(os.path.relpath(__file__) + ":")


def test_rebinding_keeps_the_users_line():
    program, consts = programs.trace(lambda x: jnp.sin(x), X)
    again, _ = programs.trace(lambda x: programs.evaluate(program, consts, [x])[0], X)
    assert again.equations[0].where() == program.equations[0].where()
    assert again.equations[0].where().startswith(os.path.relpath(__file__) + ":")


# ------------------------------------------------------------------------------------- fingerprint


def key_of(fun, *args):
    program, consts = programs.trace(fun, *args)
    return programs.fingerprint(program, consts)


def test_fingerprint_is_the_same_for_the_same_program():
    assert key_of(lambda x: soft(x) + hard(x), X) == key_of(lambda x: soft(x) + hard(x), X)
    assert hash(key_of(jnp.sin, X)) == hash(key_of(jnp.sin, X))


def test_fingerprint_tells_programs_apart():
    keys = [
        key_of(lambda x: x[jnp.asarray([0, 1])], X),
        key_of(lambda x: x[jnp.asarray([0, 2])], X),
        key_of(lambda x: x[1:], X),
        key_of(lambda x: x[:2], X),
        key_of(lambda x: x[:2], jnp.arange(4.0)),
        key_of(lambda x: x * 2, X),
        key_of(lambda x: 2 - x, X),
        key_of(lambda x: x - 2, X),
    ]
    assert len(set(keys)) == len(keys)


def test_fingerprint_knows_a_primitive_by_the_object_not_by_its_name():
    twice = [programs.DerivedPrimitive("twice", f) for f in (lambda x: 2 * x, lambda x: 3 * x)]
    scanned = lambda p: lambda x: lax.scan(lambda c, v: (c, p.bind(v)), 0.0, x)[1]
    keys = [key_of(make(p), X) for p in twice for make in (lambda p: p.bind, scanned)]
    assert len(set(keys)) == len(keys)
    assert key_of(scanned(twice[0]), X) == keys[1]


def test_fingerprint_knows_a_derivative_that_fails_by_its_error():
    def failing(text):
        def forward(x):
            raise ValueError(text)

        function = jax.custom_vjp(jnp.sin)
        function.defvjp(forward, lambda _, c: (c,))
        return function

    one, other = (key_of(lambda x, text=text: failing(text)(x), X) for text in ("one", "other"))
    assert one != other and one == key_of(lambda x: failing("one")(x), X)


def test_scan_says_how_many_operands_are_constants_and_carried():
    def swept(a, b, k, xs):
        step = lambda carry, x: ((carry[0] + k * x, carry[1]), carry[0])
        return lax.scan(step, (a, b), xs)

    args = (1.0, 2.0, 3.0, jnp.arange(4.0))
    pushed = lambda *v: jax.jvp(swept, v, v)
    for fun in (swept, pushed):
        (eqn,) = [e for e in jax.make_jaxpr(fun)(*args).eqns if e.primitive.name == "scan"]
        n_consts, n_carry = programs.scan_layout(eqn.params)
        n_scanned = len(eqn.invars) - n_consts - n_carry
        assert [v.aval.shape for v in eqn.invars[-n_scanned:]] == [(4,)] * n_scanned
        assert all(v.aval.shape == () for v in eqn.invars[:-n_scanned])
        assert n_carry == sum(v.aval.shape == () for v in eqn.outvars)


def test_guards_that_vmap_makes_of_a_cond_are_told_from_a_users_own():
    def chosen(p, x):
        return lax.cond(p, jnp.sin, jnp.cos, x)

    def users(p, x):
        return jnp.where(p, x, lax.stop_gradient(x))

    p = X > 0
    for fun in (chosen, jax.jit(chosen)):
        program, _ = programs.trace(lambda p, x, fun=fun: jax.vmap(fun)(p, x), p, X)
        assert set(programs.guards(program).values()) == {program.inputs[1]}
    program, _ = programs.trace(jax.vmap(users), p, X)
    assert not programs.guards(program)


def test_user_line_elsewhere_is_a_whole_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    program, _ = programs.trace(lambda x: jnp.sin(x), X)
    assert program.equations[0].where().startswith(__file__ + ":")


def test_the_line_of_a_caller_goes_before_that_of_a_library(monkeypatch):
    lines = {"library": "projection.py:1 (update)", "user": "net.py:3 (step)"}
    line = lambda source, own=False: None if own and source == "library" else lines[source]
    monkeypatch.setattr(_records, "user_line", line)
    eqn = programs.trace(jnp.sin, X)[0].equations[0]
    where = lambda *callers: replace(eqn, source="library", callers=callers).where()
    assert where("user") == lines["user"] and where() == lines["library"]


def test_lines_are_those_outside_installed_packages():
    library = ("/env/lib/site-packages/library/projection.py", 1, "update")
    python = (contextlib.__file__, 2, "inner")
    user = ("/home/me/net.py", 3, "Net.update")
    outside = ("/home/me/run.py", 4, "<module>")
    assert (
        _lines._first_of_user([library, python, user, outside]) == "/home/me/net.py:3 (Net.update)"
    )
    assert _lines._first_of_user([library, python]).endswith(
        "projection.py:1 (update)"
    )  # nothing better
    assert _lines._first_of_user([library, python], own=True) is None
    assert _lines._first_of_user([(jax.__file__, 1, "jit")]) is None


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.numpy_dtype_promotion("strict"),
    ],
)
def test_trace_settings_are_those_of_the_context(setting):
    before = programs.trace_settings()
    assert before == programs.trace_settings() and hash(before) == hash(programs.trace_settings())
    with setting():
        assert programs.trace_settings() != before
    assert programs.trace_settings() == before
