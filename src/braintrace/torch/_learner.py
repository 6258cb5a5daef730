"""`braintrace.torch.online`: an online learner of a module of torch."""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import torch
from torch import nn

from .. import _online
from .._errors import (
    CompilationError,
    message,
    type_error,
    value_error,
)
from .._online import Carry, Online, RunInfo
from ..export import ExportedC
from ..program import PyTree
from ..report import Advice, CompilationReport
from ..rules import ETraceConfig, LearningRule, check_count
from ._arrays import (
    Array,
    array_of,
    arrays_of,
    check_device,
    copied,
    moved,
    on,
    own,
    places_of,
    shapes_of,
    tensors_of,
)
from ._checkpoint import dict_of, loaded
from ._checks import check_ends, check_optimizer
from ._loss import of_arrays
from ._module import Contents, Mode, check_call
from ._parameters import Parameters
from ._step import Inner, State, Step, Weights, inner_of, start_of
from ._tracing import tensors_in

_STATELESS = message(
    "{} has no state.",
    why="nothing that a step leaves in a buffer or an attribute is read by a later step",
    do="keep the state in an attribute, self.h = ...; or return it and pass the first one: "
    "online(net, rule, state, x) for forward(state, x) -> (state, out)",
)


def online(
    net: nn.Module,
    rule: str | LearningRule | ETraceConfig | Mapping[str, Any] = "d_rtrl",
    state: PyTree = None,
    *inputs: PyTree,
    **options: Any,
) -> Learner:
    """Make an online learner of a module that computes one step.

    Args:
        net: `net(state, *inputs) -> (state, out)`; with None for the state `net(*inputs) -> out`,
            a module that keeps its state inside. Its parameters that require a gradient learn.
        rule: as for `braintrace.online`.
        state: the state before the first step, a pytree of tensors.
        *inputs: inputs of one step; shapes and types count, and values only where the module
            makes states of its own in its first step.
        **options: those of `braintrace.online`: `window`, `strict`, `memory_limit`, options of the
            rule.

    Returns:
        The learner. Tensors go in and come out; gradients are in `p.grad` of the parameters.

    Raises:
        NotSupportedError: the module uses operators that have no function in JAX, random numbers,
            hooks, or a derivative that cannot be traced.
        CompilationError: nothing of it can be learned online; with `strict`, not exactly.

    Example:
        >>> import torch, braintrace.torch as bt
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell, self.out = torch.nn.GRUCell(3, 8), torch.nn.Linear(8, 2)
        ...     def forward(self, h, x):
        ...         h = self.cell(x, h)
        ...         return h, self.out(h)
        >>> net, xs, ys = Net(), torch.randn(10, 4, 3), torch.randn(10, 4, 2)
        >>> learner = bt.online(net, "d_rtrl", torch.zeros(4, 8), xs[0])
        >>> losses = learner.grad(torch.nn.functional.mse_loss)(xs, ys)
        >>> losses.shape, net.cell.weight_hh.grad.shape
        (torch.Size([10]), torch.Size([24, 8]))
    """
    if not isinstance(net, nn.Module):
        raise type_error(
            f"the net has type {type(net).__name__}.",
            why="the learner finds parameters and states in a torch.nn.Module",
            do="pass a module whose forward is one step: forward(state, x) -> (state, out); "
            "a function of arrays learns by braintrace.online",
        )
    net = getattr(net, "_orig_mod", net)  # before `torch.compile`, which computes the same
    step = Step(Contents.of(net), state is not None)
    check_call(net, state is not None, len(inputs))
    learner = Learner(net, _online.online(step, rule, **options), step)
    learner.reset(state, *inputs)
    return learner


@dataclass(eq=False, repr=False)
class Learner:
    """A module of torch that learns online, see `braintrace.torch.online`.

    It goes on from call to call: it holds the state and the traces, and `reset` starts a new
    sequence. The parameters stay those of the module, and are read at every call.
    """

    net: nn.Module
    online: Online
    _step: Step
    _carry: Carry = field(init=False)
    _given: PyTree = field(default=None, init=False)
    _inputs: tuple[PyTree, ...] = field(default=(), init=False)
    _mode: Mode = field(init=False)
    _traced_for: Hashable = field(default=None, init=False)
    _written: dict[str, list[tuple[torch.Tensor, int]]] = field(default_factory=dict, init=False)
    _parameters: Parameters = field(init=False)
    _unused: frozenset[str] = field(default=frozenset(), init=False)
    _lock: Any = field(default_factory=threading.RLock, init=False)

    def __repr__(self) -> str:
        return repr(self.online)

    @property
    def rule(self) -> LearningRule:
        """The rule."""
        return self.online.rule

    @property
    def report(self) -> CompilationReport:
        """The certificate: how every parameter is learned, by its name in the module."""
        report = self.online.report
        if (advise := report._advise) is not None:
            report._advise = functools.partial(_advised, self._device, advise)
        return report

    @property
    def memory(self) -> int:
        """Bytes of the traces."""
        return self.online.memory

    @property
    def last_run(self) -> RunInfo | None:
        """How the last sequence was run."""
        return self.online.last_run

    @property
    def state(self) -> PyTree:
        """A copy of the state after the last step, of the structure that the learner was given."""
        with self._on():
            return tensors_of(own(self._carry.state.given, places_of(self._carry)))

    # -------------------------------------------------------------------------------- calling

    def reset(self, state: PyTree = None, *inputs: PyTree) -> None:
        """Start a new sequence: the state before the first step, and traces of zero.

        States inside of the module start as they did when the learner was made; buffers that are
        saved with the module, such as running means, go on.

        Args:
            state: another initial state, default that of the last start.
            *inputs: inputs of one step, if they have other shapes than before.
        """
        with self._lock:
            self._step.contents = Contents.of(self.net)
        with self._on():
            state, inputs = self._arrays((state, inputs), copied)
            self._given = moved(self._given if state is None else state, self._device)
            self._inputs = inputs or moved(self._inputs, self._device)
            self._start()

    def step(self, *inputs: PyTree, **extra: PyTree) -> PyTree:
        """One step; returns its output.

        Args:
            *inputs: inputs of the step.
            **extra: what the rule takes with a call, e.g. a modulator.
        """
        with self._on():
            arrays = self._arrays((inputs, extra))
            weights = self._weights()
            carry, out = self.online(weights, self._carry, *arrays[0], **arrays[1])
            return self._returned(carry, out, (weights, arrays))

    def scan(self, xs: PyTree, **extra: PyTree) -> PyTree:
        """Many steps without a gradient; returns their outputs.

        Args:
            xs: the input of all steps, with a leading axis of time; a tuple if there are several.
            **extra: what the rule takes with a call, with a leading axis of time.
        """
        with self._on():
            arrays = self._arrays((self._sequence(xs), extra))
            weights = self._weights()
            carry, outs = self.online.scan(weights, self._carry, arrays[0], **arrays[1])
            return self._returned(carry, outs, (weights, arrays))

    def grad(
        self,
        loss: Callable[..., Any],
        *,
        has_aux: bool = False,
        **options: Any,
    ) -> Callable[..., PyTree]:
        """What fills `p.grad`: the gradient of the summed losses of a sequence, block by block.

        Keep the function that is returned: it is compiled once.

        Args:
            loss: `loss(out, *targets)`, the loss of one step, a function of torch or of JAX; or
                `(loss, aux)` with `has_aux`.
            has_aux: whether `loss` returns a pair.
            **options: `block_size`, `memory_budget`, `keep_traces`, `progress`, as for `grad` of
                `braintrace.online`; without `keep_traces` the next call is another sequence's.

        Returns:
            `f(xs, *targets, mask=None, **extra)`, which adds to `p.grad` of every parameter, as
            `backward()` does, and returns the losses of the steps, or `(losses, aux)`. `xs` is as
            for `scan`, targets have a leading axis of time, `mask` (T,) weighs the losses.
        """
        gradient = self.online.grad(of_arrays(loss), has_aux=has_aux, **options)

        def of_sequence(
            xs: PyTree, *targets: PyTree, mask: torch.Tensor | None = None, **extra: PyTree
        ) -> PyTree:
            with self._on():
                arrays = self._arrays((self._sequence(xs), targets, mask, extra))
                weights = self._weights()
                xs, targets, mask, extra = arrays
                grads, (carry, *results) = gradient(
                    weights, self._carry, xs, *targets, mask=mask, **extra
                )
                done = self._returned(carry, (grads.trained, results), (weights, arrays))
                self._parameters.add(done[0], self._unused)
            return tuple(done[1]) if has_aux else done[1][0]

        return of_sequence

    def train(
        self,
        loss: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        update_every: int = 1,
        *,
        block_size: int | None = None,
        memory_budget: int | None = None,
    ) -> Callable[..., torch.Tensor]:
        """Learn while the sequence runs: the optimizer takes a step every few steps.

        Keep the function that is returned: it is compiled once.

        Args:
            loss: `loss(out, *targets)`, the loss of one step, a function of torch or of JAX.
            optimizer: one of `torch.optim`, of the parameters of the module.
            update_every: steps between two updates; the gradient is that of their summed losses.
            block_size: steps per block of the gradient of an update.
            memory_budget: bytes that the values of one block may take, if it has no size.

        Returns:
            `f(xs, *targets, mask=None, **extra)`, which returns the losses of the steps.
        """
        every = check_count("update_every", update_every, "steps")
        check_optimizer(optimizer, self._step.contents)
        gradient = self.grad(loss, block_size=block_size, memory_budget=memory_budget)

        def train(
            xs: PyTree, *targets: PyTree, mask: torch.Tensor | None = None, **extra: PyTree
        ) -> torch.Tensor:
            length = len(jax.tree.leaves(xs)[0])
            losses = []
            for start in range(0, length, every):
                steps = operator.itemgetter(slice(start, start + every))
                part = jax.tree.map(steps, (xs, targets, mask, extra))
                optimizer.zero_grad()
                losses.append(gradient(part[0], *part[1], mask=part[2], **part[3]))
                optimizer.step()
            return torch.cat(losses)

        return train

    # ------------------------------------------------------------------- saving and exporting

    def state_dict(self) -> dict[str, Any]:
        """Everything that the learner goes on from: the state, the traces, a count of steps.

        Copies, under names; `torch.save` it beside `net.state_dict()` and that of the optimizer.
        """
        with self._on():
            return dict_of(self._carry, self.online)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, in a learner of the same net and rule.

        Raises:
            ValueError: names, shapes, types or the rule differ; all differences, and nothing is
                changed.
        """
        with self._on():
            self._carry = loaded(state, self._carry, self.online, self._device)
            self._write(self._carry.state.inside)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise type_error(
            "a learner of torch cannot be pickled or copied.",
            why="it holds compiled programs, and the traces belong to this module",
            do="torch.save(learner.state_dict(), path) has all its numbers; make another learner "
            "of a copy of the net, and load_state_dict into it",
        )

    def export_c(
        self,
        x: PyTree,
        *targets: PyTree,
        loss: Callable[..., Any],
        optimizer: Any,
        path: str | os.PathLike,
        **options: Any,
    ) -> ExportedC:
        """Write the learner as a folder of C: network, traces, gradient and update.

        Parameters, state and traces are those of now; `reset` first for a new sequence.

        Args:
            x: an example of the input of one step; a tuple if there are several.
            *targets: examples of the targets of one step.
            loss: `loss(out, *targets)`, the loss of one step, a function of torch or of JAX.
            optimizer: an optax transformation, `optax.adam(1e-3)` for `torch.optim.Adam(p, 1e-3)`.
            path: the folder.
            **options: `extra`, `name`, `initial`, as for `export_c` of `braintrace.online`.

        Returns:
            What was written.
        """
        if isinstance(optimizer, torch.optim.Optimizer):
            raise type_error(
                f"the optimizer is {type(optimizer).__name__} of torch.",
                why="its step is Python on tensors, and C needs the update as a function of arrays",
                do="pass the same of optax: optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)",
            )
        with self._on():
            arrays, extra = self._arrays(((x, *targets), options.pop("extra", None)))
            given = self._weights(), self._carry, *arrays
            how = {"optimizer": optimizer, "path": path, "extra": extra, **options}
            return self.online.export_c(*given, loss=of_arrays(loss), **how)

    # --------------------------------------------------------------------------------- arrays

    @property
    def _device(self) -> torch.device:
        return self._step.contents.device

    @contextmanager
    def _on(self) -> Iterator[None]:
        """One call at a time, on the device of the module."""
        with self._lock, on(self._device):
            yield

    def _sequence(self, xs: PyTree) -> PyTree:
        """The inputs of all steps, which are no list of tensors, unless those of a step are one."""
        if isinstance(xs, list) and not any(isinstance(x, list) for x in self._inputs):
            raise type_error(
                f"xs is a list of {len(xs)}.",
                why="a sequence is one tensor with a leading axis of time; a list would be as many "
                "inputs of a step",
                do="pass torch.stack(xs)",
            )
        return xs

    def _arrays(self, tree: PyTree, convert: Callable[..., Array] = array_of) -> PyTree:
        """What a call is given, as arrays."""
        check_device(tree, self._device)
        check_ends(tree)
        return arrays_of(tree, convert)

    def _start(self) -> None:
        """The state of a new sequence; the module is traced again if it has changed."""
        step = self._step
        self._parameters = Parameters(step.contents)
        shapes = shapes_of((self._given, self._inputs))
        mode = Mode.of(self.net, step.inner)
        is_new = self._traced_for != (mode.value, shapes)
        if is_new:
            weights = self._parameters.weights(mode.value)
            step.inner = inner_of(step, weights, self._given, self._inputs)
        self._written = {}
        state = State(self._given, start_of(step.inner))
        self._write(state.inside)
        self._mode = Mode.of(self.net, step.inner)
        self._traced_for = (self._mode.value, shapes)
        weights = self._parameters.weights(self._mode.value)
        if not jax.tree.leaves(state):
            raise CompilationError(_STATELESS.format(type(self.net).__name__))
        self._carry = self.online.init(weights, own(state, places_of(state)), *self._inputs)
        if is_new:
            reports = self.online.report.parameters.values()
            self._unused = frozenset(str(p.path[-1]) for p in reports if p.how == "none")

    def _weights(self) -> Weights:
        """The parameters of a call, of a module that is as it was at the start."""
        self._mode.check()
        for name, tensors in self._written.items():
            held = tensors_in(self._step.inner[name].place.value)
            if [(id(t), t._version) for t in held] != [(id(t), v) for t, v in tensors]:
                raise value_error(
                    f"the state {name} inside of the module has changed since the last call.",
                    why="the traces of the learner belong to the state that it left",
                    do="learner.reset() starts a new sequence; run the module by itself on a copy",
                )
        return self._parameters.weights(self._mode.value)

    def _returned(self, carry: Carry, results: PyTree, given: PyTree) -> PyTree:
        """Keep the carry; the results as tensors, of memory that nobody else writes into.

        A tensor that was given may be changed in place after the call, so the call ends first.
        """
        jax.block_until_ready((carry, results))
        taken = places_of(given)
        self._carry = own(carry, taken)
        self._write(self._carry.state.inside)
        return tensors_of(results, taken | places_of(self._carry))

    def _write(self, inside: dict[Any, Array]) -> None:
        """Put the states inside of the module where it keeps them."""
        for name, inner in self._step.inner.items():
            if inner.state:
                arrays = [inside[n] for n in inner.names]
                tensors = tensors_of(arrays, places_of(arrays))
                inner.place.put(_kept(inner, tensors))
                self._written[name] = [(t, t._version) for t in tensors_in(inner.place.value)]


def _advised(device: torch.device, advise: Callable[[], Advice]) -> Advice:
    """Advice analyses the step again, with its types."""
    with on(device):
        return advise()


def _kept(inner: Inner, tensors: list[torch.Tensor]) -> PyTree:
    """The value of a place: a buffer that is saved with the module is the same tensor."""
    if not inner.place.persistent:
        return inner.filled(tensors)
    buffer = inner.place.value
    with torch.no_grad():
        return buffer.copy_(tensors[0])
