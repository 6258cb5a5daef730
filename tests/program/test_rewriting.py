"""Equations in the place of others: what computes the same, where it stands, what is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from braintrace.program import close, evaluate, rewritten, shape_of, trace, write


def step(x):
    y = jnp.sin(x)
    z = jnp.cos(y) + x
    return z * y, z


X = jnp.linspace(-1.0, 2.0, 6).reshape(2, 3)
PROGRAM, VALUES = trace(step, X)
PROGRAM = close(PROGRAM, VALUES)


def twice_half_angles(to, eqn):
    if eqn.name != "sin":
        return None
    return write(to, lambda a: 2 * jnp.sin(a / 2) * jnp.cos(a / 2), *eqn.inputs)


def test_a_function_takes_the_place_of_an_equation_and_computes_the_same():
    new = rewritten(PROGRAM, twice_half_angles)
    names = [e.name for e in new.equations]
    assert names.count("sin") == 1 and names.count("cos") == 2
    for a, b in zip(evaluate(new, (), [X]), step(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)


def test_what_is_written_stands_at_the_line_of_the_equation_that_it_replaces():
    (sine,) = (e for e in PROGRAM.equations if e.name == "sin")
    new = [e for e in rewritten(PROGRAM, twice_half_angles).equations if e not in PROGRAM.equations]
    assert {e.where() for e in new} >= {sine.where()}
    assert "(step)" in sine.where()


def test_equations_that_are_written_are_rewritten_by_the_rule_that_is_passed_on():
    def rule(to, eqn):
        if eqn.name == "sin":
            return write(to, jnp.cos, *eqn.inputs, rule=inner)
        return None

    inner = lambda to, eqn: write(to, jnp.tanh, *eqn.inputs) if eqn.name == "cos" else None
    new = rewritten(PROGRAM, rule)
    y = jnp.tanh(X)
    np.testing.assert_allclose(evaluate(new, (), [X])[1], jnp.cos(y) + X, rtol=1e-14)


def test_an_equation_that_only_passes_a_value_on_disappears_and_so_does_what_led_to_it():
    new = rewritten(PROGRAM, lambda to, eqn: PROGRAM.inputs if eqn.name == "cos" else None)
    np.testing.assert_allclose(evaluate(new, (), [X])[1], 2 * X)
    gone = rewritten(new, lambda to, eqn: PROGRAM.inputs if eqn.name == "sin" else None)
    assert [e.name for e in gone.equations] == ["add", "mul"]


def test_a_program_without_anything_to_rewrite_is_returned_as_it_is():
    assert rewritten(PROGRAM, lambda to, eqn: None) is PROGRAM


def test_other_results_are_read_from_what_was_written():
    last = lambda to: write(to, lambda a, b: [a - b], *PROGRAM.outputs)
    new = rewritten(PROGRAM, lambda to, eqn: None, last)
    (out,) = evaluate(new, (), [X])
    first, second = step(X)
    np.testing.assert_allclose(out, first - second, rtol=1e-14)


def test_moves_that_move_nothing_write_nothing():
    def rule(to, eqn):
        (a,) = eqn.inputs
        same = [to.reshape(a, a.shape), to.transpose(a, (0, 1)), to.slice(a, 1, 0, 3)]
        assert all(b is a for b in same) and not to.equations
        return [to.slice(to.reshape(to.transpose(a, (1, 0)), (6,)), 0, 1, 5)]

    program, _ = trace(lambda x: jnp.sin(x), X)
    (out,) = evaluate(rewritten(program, rule), (), [X])
    np.testing.assert_array_equal(out, X.T.reshape(6)[1:5])


def test_a_type_other_than_that_of_the_operand_is_kept():
    def rule(to, eqn):
        params = {"new_dtype": jnp.dtype("int32"), "weak_type": False, "sharding": None}
        return [
            to.apply(lax.convert_element_type_p, eqn.inputs, X.shape, params, jnp.dtype("int32"))
        ]

    program, _ = trace(lambda x: jnp.floor(x), X)
    new = rewritten(program, rule)
    assert shape_of(new.outputs[0]) == jax.ShapeDtypeStruct(X.shape, jnp.int32)
