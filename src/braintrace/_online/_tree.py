"""Parameters and states as pytrees: what is trained, what is passed through, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import message

Path = tuple[Any, ...]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array; Python numbers, functions and strings are not."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is an array of real or complex floating numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def path_of(keys: Sequence[Any], default: str) -> Path:
    """A leaf's path as plain keys: names, indices, dictionary keys."""
    names = ("key", "idx", "name")
    plain = [next(getattr(k, n) for n in names if hasattr(k, n)) for k in keys]
    return tuple(plain) or (default,)


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of a pytree: which leaves are trained, which are other arrays, the rest.

    `paths` are those of the trained leaves. Two layouts are equal if the same program serves both.
    """

    tree: Any
    trained: tuple[int, ...]
    arrays: tuple[int, ...]
    static: tuple[tuple[int, Any], ...]
    paths: tuple[Path, ...]

    def join(self, trained: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """The pytree with these arrays."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for numbers, values in ((self.trained, trained), (self.arrays, arrays)):
            for i, value in zip(numbers, values, strict=True):
                leaves[i] = value
        for i, value in self.static:
            leaves[i] = value
        return jax.tree.unflatten(self.tree, leaves)

    def only_trained(self, values: Sequence[Any]) -> Any:
        """The pytree of something that trained leaves have, None for all others."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for i, value in zip(self.trained, values, strict=True):
            leaves[i] = value
        return jax.tree.unflatten(self.tree, leaves)


def split(tree: Any, default: str) -> tuple[Layout, list[Any], list[Any]]:
    """A pytree's layout, its floating arrays and its other arrays."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    trained, arrays, static, paths = [], [], [], []
    for i, (keys, leaf) in enumerate(keyed):
        if is_floating(leaf):
            trained.append(i)
            paths.append(path_of(keys, default))
        elif is_array(leaf):
            arrays.append(i)
        else:
            static.append((i, _hashable(leaf, path_of(keys, default))))
    layout = Layout(structure, tuple(trained), tuple(arrays), tuple(static), tuple(paths))
    leaves = [leaf for _, leaf in keyed]
    return layout, [leaves[i] for i in trained], [leaves[i] for i in arrays]


def _hashable(leaf: Any, path: Path) -> Any:
    try:
        hash(leaf)
    except TypeError:
        name = ".".join(map(str, path))
        raise TypeError(
            message(
                f"the leaf {name} is a {type(leaf).__name__}, which is neither array nor hashable.",
                why="a leaf that is no array decides which program is compiled",
                do="make it an array, or keep it out of the pytree",
            )
        ) from None
    return leaf


def strong(leaf: Any) -> Any:
    """An array without a weak type, so that one step does not change what a state is."""
    if not is_array(leaf) and not isinstance(leaf, (bool, int, float, complex)):
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.weak_type:
        return leaf
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)
