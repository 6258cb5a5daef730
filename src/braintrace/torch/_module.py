"""What a module of torch holds: parameters, constants, and the states inside of it.

A state is found by tracing: what a step leaves in a buffer or an attribute and a step reads. So
membranes that a layer keeps, running means and counters are states, and what a layer writes for
its user to look at is not. A place that is empty before the first step (None, a number, a tensor
without elements) starts as the step itself fills it, which is checked by running it in torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._errors import not_supported, type_error, value_error
from .._online import Dotted
from ._tracing import Traced

_OF_TORCH = {*vars(nn.Module())}  # attributes of every module
_OF_RNN = ("_flat_weights", "_flat_weight_refs")  # which `nn.GRU` makes of its parameters
ABSENT = object()


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where a module holds a value: one of its buffers, or an attribute."""

    name: str
    holder: dict[str, Any]
    key: str
    persistent: bool  # saved with the module

    @property
    def value(self) -> Any:
        return self.holder.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


def places_of(net: nn.Module) -> dict[str, Place]:
    """All places of a module and its parts; parameters are none."""
    found: dict[str, Place] = {}
    for path, module in net.named_modules():
        plain = module._non_persistent_buffers_set
        holders = [(module._buffers, {*module._buffers} - plain, module._buffers)]
        holders += [(vars(module), set(), {*vars(module)} - _OF_TORCH)]
        for holder, persistent, keys in holders:
            for key in keys:
                name = f"{path}.{key}" if path else key
                found[name] = Place(name, holder, key, key in persistent)
    return found


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """The parameters of a module: those that are trained, and those that are not."""

    net: nn.Module
    trained: dict[Dotted, nn.Parameter]
    frozen: dict[Dotted, nn.Parameter]
    device: torch.device

    @classmethod
    def of(cls, net: nn.Module) -> Contents:
        named = {Dotted(name): p for name, p in net.named_parameters()}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        device = _checked(net, trained)
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        return cls(net, trained, frozen, device)


_INPUTS, _STATES = ("x", "input", "inputs", "input_"), ("h", "hx", "hidden", "state", "states")


def check_call(net: nn.Module, has_state: bool, inputs: int) -> None:
    """Refuse a step that takes something else, or says that its input is first, as cells do."""
    name, signature, count = type(net).__name__, inspect.signature(net.forward), inputs + has_state
    try:
        signature.bind(*range(count))
    except TypeError as cause:
        raise type_error(
            f"{name}.forward{signature} is not for {count} argument(s): {cause}.",
            why="a step is net(state, *inputs), or net(*inputs) with None for the state",
            do="pass the state before the first step and an example of each input: "
            "online(net, rule, state, x)",
        ) from None
    first, second, *_ = [*signature.parameters, "", ""]
    if has_state and first in _INPUTS and second in _STATES:
        raise type_error(
            f"{name}.forward({first}, {second}) has its input first.",
            why="a step is called as net(state, *inputs); with equal sizes the two would be taken "
            "for each other",
            do=f"write forward(self, {second}, {first}) -> ({second}, out)",
        )


@dataclass(frozen=True, slots=True)
class Mode:
    """What a traced step depends on besides its arrays, and what that was when it was traced.

    Whether modules train; which parameters do; tensors that are read only; numbers and strings.
    """

    modules: tuple[nn.Module, ...]
    places: tuple[Place, ...]
    value: tuple[Any, ...]

    @classmethod
    def of(cls, net: nn.Module, states: Container[str]) -> Mode:
        """The present mode; states are no part of it."""
        modules = tuple(net.modules())
        found = places_of(net).items()
        places = tuple(p for name, p in found if name not in states and _is_fixed(p.value))
        return cls(modules, places, _mode(modules, places))

    def check(self) -> None:
        """Refuse a module that is in another mode."""
        if _mode(self.modules, self.places) == self.value:
            return
        now = zip(self.places, self.value[-1], strict=True)
        changed = [place.name for place, value in now if _fixed(place.value) != value]
        what = (
            ", ".join(changed) or "train() or eval(), or a parameter was replaced, frozen or moved"
        )
        raise value_error(
            f"the module has changed since the sequence began: {what}.",
            why="its Python runs once, and what it found there is a constant of the traced step",
            do="learner.reset() starts a new sequence with the module as it is; evaluate with "
            "net.eval() before or after, and net.train() in between",
        )


def _mode(modules: Sequence[nn.Module], places: Iterable[Place]) -> tuple[Any, ...]:
    parameters = (p for m in modules for p in m._parameters.values() if p is not None)
    trained = tuple((id(p), p.requires_grad, p.dtype, p.device) for p in parameters)
    return tuple(m.training for m in modules), trained, tuple(_fixed(p.value) for p in places)


def _fixed(value: Any) -> Hashable:
    """What tells whether a constant has changed."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _is_fixed(value: Any) -> bool:
    return isinstance(value, torch.Tensor | bool | int | float | str)


def _checked(net: nn.Module, trained: Mapping[Dotted, nn.Parameter]) -> torch.device:
    """The device of a module that can learn."""
    _check_step(net)
    if not trained:
        raise type_error(
            f"{type(net).__name__} has no parameter that is trained.",
            why="a learner learns the parameters of the module, those that require a gradient",
            do="make the weights nn.Parameter, and leave requires_grad as it is",
        )
    lazy = [n for n, p in net.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    if lazy:
        raise value_error(
            f"{', '.join(lazy)} has no shape yet.",
            why="a lazy module makes its parameters in its first call",
            do="call the module once before it is made a learner",
        )
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise not_supported(
                f"the module {name or type(net).__name__} is TorchScript.",
                why="a step is traced by running its Python",
                do="pass the module that torch.jit.script was called with",
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise not_supported(
                f"the module {name or type(net).__name__} has backward hooks.",
                why="they run in torch's autograd, which computes nothing here, so that what they "
                "do to a gradient would be left out",
                do="remove the hooks; write what they do as an autograd.Function, or change p.grad "
                "after the gradient is there",
            )
    devices = {p.device for p in net.parameters()}
    if len(devices) > 1:
        raise not_supported(
            f"the parameters are on several devices: {', '.join(sorted(map(str, devices)))}.",
            why="a step is one program, which runs on one device",
            do="move the module to one, net.to(device)",
        )
    return devices.pop()


def _check_step(net: nn.Module) -> None:
    """Refuse the layers of torch that are no step by themselves."""
    name = type(net).__name__
    if isinstance(net, nn.RNNBase):
        raise type_error(
            f"nn.{name} runs over a whole sequence.",
            why="a learner takes a module that computes one step; the loop over time is its own",
            do=f"call nn.{name}Cell in a forward(state, x) of your own, one for each layer; its "
            "weight_ih is the weight_ih_l0 of nn." + name,
        )
    if isinstance(net, nn.RNNCellBase):
        raise type_error(
            f"nn.{name} takes its input first, and returns its state alone.",
            why="a step is net(state, *inputs) -> (state, out)",
            do="make it a part of a module whose forward(self, state, x) is "
            "`state = self.cell(x, state); return state, self.out(state)`",
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a place held when a step began, and when it ended."""

    place: Place
    before: Any
    after: Any

    @property
    def changed(self) -> bool:
        leaves, structure = pytree.tree_flatten(self.before)
        after, structure_after = pytree.tree_flatten(self.after)
        return structure != structure_after or not all(map(_same, leaves, after))


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Traced):
        return before is after and not before.version
    return before is after or (type(before) is type(after) and before == after)


# What a step finds in places of its module, by their names.
Entries = Mapping[str, tuple[Place, Any]]


@contextmanager
def inhabited(
    contents: Contents,
    weights: Mapping[Dotted, torch.Tensor],
    entries: Entries,
    copy: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[dict[str, Seen]]:
    """The module with other parameters, with these values in its places, and copies of all others.

    Yields a table of all places, which is filled when the block ends.
    """
    named = {**contents.trained, **contents.frozen}
    tensors = {id(p): weights[name] for name, p in named.items()}
    modules = list(contents.net.modules())
    own = [
        (m._parameters, k, p) for m in modules for k, p in m._parameters.items() if p is not None
    ]
    held = {name: (place, place.value) for name, place in places_of(contents.net).items()}
    seen: dict[str, Seen] = {}

    def inside(leaf: Any) -> Any:
        """Places that share a tensor share its copy."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Traced):
            return leaf
        if id(leaf) not in tensors:
            tensors[id(leaf)] = copy(leaf)
        return tensors[id(leaf)]

    filled = {**held, **entries}
    before = {name: pytree.tree_map(inside, value) for name, (_, value) in filled.items()}
    try:
        for parameters, key, p in own:
            parameters[key] = tensors[id(p)]
        for name, (place, _) in filled.items():
            place.put(pytree.tree_map(lambda leaf: leaf, before[name]))  # containers are changed
        yield seen
        after = {n: p for n, (p, _) in filled.items()} | places_of(contents.net)
        after = {n: p for n, p in after.items() if p.key not in _OF_RNN}
        seen.update({n: Seen(p, before.get(n, ABSENT), p.value) for n, p in after.items()})
    finally:
        for parameters, key, p in own:
            parameters[key] = p
        for name, place in places_of(contents.net).items():
            place.put(held[name][1] if name in held else ABSENT)
        for place, value in held.values():  # what the step deleted
            place.put(value)
