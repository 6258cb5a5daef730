"""One value of a state, as something to write and from something that was read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._errors import type_error, value_error
from ..program import PyTree, is_traced
from ._archive import Json
from ._processes import fetched, placed

Spec = Json
_PYTHON = {bool: "bool", int: "int", float: "float", complex: "complex", str: "str"}


def is_leaf(value: PyTree) -> bool:
    """Whether a pytree is not followed further: None counts, and a quantity is one value."""
    return value is None or isinstance(value, u.Quantity)


def encoded(value: PyTree) -> tuple[Spec, np.ndarray | None]:
    """What a value is, in words of JSON, and its array if it has one."""
    if isinstance(value, u.Quantity):
        spec, array = encoded(value.mantissa)
        return {**spec, "unit": _unit(value.unit)}, array
    if value is None:
        return {"kind": "none"}, None
    if type(value) in _PYTHON:
        return {"kind": "python", "type": _PYTHON[type(value)], "value": _text(value)}, None
    check_concrete(value)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = fetched(jax.random.key_data(value))
        return {"kind": "key", "impl": str(jax.random.key_impl(value))}, data
    if isinstance(value, jax.Array):
        return {"kind": "jax", "weak": bool(value.weak_type)}, fetched(value)
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype.names is None:
        array = np.asarray(value)
        if array.dtype.kind not in "OSUMm":
            return {"kind": "numpy"}, array
    raise type_error(
        f"a checkpoint cannot hold {type(value).__name__}.",
        why="it holds arrays, keys, quantities, numbers, strings and None; never code",
        do="keep anything else outside of states, optimizer and extra",
    )


def check_concrete(value: PyTree) -> None:
    """Refuse a value that is a placeholder."""
    if is_traced(value):
        raise value_error(
            "a checkpoint inside of a transformation.",
            why="states have no values while jit traces",
            do="save and load outside of jit, grad, vmap and scan",
        )


def decoded(spec: Spec, array: np.ndarray | None, like: PyTree = None) -> PyTree:
    """The value again, on the devices that `like` is on."""
    if "unit" in spec:
        inner = {k: v for k, v in spec.items() if k != "unit"}
        if isinstance(like, u.Quantity):
            return u.Quantity(decoded(inner, array, like.mantissa), unit=like.unit)
        return u.Quantity(decoded(inner, array), unit=_unit_of(spec["unit"]))
    match spec["kind"]:
        case "none":
            return None
        case "python":
            return _value(spec["type"], spec["value"])
        case "numpy":
            return np.array(array)
        case "key":
            of = jax.random.key_data(like) if isinstance(like, jax.Array) else None
            assert array is not None
            return jax.random.wrap_key_data(placed(array, of), impl=spec["impl"])
    assert array is not None
    new = placed(array, like)
    return jax.device_put(_weak(new), new.sharding) if spec["weak"] else new


def described(value: PyTree) -> Spec:
    """What must agree for a value to take another's place: sort, shape, type and unit."""
    check_concrete(value)
    if isinstance(value, u.Quantity):
        return {**described(value.mantissa), "unit": _unit(value.unit)}
    if value is None:
        return {"sort": "none"}
    if isinstance(value, str):
        return {"sort": "text"}
    if type(value) in _PYTHON:
        return {"sort": "number", "shape": (), "dtype": None, "family": _PYTHON[type(value)][0]}
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"sort": "key", "shape": value.shape, "dtype": str(value.dtype)}
    return _number(tuple(value.shape), jnp.dtype(value.dtype))


def described_as(spec: Spec, array: np.ndarray | None) -> Spec:
    """The same of a value that was read."""
    if "unit" in spec:
        inner = {k: v for k, v in spec.items() if k != "unit"}
        return {**described_as(inner, array), "unit": spec["unit"]}
    if spec["kind"] in ("none", "python", "key"):
        return described(decoded(spec, array))
    assert array is not None
    return _number(array.shape, array.dtype)


def differences(wanted: Spec, saved: Spec) -> list[str]:
    """In words, how the value in the file differs from the one it is for."""
    if wanted["sort"] != saved["sort"]:
        return [f"{saved['sort']} in the file, {wanted['sort']} here"]
    out = []
    if wanted.get("shape") != saved.get("shape"):
        out.append(f"shape {saved['shape']} in the file, {wanted['shape']} here")
    either = None in (wanted.get("dtype"), saved.get("dtype"))  # a number of Python has no width
    name = "family" if either else "dtype"
    if wanted.get(name) != saved.get(name):
        out.append(f"{saved[name]} in the file, {wanted[name]} here")
    units = [_measure(s.get("unit")) for s in (saved, wanted)]
    if units[0] != units[1]:
        names = [s["unit"]["name"] if "unit" in s else "no unit" for s in (saved, wanted)]
        out.append(f"{names[0]} in the file, {names[1]} here")
    return out


def _number(shape: tuple[int, ...], dtype: np.dtype) -> Spec:
    kinds = {"floating": "f", "integer": "i", "complexfloating": "c", "bool_": "b"}
    family = next((f for k, f in kinds.items() if jnp.issubdtype(dtype, getattr(jnp, k))), "?")
    return {"sort": "number", "shape": shape, "dtype": dtype.name, "family": family}


def _weak(array: jax.Array) -> jax.Array:
    """An array whose type gives way, as that of a Python number does."""
    zero = {"f": 0.0, "i": 0, "c": 0j}.get(_number(array.shape, array.dtype)["family"])
    blank = None if zero is None else jnp.full(array.shape, zero)
    fits = blank is not None and blank.dtype == array.dtype and blank.weak_type
    return blank.at[...].set(array) if fits and blank is not None else array


def _text(value: PyTree) -> PyTree:
    """Exact in JSON, whatever the number."""
    if isinstance(value, float):
        return value.hex()
    return [value.real.hex(), value.imag.hex()] if isinstance(value, complex) else value


def _value(kind: str, text: PyTree) -> PyTree:
    if kind == "float":
        return float.fromhex(text)
    return complex(*map(float.fromhex, text)) if kind == "complex" else text


def _unit(unit: u.Unit) -> Spec:
    sizes = {"scale": unit.scale, "base": unit.base, "factor": unit.factor}
    numbers = {k: float(v).hex() for k, v in sizes.items()}
    return {"name": str(unit), "dimensions": [float(d) for d in unit.dim._dims], **numbers}


def _measure(spec: Spec | None) -> PyTree:
    """A unit without its name, which may be spelled in several ways."""
    return spec and {k: v for k, v in spec.items() if k != "name"}


def _unit_of(spec: Spec) -> PyTree:
    dim = u.get_or_create_dimension(spec["dimensions"])
    sizes = {k: float.fromhex(spec[k]) for k in ("scale", "base", "factor")}
    return u.Unit(dim, **sizes, name=spec["name"], dispname=spec["name"])
