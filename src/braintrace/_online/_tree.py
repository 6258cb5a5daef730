"""Parameters and states as pytrees: what is trained, what is passed through, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NamedPath, type_error
from ..graph import Path
from ..program import PyTree

NUMBERS = (bool, int, float, complex)


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array; Python numbers, functions and strings are not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex floating numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


UNNAMED = object()  # a key that no path has


class Dotted(str):
    """A key that is a path itself, `layers.0.weight`, and is shown as it is."""


def path_of(keys: Sequence[Any], default: str, boxed: bool = False) -> Path:
    """A leaf's path as plain keys, shown as a user would write it: `layers[1].weight_hh`.

    Names are written with a dot, everything else in brackets; a path that begins with brackets is
    shown with the name of the tree, `default`. The last key of a `boxed` leaf is not shown.
    """
    names = ("key", "idx", "name")
    plain = [next((getattr(k, n) for n in names if hasattr(k, n)), k) for k in keys]
    is_name = lambda k: isinstance(k, Dotted) or str(k).isidentifier()
    parts = [f".{k}" if is_name(k) else f"[{k!r}]" for k in plain]
    text = "".join(parts[:-1] if boxed else parts)
    shown = text.removeprefix(".") if text.startswith(".") else default + text
    return NamedPath(plain or [default], shown)


def _is_box(node: object) -> bool:
    """Whether a node is a variable of Flax, whose array is its attribute `value`."""
    return any(c.__module__ == "flax.nnx.variablelib" for c in type(node).__mro__)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Untrained:
    """A part of a tree whose floating arrays are passed through like all others."""

    value: PyTree


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a pytree: which leaves are trained, which are other arrays, the rest.

    Two layouts are equal if the same program serves both.
    """

    tree: PyTree
    trained: tuple[int, ...]
    arrays: tuple[int, ...]
    static: tuple[tuple[int, type, Any], ...]

    def paths(self, default: str) -> list[Path]:
        """The paths of all leaves; `default` is the name of a tree that is one leaf."""
        numbers = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        flatten = jax.tree_util.tree_flatten_with_path
        boxes = {keys for keys, node in flatten(numbers, is_leaf=_is_box)[0] if _is_box(node)}
        named = lambda keys: [k for k in keys if k is not UNNAMED]
        leaves = flatten(numbers)[0]
        return [path_of(named(keys), default, keys[:-1] in boxes) for keys, _ in leaves]

    def join(self, trained: Sequence[PyTree], arrays: Sequence[PyTree]) -> PyTree:
        """The pytree with these arrays."""
        leaves: list[PyTree] = [None] * self.tree.num_leaves
        for numbers, values in ((self.trained, trained), (self.arrays, arrays)):
            for i, value in zip(numbers, values, strict=True):
                leaves[i] = value
        for i, _, value in self.static:
            leaves[i] = value
        return jax.tree.unflatten(self.tree, leaves)

    def only_trained(self, values: Sequence[PyTree]) -> PyTree:
        """The pytree of something that trained leaves have, None for all others."""
        leaves: list[PyTree] = [None] * self.tree.num_leaves
        for i, value in zip(self.trained, values, strict=True):
            leaves[i] = value
        return jax.tree.unflatten(self.tree, leaves)


def split(tree: PyTree) -> tuple[Layout, list[jax.Array], list[jax.Array]]:
    """A pytree's layout, its floating arrays and its other arrays."""
    leaves, structure = jax.tree.flatten(tree)
    nodes = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, Untrained))
    passed = [isinstance(n, Untrained) for n in nodes for _ in jax.tree.leaves(n)]
    trained, arrays, static = [], [], []
    for i, leaf in enumerate(leaves):
        if is_floating(leaf) and not passed[i]:
            trained.append(i)
        elif is_array(leaf):
            arrays.append(i)
        else:
            static.append((i, type(leaf), _hashable(leaf)))  # 1, 1.0 and True are equal
    layout = Layout(structure, tuple(trained), tuple(arrays), tuple(static))
    return layout, [leaves[i] for i in trained], [leaves[i] for i in arrays]


def _hashable(leaf: object) -> PyTree:
    try:
        hash(leaf)
    except TypeError:
        raise type_error(
            f"a leaf has type {type(leaf).__name__}, which is neither array nor hashable: "
            f"{repr(leaf)[:60]}.",
            why="a leaf that is no array decides which program is compiled",
            do="make it an array, or keep it out of the pytree",
        ) from None
    return leaf


def shape_of(array: Any, weak: bool = False) -> jax.ShapeDtypeStruct:
    """The shape and type of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array), weak_type=weak)


def is_weak(leaf: object) -> bool:
    """Whether a leaf takes the type of what it is combined with, as Python numbers do."""
    return isinstance(leaf, NUMBERS) or getattr(leaf, "weak_type", False)


def strong(leaf: object) -> PyTree:
    """An array without a weak type, so that one step does not change what a state is."""
    if not is_array(leaf) and not isinstance(leaf, NUMBERS):
        return leaf
    if isinstance(leaf, jax.Array) and not is_weak(leaf):
        return leaf
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)
