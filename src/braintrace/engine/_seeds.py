"""A program without what seeds of ones and zeros do in it: products with them, sums with zeros.

The derivatives of a step are read by seeds, and many end as they began: of `a * h` by the imaginary
part of `a` it is `1j * h`, whose parts are `-h.imag` and `h.real`. Stored for all steps they would
be copies of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from ..program import Atom, Const, Equation, Program, Var, is_traced


def _is_number(atom: Atom) -> bool:
    return not atom.shape and bool(jax.dtypes.issubdtype(atom.dtype, np.number))


def without_seeds(program: Program, values: Sequence[Any]) -> Program:
    """The program with products and sums of constants, and parts of complex numbers, resolved.

    `values` are those of its constants.
    """
    alias: dict[Atom, Atom] = {}
    constants = zip(program.consts, values, strict=True)
    numbers: dict[Atom, complex] = {
        v: complex(c) for v, c in constants if _is_number(v) and not is_traced(c)
    }
    shaped: dict[Atom, Equation] = {}
    pairs: dict[Atom, tuple[Atom, Atom]] = {}
    negated: dict[Atom, Atom] = {}
    equations: list[Equation] = []

    def number(atom: Atom) -> complex | None:
        if isinstance(atom, Const):
            return complex(atom.value) if _is_number(atom) else None
        if atom not in pairs:
            return numbers.get(atom)
        re, im = map(number, pairs[atom])
        return None if re is None or im is None else re + 1j * im

    def neg(atom: Atom, eqn: Equation) -> Atom:
        if atom not in negated:
            out = Var(atom.shape, atom.dtype)
            equations.append(
                replace(eqn, primitive=lax.neg_p, inputs=(atom,), outputs=(out,), params={})
            )
            negated.update({atom: out, out: atom})
        return negated[atom]

    for eqn in program.equations:
        inputs = [alias.get(a, a) for a in eqn.inputs]
        eqn = replace(eqn, inputs=tuple(inputs))
        equations.append(eqn)
        if not eqn.outputs:  # a function whose results are not differentiated
            continue
        out, same = eqn.outputs[0], None
        if eqn.name == "broadcast_in_dim" and (n := number(inputs[0])) is not None:
            numbers[out] = n
        elif eqn.name == "complex":
            pairs[out] = (inputs[0], inputs[1])
        elif eqn.name in ("real", "imag") and inputs[0] in pairs:
            same = pairs[inputs[0]][eqn.name == "imag"]
        elif eqn.name == "reshape":
            shaped[out] = eqn
        elif eqn.name == "neg":
            same = negated.get(inputs[0])
            move = shaped.get(inputs[0])
            if same is None and move is not None and move.inputs[0] in negated:
                same = Var(out.shape, out.dtype)
                equations.append(replace(move, inputs=(negated[move.inputs[0]],), outputs=(same,)))
            if same is None:
                negated.update({inputs[0]: out, out: inputs[0]})
        elif eqn.name in ("mul", "add", "add_any"):
            for factor, other in (inputs, inputs[::-1]):
                n, unit = number(factor), float(eqn.name == "mul")
                if n is not None and n == unit:
                    same = other
                elif n == 1j and unit and other in pairs:
                    re, im = pairs[other]
                    if out.shape == re.shape == im.shape:
                        pairs[out] = (neg(im, eqn), re)
        if same is not None and (same.shape, same.dtype) == (out.shape, out.dtype):
            alias[out] = same
    outputs = tuple(alias.get(o, o) for o in program.outputs)
    return Program(program.consts, program.inputs, tuple(equations), outputs)
