"""What JAX makes of the operands of a `cond` under `vmap`, and how to see through it.

A mapped predicate turns a `cond` into all branches and a selection. Each branch gets its operands
as `select_n(predicate, stop_gradient(a), a)`: the value is `a` in any case, and the branch passes
no derivative where it is not chosen. Since what the branch makes is then selected by the same
predicate, the derivative is that of `a` itself: such a selection is a *guard*. One written by a
user (`where(mask, w, stop_gradient(w))` trains a part of a weight) is not: nothing selects its
results again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jaxpr import Atom, Const, Equation, Program, Var, deep_equations, is_traced

_PASSED_ON = {"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "copy_p"}
Condition = tuple[Var, Any]  # true where the variable has the value


def guards(program: Program) -> dict[Equation, Atom]:
    """The guards of a program and of the bodies in it, with the value each one stands for."""
    found = _of_level(program)
    for eqn in deep_equations(program):
        for body in eqn.bodies:
            found |= _of_level(body.program)
    return found


def _of_level(program: Program) -> dict[Equation, Atom]:
    made = {v: e for e in program.equations for v in e.outputs}
    still = {e.outputs[0]: e.inputs[0] for e in program.equations if e.name == "stop_gradient"}
    found = {}
    for eqn in program.equations:
        if eqn.name != "select_n":
            continue
        cases = eqn.inputs[1:]
        values = {still.get(a, a) if isinstance(a, Var) else a for a in cases}
        if len(values) != 1:
            continue
        value = values.pop()
        moving = [_condition(eqn, k, made) for k, a in enumerate(cases) if a is value]
        if len(moving) == 1 and moving[0] and _selected_again(program, eqn, moving[0], made):
            found[eqn] = value
    return found


def _condition(eqn: Equation, case: int, made: dict[Var, Equation]) -> Condition | None:
    """When a case of a selection is taken, as far as it is known."""
    which: Atom = eqn.inputs[0]
    while isinstance(which, Var) and which in made and made[which].name in _PASSED_ON:
        which = made[which].inputs[0]
    if not isinstance(which, Var):
        return None
    test = made.get(which)
    if test is None or test.name != "eq":
        return which, case
    root, number = test.inputs
    if case != 1 or not isinstance(root, Var) or not isinstance(number, Const):
        return None
    return None if is_traced(number.value) else (_root(root, made), int(np.asarray(number.value)))


def _root(var: Var, made: dict[Var, Equation]) -> Var:
    while var in made and made[var].name in _PASSED_ON:
        source = made[var].inputs[0]
        if not isinstance(source, Var):
            break
        var = source
    return var


def _selected_again(
    program: Program, guard: Equation, condition: Condition, made: dict[Var, Equation]
) -> bool:
    """Whether nothing made of a guard's value leaves the program but where it was chosen."""
    open_ends: set[Any] = set(guard.outputs)
    for eqn in program.equations:
        if eqn is guard or not any(a in open_ends for a in eqn.inputs if isinstance(a, Var)):
            continue
        if eqn.name == "select_n" and eqn.inputs[0] not in open_ends:
            reached = [k for k, a in enumerate(eqn.inputs[1:]) if a in open_ends]
            if all(_condition(eqn, k, made) == condition for k in reached):
                continue
        open_ends.update(eqn.outputs)
    return not any(o in open_ends for o in program.outputs)
