"""Checkpoints: everything that training goes on from, in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import message, type_error, value_error
from .._version import __version__
from ..program import PyTree
from ._archive import Json, read, write
from ._contents import Learner, Name, identity, states_in
from ._leaves import decoded, described, described_as, differences, encoded, is_leaf
from ._optimizer import to_load, to_save
from ._processes import write_once
from ._structure import packed, unpacked

OPTIMIZER = "optimizer"


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
    """`save` and `load` of a learner."""

    _learner: Learner  # whose states are saved
    _n_samples: int | None = None  # over which it is mapped

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

    def save(
        self,
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
                of braintools, or the state of any other optimizer as a pytree; False for none.
            step: how far training has come.
            extra: anything of dicts, lists, tuples, arrays, numbers, strings and None.

        Raises:
            ValueError: the learner is not compiled, or this is inside of a transformation.
            IsADirectoryError: the path is a folder.
            TypeError: a state or `extra` holds something else.

        Example:
            >>> import braintrace, jax.numpy as jnp, tempfile
            >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.zeros(3))
            >>> path = tempfile.mkdtemp() + '/gru.ckpt'
            >>> learner.save(path, step=7)
            >>> learner.load(path).step
            7
        """
        learner = self._learner
        check_compiled(learner, "saved")
        opt = to_save(self, learner, optimizer)
        states = states_in(learner) | {(OPTIMIZER, *n): s for n, s in opt.states.items()}
        values = {name: (state.value, type(state).__name__) for name, state in states.items()}
        if opt.kind == "tree":
            values[OPTIMIZER,] = (opt.tree, "tree")
        save_values(path, identity(learner, self._n_samples), opt.kind, values, step, extra)

    def load(self, path: str | os.PathLike, *, optimizer: Any = None) -> Checkpoint:
        """Put back what `save` wrote, so that training goes on as if it had never stopped.

        The random state of brainstate is put back too. A file that is refused changes nothing.
        Arrays go to the devices that those of the learner are on, whatever their number when the
        file was saved; of several processes each one reads the file.

        Args:
            path: the file.
            optimizer: as for `save`: an optax transformation, whose state the learner keeps from
                then on; an optimizer of braintools; or a pytree of the form that was saved. False
                leaves the optimizer in the file alone.

        Returns:
            A `Checkpoint`: step, extra, and the optimizer's state.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint, is damaged, or belongs to another model, rule or
                optimizer; all differences are listed.
        """
        learner = self._learner
        check_compiled(learner, "loaded")
        file = File.read(path)
        opt = to_load(self, learner, optimizer, file.header["optimizer"], path)
        states = states_in(learner) | {(OPTIMIZER, *n): s for n, s in opt.states.items()}
        places = {name: state.value for name, state in states.items()}
        if opt.kind == "tree":
            places[OPTIMIZER,] = opt.tree
        values = file.values(identity(learner, self._n_samples), places, opt.kind is not None)
        extra = file.extra()
        state_of_optimizer = opt.finish(values.pop((OPTIMIZER,), None))
        for name, value in values.items():
            states[name].value = value
        return file.checkpoint(extra, state_of_optimizer)


def save_values(
    path: str | os.PathLike,
    learner: Json,
    optimizer: str | None,
    values: Mapping[Name, tuple[PyTree, str]],
    step: int | None,
    extra: PyTree,
) -> None:
    """Write named trees with what they are, the learner's identity and the optimizer's kind."""
    entries: list[Json] = []
    arrays: list[np.ndarray] = []

    def put(value: PyTree) -> Json:
        spec, array = encoded(value)
        if array is not None:
            spec["array"] = len(arrays)
            arrays.append(array if jax.process_index() == 0 else np.empty(0))
        return spec

    for name, (value, kind) in values.items():
        entries += _leaves(name, value, put, kind)
    header = {
        "braintrace": __version__,
        "step": _step(step),
        "learner": learner,
        "optimizer": optimizer,
        "values": entries,
        "extra": packed(extra, put),
    }
    write_once(path, lambda: write(path, header, arrays))


@dataclass(frozen=True, slots=True)
class File:
    """A checkpoint that was read."""

    path: str | os.PathLike
    header: Json
    arrays: list[np.ndarray]

    @classmethod
    def read(cls, path: str | os.PathLike) -> Self:
        return cls(path, *read(path))

    def _array(self, spec: Json) -> np.ndarray | None:
        return self.arrays[spec["array"]] if "array" in spec else None

    def values(
        self, learner: Json, places: Mapping[Name, PyTree], optimizer: bool
    ) -> dict[Name, PyTree]:
        """The trees in the file that are for these; those of an optimizer may be left alone.

        Raises:
            ValueError: the learner is another one, or anything does not fit; all is listed.
        """
        entries = {(*e["name"], e["leaf"]): e for e in self.header["values"]}
        if not optimizer:
            entries = {name: e for name, e in entries.items() if name[0] != OPTIMIZER}
        wrong = _others(self.header["learner"], learner)
        matched = {}
        for name, value in places.items():
            flat, tree = jtu.tree_flatten_with_path(value, is_leaf=is_leaf)
            specs = [entries.pop((*name, jtu.keystr(key)), None) for key, _ in flat]
            for (key, leaf), spec in zip(flat, specs, strict=True):
                if spec is None:
                    wrong.append(f"{_shown(name, key)}: not in the file")
                else:
                    differing = differences(described(leaf), described_as(spec, self._array(spec)))
                    wrong += [f"{_shown(name, key)}: {text}" for text in differing]
            matched[name] = (tree, [leaf for _, leaf in flat], specs)
        wrong += [f"{'.'.join(name[:-1])}{name[-1]}: only in the file" for name in entries]
        if wrong:
            raise ValueError(_refusal(self.path, wrong))
        decode = lambda spec, leaf: decoded(spec, self._array(spec), leaf)
        return {
            name: jtu.tree_unflatten(tree, map(decode, specs, leaves))
            for name, (tree, leaves, specs) in matched.items()
        }

    def extra(self) -> PyTree:
        """The value passed to `save`."""
        return unpacked(self.header["extra"], lambda spec: decoded(spec, self._array(spec)))

    def checkpoint(self, extra: PyTree, optimizer: Any) -> Checkpoint:
        """What `load` returns."""
        return Checkpoint(self.header["step"], extra, optimizer, self.header["braintrace"])


def _leaves(name: Name, value: PyTree, put: Callable[[PyTree], Json], kind: str) -> list[Json]:
    flat, _ = jtu.tree_flatten_with_path(value, is_leaf=is_leaf)
    of = {"name": list(name), "state": kind}
    return [{**of, "leaf": jtu.keystr(key), **put(leaf)} for key, leaf in flat]


def _shown(name: Name, key: jtu.KeyPath) -> str:
    return ".".join(name) + jtu.keystr(key)


def _step(step: int | None) -> int | None:
    if step is None:
        return None
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise type_error(
            f"step has type {type(step).__name__}.",
            why="it counts the updates so far",
            do="pass an integer, and anything else as extra=...",
        )
    return int(step)


def check_compiled(learner: Learner, done: str) -> None:
    """Refuse a learner whose traces do not exist yet."""
    if not learner.is_compiled:
        raise value_error(
            f"{type(learner).__name__} is {done} before it is compiled.",
            why="its traces are allocated by compile_graph; there are none yet",
            do="call learner.compile_graph(*example_inputs) first, or build the learner with "
            "braintrace.compile(model, rule, *example_inputs)",
        )


def _others(saved: Json, here: Json) -> list[str]:
    """How the learner that wrote a file differs from another, option by option."""
    return [
        f"option {name}: {saved.get(name)!r} in the file, {here.get(name)!r} here"
        for name in dict.fromkeys((*saved, *here))
        if saved.get(name) != here.get(name) and name != "batched"  # shapes tell this one
    ]


def _refusal(path: str | os.PathLike, wrong: list[str]) -> str:
    return message(
        f"{os.fspath(path)} belongs to another learner.\n    " + "\n    ".join(wrong),
        why="every value must find its place; nothing was changed",
        do="build model, learner and optimizer as they were when it was saved: sizes, rule, "
        "options, batch size, precision",
    )
