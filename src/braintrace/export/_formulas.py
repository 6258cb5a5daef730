"""The formulas of element-wise operations in C: `{0}` is an operand, `{f}` the suffix of a type.

Operands are literals, variables or elements of arrays, so that a formula may name one twice. `{t}`
is the type of the result, `{u}` and `{s}` the unsigned and signed one of its size, `{b}` its bits,
`{o}` the type of the operands. Signed integers are added as unsigned ones, where C leaves an
overflow undefined; `1u *` keeps small ones from becoming signed. Functions that C99 does not have
are in `_functions`.
"""

from __future__ import annotations

FLOATING = {
    "abs": "fabs{f}({0})",
    "acos": "acos{f}({0})",
    "acosh": "acosh{f}({0})",
    "add": "{0} + {1}",
    "asin": "asin{f}({0})",
    "asinh": "asinh{f}({0})",
    "atan": "atan{f}({0})",
    "atan2": "atan2{f}({0}, {1})",
    "atanh": "atanh{f}({0})",
    "cbrt": "cbrt{f}({0})",
    "ceil": "ceil{f}({0})",
    "cos": "cos{f}({0})",
    "cosh": "cosh{f}({0})",
    "div": "{0} / {1}",
    "erf": "erf{f}({0})",
    "erf_inv": "erf_inv{f}({0})",
    "erfc": "erfc{f}({0})",
    "exp": "exp{f}({0})",
    "exp2": "exp2{f}({0})",
    "expm1": "expm1{f}({0})",
    "floor": "floor{f}({0})",
    "lgamma": "lgamma{f}({0})",
    "log": "log{f}({0})",
    "log1p": "log1p{f}({0})",
    "logistic": "1 / (1 + exp{f}(-{0}))",
    "max": "({0} > {1} || {0} != {0}) ? {0} : {1}",
    "min": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "pow": "pow{f}({0}, {1})",
    "rem": "fmod{f}({0}, {1})",
    "rsqrt": "1 / sqrt{f}({0})",
    "sign": "{0} > 0 ? 1 : ({0} < 0 ? -1 : {0})",
    "sin": "sin{f}({0})",
    "sinh": "sinh{f}({0})",
    "sqrt": "sqrt{f}({0})",
    "square": "{0} * {0}",
    "sub": "{0} - {1}",
    "tan": "tan{f}({0})",
    "tanh": "tanh{f}({0})",
}
INTEGER = {
    "abs": "{0} < 0 ? ({t})(0 - ({u}){0}) : {0}",
    "add": "({t})(({u}){0} + ({u}){1})",
    "and": "{0} & {1}",
    "max": "{0} > {1} ? {0} : {1}",
    "min": "{0} < {1} ? {0} : {1}",
    "mul": "({t})(1u * ({u}){0} * ({u}){1})",
    "div": "{1} == 0 ? -1 : {0} / {1}",
    "rem": "{1} == 0 ? {0} : {0} % {1}",
    "neg": "({t})(0 - ({u}){0})",
    "not": "~{0}",
    "or": "{0} | {1}",
    "shift_left": "({u}){1} < {b} ? ({t})(1u * ({u}){0} << {1}) : 0",
    "shift_right_arithmetic": "({t})(({s}){0} >> (({u}){1} < {b} ? ({u}){1} : {b} - 1))",
    "shift_right_logical": "({u}){1} < {b} ? ({t})(({u}){0} >> {1}) : 0",
    "sign": "({0} > 0) - ({0} < 0)",
    "square": "({t})(1u * ({u}){0} * ({u}){0})",
    "sub": "({t})(({u}){0} - ({u}){1})",
    "threefry0": "threefry({0}, {1}, {2}, {3}, 0)",
    "threefry1": "threefry({0}, {1}, {2}, {3}, 1)",
    "xor": "{0} ^ {1}",
}
TRUTH = {
    "and": "{0} & {1}",
    "max": "{0} | {1}",
    "min": "{0} & {1}",
    "not": "!{0}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
}
# Of operands of any one type; the result has another.
COMPARED = {
    "eq": "{0} == {1}",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "is_finite": "isfinite({0}) != 0",
    "le": "{0} <= {1}",
    "lt": "{0} < {1}",
    "ne": "{0} != {1}",
}
ANY = {
    "bits": "bits_{o}_{t}({0})",
    "clamp": "{1} < {0} ? {0} : ({1} > {2} ? {2} : {1})",
    "cast": "({t}){0}",
    "copy": "{0}",
    "nonzero": "{0} != 0",
    "select": "{0} ? {2} : {1}",
}
# The element that changes no result, and how another one joins it.
REDUCTIONS = {
    "sum": ("0", "{0} + {1}"),
    "prod": ("1", "{0} * {1}"),
    "max": ("-INFINITY", FLOATING["max"]),
    "min": ("INFINITY", FLOATING["min"]),
    "and": ("1", "{0} & {1}"),
    "or": ("0", "{0} | {1}"),
}
TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "unsigned char",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
}


def formula(name: str, operand: str) -> str | None:
    """The formula of an operation on operands of a type; None if there is none."""
    if name in ANY or name in COMPARED:
        return ANY.get(name) or COMPARED[name]
    if operand == "bool":
        return TRUTH.get(name)
    return (FLOATING if operand.startswith("float") else INTEGER).get(name)
