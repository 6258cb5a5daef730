"""Checkpoints: everything that training goes on from, in one file or one pytree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, Self

import jax.numpy as jnp
import numpy as np

from .._errors import type_error, value_error
from .._version import __version__
from ..program import PyTree, is_traced
from ._container import DTYPES, Container, Json, write
from ._names import EXTRA, PYTHON, SEPARATOR, Named, group, packed, unpacked
from ._optimizer import OPTIMIZER, check_passed, part_of
from ._processes import fetched, together, write_once
from ._swap import Assignment, swap

WEIGHTS, STATES = "weights", "states"
_LINES = 100  # of an error


class Saved(Protocol):
    """What a learner has to have, to be saved and loaded."""

    def named_arrays(self) -> Named:
        """All that training goes on from, by name: `weights/…`, `states/…` (with traces, counts
        and random keys) and, if the learner keeps its state, `optimizer/…`."""
        ...

    def assign(self, values: Named) -> None:
        """Give some of these, by the same names, other values: all of them or none."""
        ...

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer that is not for this learner."""
        ...

    def identity(self) -> Json:
        """What the values belong to, in words of JSON; what two learners must have in common."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The result of `learner.load`, besides the states that it restored.

    Attributes:
        step: the number passed to `save`.
        extra: the value passed to `save`.
        optimizer: the optimizer's state as a tree, or the object that holds it; None if it has
            been left alone.
        version: of the braintrace that wrote the file.
    """

    step: int | None
    extra: PyTree
    optimizer: Any = field(repr=False)
    version: str


class CheckpointMixin:
    """`save`, `load`, `to_pytree` and `from_pytree` of a learner."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise type_error(
            f"a {type(self).__name__} cannot be pickled.",
            why="it holds compiled programs and functions of the rule",
            do="learner.save(path) writes all its numbers; to continue elsewhere, compile the "
            "model again and learner.load(path). Within a process, copy.deepcopy works",
        )

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def expect(self, names: Mapping[str, Any]) -> Callable[[], None]:
        """Make room for arrays of these names, that are to be loaded; returns how to undo it."""
        return lambda: None

    def save(
        self: Any,
        path: str | os.PathLike,
        *,
        optimizer: Any = None,
        step: int | None = None,
        extra: PyTree = None,
    ) -> None:
        """Write weights, states, traces, optimizer and random state into one file.

        A file of that name is replaced at once: a process that is killed leaves the old one or the
        new one. The file holds arrays and plain data, no code. If there are several processes
        (`jax.distributed`), all of them call this; process 0 writes, and where each process has an
        array of its own, that of process 0 is saved.

        Args:
            path: the file; its folder is created if there is none.
            optimizer: the optax transformation of `etrace_train` (saved by default), an optimizer
                of braintools or nnx, or the state of any other optimizer as a pytree; False for
                none.
            step: how far training has come.
            extra: anything of dicts, lists, tuples, arrays, numbers, strings and None.

        Raises:
            ValueError: the learner is not compiled, or this is inside of a transformation.
            OSError: the path is a folder, or cannot be written.
            TypeError: a state or `extra` holds something else.

        Example:
            >>> import braintrace, jax.numpy as jnp, tempfile
            >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.zeros(3))
            >>> path = tempfile.mkdtemp() + '/gru.ckpt'
            >>> learner.save(path, step=7)
            >>> learner.load(path).step
            7
        """
        values, own = _parted(_concrete(self.named_arrays()))
        part = part_of(self, own, optimizer, saving=True)
        values |= part.values if part else {}
        save_values(path, values, self.identity(), part is not None, step, extra)

    def load(self: Any, path: str | os.PathLike, *, optimizer: Any = None) -> Checkpoint:
        """Put back what `save` wrote, so that training goes on as if it had never stopped.

        The random state of brainstate is put back too. A file that is refused changes nothing.
        Arrays go to the devices that those of the learner are on, whatever their number when the
        file was saved; of several processes each one reads the file.

        Args:
            path: the file.
            optimizer: as for `save`: an optax transformation, whose state the learner keeps from
                then on; an optimizer of braintools or nnx; or a pytree of the form that was saved.
                False leaves the optimizer in the file alone.

        Returns:
            A `Checkpoint`: step, extra, and the optimizer's state.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint, is damaged, or belongs to another model, rule or
                optimizer; the differences are listed.
        """
        _concrete(self.named_arrays())
        with Container(path) as file:
            undo = self.expect(file.values)
            try:
                return self._loaded(file, optimizer)
            except BaseException:
                undo()
                raise

    def _loaded(self: Any, file: Container, optimizer: Any) -> Checkpoint:
        """Assign what a file holds."""
        path, head = file.path, _head(file)
        old, own = _parted(_concrete(self.named_arrays()))
        part = part_of(self, own if head["optimizer"] else None, optimizer, saving=False)
        if optimizer is not False:
            check_passed(path, head["optimizer"], part is not None)
        places = {**old, **(part.values if part else {})}
        left = {EXTRA, OPTIMIZER} if optimizer is False else {EXTRA}
        given = {name: v for name, v in file.values.items() if group(name) not in left}
        if wrong := _options(head["learner"], self.identity()) + misfits(given, places, "file"):
            raise value_error(
                f"{os.fspath(path)} belongs to another learner." + _listed(wrong),
                why="every value must find its place; nothing was changed",
                do="build model, learner and optimizer as they were when it was saved: sizes, "
                "rule, options, batch size, precision",
            )
        values = file.read()
        extra = _extra(file, head["extra"], values)
        result: list[Any] = [None]
        mine = lambda names: {name: values[name] for name in names}
        assignments: list[Assignment] = [
            (lambda: self.assign(mine(old)), lambda: self.assign(old)),
        ]
        if part is not None:
            adopt = lambda: result.append(part.assign(mine(part.values)))
            assignments.append((adopt, part.undo))
        swap(assignments)
        return Checkpoint(head["step"], extra, result[-1], head["braintrace"])

    def to_pytree(self: Any) -> dict[str, Any]:
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
        tree: dict[str, Any] = {}
        for name, value in self.named_arrays().items():
            *groups, last = name.split(SEPARATOR)
            inner = tree
            for key in groups:
                inner = inner.setdefault(key, {})
            inner[last] = value
        return tree

    def from_pytree(self: Any, tree: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore what `to_pytree` returned. A tree that is refused changes nothing.

        Args:
            tree: nested dicts of arrays.
            weights_only: whether to restore only the weights and leave states, traces and optimizer
                as they are; then batch size and rule may differ.

        Raises:
            ValueError: names, shapes or types differ; all differences are listed.
        """
        given = _concrete(_flat(tree, ()))
        undo = self.expect(given) if not weights_only else lambda: None
        places = _concrete(self.named_arrays())
        if weights_only:
            both = (places, given)
            places, given = ({k: v for k, v in n.items() if group(k) == WEIGHTS} for n in both)
        if wrong := misfits(given, places, "tree"):
            undo()
            raise value_error(
                "the tree belongs to another learner." + _listed(wrong),
                why="every value must find its place; nothing was changed",
                do="build model and learner as they were, init_optimizer if the tree has one; or "
                "take the weights alone with weights_only=True",
            )
        self.assign(given)


def save_values(
    path: str | os.PathLike,
    values: Named,
    identity: Json,
    optimizer: bool,
    step: int | None,
    extra: PyTree,
) -> None:
    """Write named arrays with what they belong to."""
    if not (step is None or (isinstance(step, int | np.integer) and not isinstance(step, bool))):
        raise type_error(
            f"step has type {type(step).__name__}.",
            why="it counts the updates so far",
            do="pass an integer, and anything else as extra=...",
        )
    values = dict(values)
    header = {
        "braintrace": __version__,
        "step": None if step is None else int(step),
        "learner": identity,
        "optimizer": optimizer,
        "extra": packed(extra, values),
    }
    with together(path):
        arrays = {name: _fetched(name, value) for name, value in values.items()}
        write_once(path, lambda: write(path, header, arrays))


def _fetched(name: str, value: Any) -> Any:
    if type(value) in PYTHON:
        return value
    if getattr(getattr(value, "dtype", None), "name", None) in DTYPES:
        return fetched(value)
    raise type_error(
        f"a checkpoint cannot hold {type(value).__name__}.",
        where=name,
        why="it holds arrays, keys, quantities, numbers and strings; never code",
        do="keep anything else outside of states, optimizer and extra",
    )


def misfits(given: Named, places: Named, where: str) -> list[str]:
    """In words, how arrays differ from those whose places they would take."""
    wrong = [f"{name}: not in the {where}" for name in places if name not in given]
    wrong += [f"{name}: only in the {where}" for name in given if name not in places]
    for name in (name for name in places if name in given):
        new, old = _form(given[name]), _form(places[name])
        free = "" in (new[1], old[1])  # then any width will do
        if new != old and not (free and (new[0], new[2]) == (old[0], old[2])):
            texts = [f"{kind or 'Python'}{list(shape)}" for _, kind, shape in (new, old)]
            wrong.append(f"{name}: {texts[0]} in the {where}, {texts[1]} here")
    return wrong


def _form(value: Any) -> tuple[str, str, tuple[int, ...]]:
    """The sort of its numbers, their type, and the shape; a number of Python has no width."""
    python = isinstance(value, PYTHON)
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    sorts = ("floating", "integer", "complexfloating", "bool_")
    sort = next((s for s in sorts if jnp.issubdtype(dtype, getattr(jnp, s))), "text")
    return sort, "" if python else dtype.name, np.shape(value)


def _head(file: Container) -> Json:
    """The header of a checkpoint, with entries of the right types."""
    kinds = {"braintrace": str, "step": int | None, "learner": dict, "optimizer": bool}
    head = file.header
    typed = [k in head and isinstance(head[k], kind) for k, kind in kinds.items()]
    if not all(typed) or head.keys() != {*kinds, EXTRA} or isinstance(head["step"], bool):
        file.refuse_entries("entries are missing, of another type, or too many")
    return head


def _extra(file: Container, words: Any, values: Named) -> PyTree:
    """The value passed to `save`."""
    mine = {name: v for name, v in values.items() if group(name) == EXTRA}
    try:
        value = unpacked(words, mine)
    except (ValueError, TypeError, LookupError, RecursionError) as cause:
        file.refuse_entries(cause)
    if mine:
        file.refuse_entries(f"{len(mine)} arrays of extra are nowhere in it")
    return value


def _options(saved: Json, here: Json) -> list[str]:
    """How the learner that wrote a file differs from another, option by option."""
    return [
        f"option {name}: {saved.get(name)!r} in the file, {here.get(name)!r} here"
        for name in dict.fromkeys((*here, *saved))
        if saved.get(name) != here.get(name)
    ]


def _listed(lines: list[str]) -> str:
    """Lines of an error; what a file says is not for the terminal to act on."""
    shown = [line.encode("unicode_escape").decode()[:500] for line in lines[:_LINES]]
    if len(lines) > _LINES:
        shown.append(f"and {len(lines) - _LINES} more")
    return "".join(f"\n    {line}" for line in shown)


def _concrete(values: Named) -> Named:
    """Values that are numbers, not placeholders of a transformation."""
    if traced := [name for name, value in values.items() if is_traced(value)]:
        raise value_error(
            "a checkpoint inside of a transformation.",
            where=traced[0],
            why="states have no values while jit traces",
            do="save and load outside of jit, grad, vmap and scan",
        )
    return values


def _parted(values: Named) -> tuple[Named, Named | None]:
    """Values without those of the optimizer, and those, None if there are none."""
    own = {name: v for name, v in values.items() if group(name) == OPTIMIZER}
    return {name: v for name, v in values.items() if name not in own}, own or None


def _flat(tree: Any, path: tuple[str, ...]) -> Named:
    if not isinstance(tree, Mapping):
        return {} if tree is None else {SEPARATOR.join(path): tree}
    return {k: v for key, inner in tree.items() for k, v in _flat(inner, (*path, str(key))).items()}
