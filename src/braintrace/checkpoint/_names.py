"""Pytrees as named arrays, and back; `extra` as words of JSON with arrays beside them.

What is saved has names: the keys that lead to a leaf, and after it what the numbers do not say, the
unit of a quantity or the implementation of random keys. So `{"v": [0.1, 0.2] * mV}` under `states`
is one array, `states/v [mV]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import saiunit as u

from .._errors import type_error, value_error
from ..program import PyTree
from ._processes import placed

SEPARATOR, EXTRA = "/", "extra"
Named = dict[str, Any]  # arrays, or numbers and texts of Python
PYTHON = (bool, int, float, str)


def named(prefix: str, tree: PyTree) -> Named:
    """The arrays of a pytree by name; keys are their data, quantities their numbers."""
    leaves = _leaves(prefix, tree)[0]
    out = {name: _plain(leaf) for name, leaf in leaves}
    if len(out) < len(leaves):
        raise value_error(
            f"two arrays of {prefix} have one name.",
            why=f"names are made of keys with {SEPARATOR!r} between them",
            do=f"rename keys that have {SEPARATOR!r} in them",
        )
    return out


def renewed(prefix: str, tree: PyTree, values: Mapping[str, Any]) -> PyTree:
    """The pytree with other arrays, by the same names, on the devices that its own are on."""
    leaves, structure = _leaves(prefix, tree)
    return jtu.tree_unflatten(structure, [_in_place_of(leaf, values[k]) for k, leaf in leaves])


def group(name: str) -> str:
    """The first part of a name."""
    return name.split(SEPARATOR)[0]


def _leaves(prefix: str, tree: PyTree) -> tuple[list[tuple[str, Any]], Any]:
    is_quantity = lambda value: isinstance(value, u.Quantity)
    flat, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_quantity)
    word = lambda key: jtu.keystr((key,), simple=True)
    name = lambda path, leaf: SEPARATOR.join([prefix, *map(word, path)]) + _suffix(leaf)
    return [(name(path, leaf), leaf) for path, leaf in flat], structure


def _suffix(leaf: Any) -> str:
    if isinstance(leaf, u.Quantity):
        return f" [{leaf.unit}]"
    return f" [{jax.random.key_impl(leaf)}]" if _is_key(leaf) else ""


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, u.Quantity):
        return _plain(leaf.mantissa)
    if isinstance(leaf, complex):
        return np.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _in_place_of(like: Any, new: Any) -> Any:
    """An array in the form of the leaf whose place it takes."""
    if isinstance(like, u.Quantity):
        return u.Quantity(_in_place_of(like.mantissa, new), unit=like.unit)
    if _is_key(like):
        data = placed(new, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        array = placed(new, like)
        return _weak(array) if like.weak_type and not array.weak_type else array
    return np.array(new) if isinstance(like, np.ndarray) else type(like)(new)


def _weak(array: jax.Array) -> jax.Array:
    """An array whose type gives way, as that of a Python number does."""
    zero = {"f": 0.0, "i": 0, "c": 0j}[array.dtype.kind]
    return jax.device_put(jnp.full(array.shape, zero).at[...].set(array), array.sharding)


# ------------------------------------------------------------------------------------- extra


def packed(value: PyTree, out: Named) -> Any:
    """A value of dicts, lists and tuples in words of JSON; its arrays go to `out`."""
    match value:
        case dict() if type(value) is dict:
            return {"dict": [[packed(k, out), packed(v, out)] for k, v in value.items()]}
        case list() | tuple() if type(value) in (list, tuple):
            return {type(value).__name__: [packed(v, out) for v in value]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case None | bool() | int() | float() | str() if type(value) in (type(None), *PYTHON):
            return value
        case u.Quantity() if u.parse_unit(str(value.unit)) == value.unit:
            return {"quantity": [packed(value.mantissa, out), str(value.unit)]}
        case jax.Array() | np.ndarray() | np.generic():
            name = f"{EXTRA}{SEPARATOR}{len(out)}"
            out[name] = _plain(value)
            if isinstance(value, jax.Array) and _is_key(value):
                return {"key": [name, str(jax.random.key_impl(value))]}
            return {"jax" if isinstance(value, jax.Array) else "numpy": name}
    raise type_error(
        f"extra holds a {type(value).__name__}.",
        why="a file without code can bring back dicts, lists, tuples, arrays, numbers and strings",
        do="turn it into one of these",
    )


def unpacked(words: Any, arrays: Named) -> PyTree:
    """The value again; its arrays are taken out of `arrays`.

    Raises:
        ValueError, TypeError, LookupError: `packed` has not written this.
    """
    match words if not isinstance(words, dict) or len(words) == 1 else []:
        case None | bool() | int() | float() | str():
            return words
        case {"dict": list(pairs)}:
            items = [(unpacked(k, arrays), unpacked(v, arrays)) for k, v in pairs]
            if len(dict(items)) == len(items):
                return dict(items)
        case {"list": list(parts)}:
            return [unpacked(v, arrays) for v in parts]
        case {"tuple": list(parts)}:
            return tuple(unpacked(v, arrays) for v in parts)
        case {"complex": [float(real), float(imag)]}:
            return complex(real, imag)
        case {"quantity": [value, str(unit)]}:
            return u.Quantity(unpacked(value, arrays), unit=u.parse_unit(unit))
        case {"key": [str(name), str(impl)]}:
            return jax.random.wrap_key_data(jnp.array(arrays.pop(name)), impl=impl)
        case {"jax": str(name)}:
            return jnp.array(arrays.pop(name))
        case {"numpy": str(name)}:
            return arrays.pop(name)
    raise ValueError(f"{str(words)[:99]} is no part of extra")
