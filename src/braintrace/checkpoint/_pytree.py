"""A learner as nested dicts of arrays, for libraries that store such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import saiunit as u

from .._errors import value_error
from ..program import PyTree, is_traced
from ._checkpoint import check_compiled
from ._contents import Learner, Name, states_in
from ._leaves import is_leaf

WEIGHTS, STATES, OPTIMIZER = "weights", "states", "optimizer"
Values = Mapping[Name, PyTree]  # by group and name


class PytreeMixin:
    """`to_pytree` and `from_pytree` of a learner."""

    _learner: Learner
    optimizer_state: Any

    def _values(self) -> tuple[dict[Name, PyTree], dict[Name, Any]]:
        """All values by group and name, and the states that they are of."""
        learner = self._learner
        check_compiled(learner, "turned into a pytree, or from one,")
        trained = {id(s) for s in learner.param_states.values()}
        group = lambda state: WEIGHTS if id(state) in trained else STATES
        states = {(group(s), *name): s for name, s in states_in(learner).items()}
        if self.optimizer_state is not None:
            states[(OPTIMIZER,)] = self.optimizer_state
        return {name: state.value for name, state in states.items()}, states

    def to_pytree(self) -> dict[str, Any]:
        """Everything needed to resume training, as nested dicts of arrays.

        Orbax and other libraries can store it. The groups are `weights`, `states` (with traces and
        random state) and, after `etrace_train` with an optax transformation, `optimizer`. Arrays
        stay on their devices; a unit is part of a name. Unlike `save`, it does not record the rule
        and its options.

        Raises:
            ValueError: the learner is not compiled.

        Example:
            >>> import braintrace, jax, jax.numpy as jnp
            >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.zeros(3))
            >>> tree = jax.tree.map(jnp.zeros_like, learner.to_pytree())
            >>> learner.from_pytree(tree, weights_only=True)
            >>> float(learner(jnp.ones(3)).sum())
            0.0
        """
        return tree_of_values(self._values()[0])

    def from_pytree(self, tree: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore what `to_pytree` returned. A tree that is refused changes nothing.

        Args:
            tree: nested dicts of arrays.
            weights_only: whether to restore only the weights and leave states, traces and optimizer
                as they are; then batch size and rule may differ.

        Raises:
            ValueError: names, shapes or types differ; all differences are listed.
        """
        values, states = self._values()
        for name, value in values_of_tree(tree, values, weights_only).items():
            states[name].value = value


def tree_of_values(values: Values) -> dict[str, Any]:
    """Nested dicts with a key for every part of a name."""
    tree: dict[str, Any] = {}
    for name, leaf in _leaves(values):
        inner = tree
        for key in name[:-1]:
            inner = inner.setdefault(key, {})
        inner[name[-1]] = _plain(leaf)
    return tree


def values_of_tree(tree: Mapping[str, Any], values: Values, weights_only: bool) -> Values:
    """The new values of those names, from such a tree."""
    if weights_only:
        tree = {WEIGHTS: tree.get(WEIGHTS, {})}
        values = {name: value for name, value in values.items() if name[0] == WEIGHTS}
    given = dict(_entries(tree, ()))
    wrong = []
    for name, leaf in _leaves(values):
        if name not in given:
            wrong.append(f"{'.'.join(name)}: not in the tree")
            continue
        new, old = (_described(a) for a in (given[name], _plain(leaf)))
        if new != old:
            wrong.append(f"{'.'.join(name)}: {new} in the tree, {old} here")
    names = {name for name, _ in _leaves(values)}
    wrong += [f"{'.'.join(name)}: only in the tree" for name in given if name not in names]
    if wrong:
        raise value_error(
            "the tree belongs to another learner.\n    " + "\n    ".join(wrong),
            why="every value must find its place; nothing was changed",
            do="build model and learner as they were, init_optimizer if the tree has one; or take "
            "the weights alone with weights_only=True",
        )
    new_values = {}
    for name, value in values.items():
        flat, structure = jtu.tree_flatten_with_path(value, is_leaf=is_leaf)
        names_of = [_full(name, path, leaf) for path, leaf in flat]
        pairs = zip(names_of, flat, strict=True)
        leaves = [_restored(given.get(full), leaf) for full, (_, leaf) in pairs]
        new_values[name] = jtu.tree_unflatten(structure, leaves)
    return new_values


def _leaves(values: Values) -> Iterator[tuple[Name, Any]]:
    for name, value in values.items():
        for path, leaf in jtu.tree_flatten_with_path(value, is_leaf=is_leaf)[0]:
            if leaf is not None:
                yield _full(name, path, leaf), leaf


def _full(name: Name, path: jtu.KeyPath, leaf: Any) -> Name:
    keys = (*name, *(jtu.keystr((key,), simple=True) for key in path))
    if isinstance(leaf, u.Quantity):
        return (*keys[:-1], f"{keys[-1]} [{leaf.unit}]")
    return keys


def _entries(tree: Any, name: Name) -> Iterator[tuple[Name, Any]]:
    if isinstance(tree, Mapping):
        for key, inner in tree.items():
            yield from _entries(inner, (*name, str(key)))
    elif tree is not None:
        yield name, tree


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, u.Quantity):
        return leaf.mantissa
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _described(value: Any) -> str:
    return f"{jnp.result_type(value)}{list(np.shape(value))}"


def _restored(new: Any, like: Any) -> Any:
    """A value in the form, and on the devices, of the one that it is for."""
    if isinstance(like, u.Quantity):
        return u.Quantity(_restored(new, like.mantissa), unit=like.unit)
    if like is None:
        return None
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(like))
    if isinstance(like, np.ndarray):
        return np.array(new)
    if not isinstance(like, jax.Array):
        return type(like)(new)
    array = jnp.asarray(new)
    spread = not is_traced(array) and array.sharding != like.sharding
    return jax.device_put(array, like.sharding) if spread else array
