"""A module of torch as a step function of arrays: `step(weights, state, *inputs)`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from .._errors import not_supported, type_error, value_error
from .._online import UNNAMED, Dotted, Untrained
from ..graph import bits_of, reach
from ..program import Program, PyTree, failing_line, flatten
from ._arrays import Array, copied, dtype_of, tensors_of
from ._functions import tracing
from ._module import Contents, Place, Seen, inhabited
from ._tracing import Refused, Traced, array_in, known, meta_of, tensors_in, traced

_TORCH_TYPES = {str(dtype_of(t)): t for t in (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)}  # fmt: skip


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a module by their names; others are passed through."""

    trained: dict[Dotted, Any]
    frozen: Untrained
    mode: Hashable  # what else decides which program is traced

    def tree_flatten_with_keys(self) -> tuple[Any, Hashable]:
        return ((UNNAMED, self.trained), (UNNAMED, self.frozen)), self.mode

    @classmethod
    def tree_unflatten(cls, mode: Hashable, children: Any) -> Weights:
        trained, frozen = children
        return cls(trained, frozen, mode)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class State:
    """The state that a step is given, and what the module keeps inside, by its names."""

    given: PyTree
    inside: dict[Dotted, Any]

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return ((UNNAMED, self.given), (UNNAMED, self.inside)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> State:
        return cls(*children)


def wrapped(tree: PyTree) -> PyTree:
    """A pytree of arrays as one of tensors of a traced step."""

    def tensor(a: Any) -> Any:
        if not isinstance(a, Array):
            return a
        return traced(a, _TORCH_TYPES[str(a.dtype)])

    return jax.tree.map(tensor, tree)


def unwrapped(tree: PyTree) -> PyTree:
    """A pytree of tensors of a traced step as one of arrays."""

    return jax.tree.map(array_in, tree)


@dataclass(frozen=True, eq=False, slots=True)
class Inner:
    """A place of a module that a step changes: a state, or what is written before it is read."""

    place: Place
    start: PyTree  # what it holds before the first step
    names: tuple[Dotted, ...]  # of its tensors
    held: Any  # what the module has had there
    made: bool  # whether the start is something else
    state: bool = True

    @classmethod
    def of(cls, seen: Seen, device: torch.device) -> Inner:
        """The place of a module that a step leaves so: its start has the shapes of that."""
        held = pytree.tree_map(lambda leaf: leaf, seen.place.value)  # its containers may change
        start = _start(held, seen.after, device)
        # `_memories` of a layer, a dict, is not in the name that its user has for `v`.
        hidden = seen.place.key.startswith("_") and isinstance(start, dict)
        name = seen.place.name.removesuffix(f".{seen.place.key}" if hidden else "")
        keyed = pytree.tree_flatten_with_path(start)[0]
        tensors = [(path, a) for path, a in keyed if isinstance(a, torch.Tensor)]
        names = tuple(Dotted(name + "".join(_shown(key) for key in path)) for path, _ in tensors)
        pairs = zip(pytree.tree_leaves(held), pytree.tree_leaves(start), strict=False)
        made = not all(a is b for a, b in pairs)
        if not seen.place.persistent:
            start = pytree.tree_map(_own, start)
        return cls(seen.place, start, names, held, made)

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(self.start)

    def filled(self, values: Sequence[Any]) -> PyTree:
        """The value of the place with these tensors."""
        leaves, structure = pytree.tree_flatten(self.start)
        given = iter(values)
        new = [next(given) if isinstance(a, torch.Tensor) else a for a in leaves]
        return pytree.tree_unflatten(new, structure)

    def fits(self, after: PyTree) -> bool:
        """Whether a step leaves what it found, in structure, shapes and types."""
        kind = lambda a: (a.shape, a.dtype) if isinstance(a, torch.Tensor) else a
        (mine, one), (others, other) = map(pytree.tree_flatten, (self.start, after))
        return one == other and [kind(a) for a in mine] == [kind(a) for a in others]


def _shown(key: Any) -> str:
    name = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
    return f".{name}"


def _own(a: Any) -> Any:
    return a.detach().clone() if isinstance(a, torch.Tensor) else a


def _start(held: PyTree, after: PyTree, device: torch.device) -> PyTree:
    """What a place holds at the start, with the shapes that it has after a step."""
    held_leaves, structure = pytree.tree_flatten(held)
    leaves, wanted = pytree.tree_flatten(after)
    if structure != wanted:
        held_leaves = [None] * len(leaves)
    filled = [_filled(h, a, device) for h, a in zip(held_leaves, leaves, strict=True)]
    return pytree.tree_unflatten(filled, wanted)


def _filled(held: Any, after: Any, device: torch.device) -> Any:
    """A tensor of the shape of `after`: of a number that, of nothing zero."""
    if not isinstance(after, torch.Tensor):
        return after
    if isinstance(held, torch.Tensor) and (held.shape, held.dtype) == (after.shape, after.dtype):
        return held
    if isinstance(held, torch.Tensor) and held.numel() == 1:
        return held.detach().to(after.dtype).expand(after.shape).clone()
    number = held if isinstance(held, bool | int | float) else 0
    return torch.full(after.shape, number, dtype=after.dtype, device=device)


@dataclass(eq=False)
class Step:
    """One step of a module, `net(state, *inputs)`, or `net(*inputs)` if it is given no state."""

    contents: Contents
    has_state: bool
    inner: dict[str, Inner] = field(default_factory=dict)
    changed: dict[str, Seen] = field(default_factory=dict)  # by the last trace, without values

    @property
    def __name__(self) -> str:
        return type(self.contents.net).__name__

    def __call__(self, weights: Weights, state: State, *inputs: PyTree) -> tuple[State, PyTree]:
        refused = Refused()
        tensors = wrapped({**weights.trained, **weights.frozen.value})
        entries = {}
        for name, inner in self.inner.items():
            arrays = [state.inside[n] for n in inner.names] if inner.state else inner.tensors()
            entries[name] = (inner.place, inner.filled(wrapped(arrays)))
        with tracing(refused), inhabited(self.contents, tensors, entries, known) as seen:
            given = (wrapped(state.given),) if self.has_state else ()
            with _gradients_refused():
                result = self.contents.net(*given, *wrapped(inputs))
        refused.check()
        _check_unchanged(tensors)
        new, out = _pair(result) if self.has_state else (None, result)
        self.changed = {n: _without_values(s) for n, s in seen.items() if s.changed}
        inside: dict[Dotted, Array] = {}
        for name, inner in self.inner.items():
            if inner.state and inner.fits(seen[name].after):
                inside.update(
                    zip(inner.names, unwrapped(tensors_in(seen[name].after)), strict=True)
                )
        return State(unwrapped(new), {**state.inside, **inside}), unwrapped(out)


@contextmanager
def _gradients_refused() -> Iterator[None]:
    """Name what torch's autograd says of tensors that it does not follow."""
    try:
        yield
    except RuntimeError as cause:
        if "does not require grad" not in str(cause):
            raise
        raise not_supported(
            "the step takes a gradient by torch's autograd (torch.autograd.grad, backward).",
            where=failing_line(cause),
            why="it records nothing while a step is traced: the derivative of the step is JAX's",
            do="use torch.func.grad, which is traced",
        ) from cause


def _without_values(seen: Seen) -> Seen:
    meta = lambda a: meta_of(a) if isinstance(a, torch.Tensor) else a
    return Seen(seen.place, None, pytree.tree_map(meta, seen.after))


def _pair(result: Any) -> tuple[PyTree, PyTree]:
    if not isinstance(result, tuple) or len(result) != 2:
        kind = "tensor" if isinstance(result, torch.Tensor) else type(result).__name__
        raise type_error(
            f"the module returned a {kind}, not a pair.",
            why="a step is net(state, *inputs) -> (state, out)",
            do="return the new state first, then the output; of a module that keeps its state "
            "inside, pass None as the state: net(*inputs) -> out",
        )
    return result


def _check_unchanged(weights: Mapping[str, Traced]) -> None:
    """Refuse a step that writes into parameters."""
    written = [name for name, tensor in weights.items() if tensor.version]
    if written:
        raise not_supported(
            f"the step writes into the parameter(s) {', '.join(written)}.",
            why="parameters are constant within a step, whose gradient is taken by them",
            do="change them between calls of the learner, or make them buffers",
        )


def inner_of(
    step: Step, weights: Weights, given: PyTree, inputs: tuple[PyTree, ...]
) -> dict[str, Inner]:
    """The places of a module that are states, found by tracing its step until nothing is new."""
    for old in step.inner.values():
        if not old.place.persistent:
            old.place.put(old.held)
    step.inner = {}
    for _ in range(4):
        state = State(given, start_of(step.inner))
        program = _traced(step, weights, state, inputs)
        new = {n: s for n, s in step.changed.items() if n not in step.inner}
        new |= {n: step.changed[n] for n in step.inner if _differs(step, n)}
        if not new:
            break
        step.inner |= {name: Inner.of(s, step.contents.device) for name, s in new.items()}
    else:
        raise not_supported(
            f"the step changes {', '.join(sorted(new))} of the module, no tensor of one shape.",
            why="its Python runs once for all steps: a number that it counts and a list that grows "
            "would stay what they were",
            do="keep a tensor, or return what is collected as a part of the output",
        )
    inner = _read(step.inner, program, len(jax.tree.leaves(weights)), given)
    if any(i.made for i in inner.values()):
        _check_start(step, inner, given, inputs)
    return inner


def _differs(step: Step, name: str) -> bool:
    return name in step.changed and not step.inner[name].fits(step.changed[name].after)


def start_of(inner: Mapping[str, Inner]) -> dict[Dotted, Array]:
    """The states inside of a module before the first step."""
    pairs = [
        (n, t) for i in inner.values() if i.state for n, t in zip(i.names, i.tensors(), strict=True)
    ]
    return {name: copied(tensor) for name, tensor in pairs}


def _traced(step: Step, weights: Weights, state: State, inputs: tuple[PyTree, ...]) -> Program:
    def outputs(weights: Weights, state: State, *inputs: PyTree) -> PyTree:
        after, out = step(weights, state, *inputs)
        return out, after.given, after.inside

    return flatten(jax.make_jaxpr(outputs)(weights, state, *inputs))[0]


def _read(
    inner: Mapping[str, Inner], program: Program, first: int, given: PyTree
) -> dict[str, Inner]:
    """The places, with those that no result and no other state depends on as no state."""
    start = first + len(jax.tree.leaves(given))
    names = sorted(start_of(inner))
    ends = dict(zip(names, program.outputs[len(program.outputs) - len(names) :], strict=True))
    entries = {program.inputs[start + i]: 1 << i for i in range(len(names))}
    bits = reach(program, entries, differentiable=False)
    read = lambda results: set(
        n for i, n in enumerate(names) if any(bits_of(a, bits) >> i & 1 for a in results)
    )
    outside = read(program.outputs[: len(program.outputs) - len(names)])
    live = set(inner)
    while True:
        found = outside | read([ends[n] for name in live for n in inner[name].names])
        kept = {name for name in live if found.intersection(inner[name].names)}
        if kept == live:
            return {name: replace(i, state=name in live) for name, i in inner.items()}
        live = kept


def _check_start(
    step: Step, inner: Mapping[str, Inner], given: PyTree, inputs: tuple[PyTree, ...]
) -> None:
    """Refuse places that do not start as zero where the module has nothing in them."""
    contents = step.contents
    parameters: dict[Dotted, torch.Tensor] = {**contents.trained, **contents.frozen}
    copy = lambda t: t.detach().clone()
    made = {name: (i.place, i.start) for name, i in inner.items() if i.made}
    results = []
    for entries in ({}, made):
        arguments = tensors_of((given, *inputs) if step.has_state else inputs)
        arguments = jax.tree.map(copy, arguments)
        with torch.no_grad(), inhabited(contents, parameters, entries, copy) as seen:
            out = contents.net(*arguments)
        results.append((out, [seen[name].after for name in inner]))
    one, other = ([t.detach() for t in tensors_in(r)] for r in results)
    same = lambda a, b: torch.allclose(a, b, 0, 0, equal_nan=True)
    if not all(map(same, one, other)):
        raise value_error(
            f"the module starts {', '.join(made)} in its first step, and not with zeros.",
            why="a learner needs the state before the first step; what the step does in place of "
            "an empty one is not a part of the later steps",
            do="give it its first value before the module is made a learner",
        )
