"""Modules of flax's nnx that keep their states as `Variable`s, as online learners."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import CompilationError, dotted, message, type_error
from .._online import Carry, Online, Untrained, online
from ..checkpoint import (
    OPTIMIZER,
    STATES,
    WEIGHTS,
    Checkpoint,
    File,
    check_passed,
    of_rule,
    save_values,
    tree_of_values,
    values_of_tree,
)
from ..program import PyTree, is_traced, prune, trace
from ..report import CompilationReport

_EXPLICIT = (
    "pass a cell with an explicit carry to braintrace.online: with structure, params = "
    "nnx.split(cell), the step is lambda params, carry, x: nnx.merge(structure, params)(carry, x)"
)


def is_nnx(model: object) -> bool:
    """Whether something is a module of nnx; flax is not imported for it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


class _Step(NamedTuple):
    """The step of a module of one structure, and the paths of its states and of all it writes."""

    net: Online
    hidden: frozenset[tuple]
    written: frozenset[tuple]


class ModuleLearner:
    """A module of nnx as an online learner, see `braintrace.compile`.

    Its methods are those of `braintrace.online` without parameters and carry. `nnx.Param`s are the
    parameters; a floating `Variable` of any other kind that a call reads and writes is a state to
    learn through; all others (counters, random keys, statistics) are passed from step to step.
    Calls write to the variables of the module; the traces are the learner's.
    """

    def __init__(
        self, module: Any, rule: Any, inputs: tuple[PyTree, ...], options: dict[str, Any]
    ) -> None:
        from flax import nnx

        self._nnx: Any = nnx
        self.module = module
        self._rule, self._options = rule, options
        self._steps: dict[Any, _Step] = {}
        shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        self._inputs = jax.tree.map(shape, inputs)
        _check_arguments(module, inputs)
        written = self._step().written
        kept = (nnx.BatchStat, nnx.RngState)
        first = lambda path, v: path in written and not isinstance(v, kept)
        self._first = jax.tree.map(lambda a: a, nnx.state(module, first))  # a copy
        self.forget_past()

    def __repr__(self) -> str:
        module = type(self.module).__name__
        return f"{self.online.rule.name} of {module}\n  {self.report.picture.summary}"

    # ------------------------------------------------------------------------------ the module

    def _variables(self) -> tuple[Any, Any]:
        """The parameters, and all other variables."""
        return self._nnx.split(self.module, self._nnx.Param, ...)[1:]

    def _step(self) -> _Step:
        """The step of the module with its present structure: `module.eval()` is another one."""
        nnx = self._nnx
        structure = nnx.graphdef(self.module)
        if structure not in self._steps:
            hidden, written = self._memory(structure)

            def step(params: PyTree, state: PyTree, *inputs: PyTree) -> tuple[PyTree, PyTree]:
                module = nnx.merge(structure, params, _bare(state))
                out = module(*inputs)
                return self._marked(nnx.state(module, nnx.Not(nnx.Param)), hidden), out

            step.__name__ = type(self.module).__name__
            net = online(step, self._rule, **self._options)
            params, variables = self._variables()
            net.init(params, self._marked(variables, hidden), *self._inputs)
            self._steps[structure] = _Step(net, hidden, written)
        return self._steps[structure]

    def _memory(self, structure: Any) -> tuple[frozenset[tuple], frozenset[tuple]]:
        """The paths of floating variables that a call reads and writes, and of all written ones."""
        nnx, before = self._nnx, self._variables()
        leaves, tree = jax.tree.flatten((before, self._inputs))

        def call(*leaves: Any) -> list[Any]:
            states, inputs = jax.tree.unflatten(tree, leaves)
            module = nnx.merge(structure, *states)
            out = module(*inputs)
            after = nnx.split(module, nnx.Param, ...)[1:]
            if nnx.graphdef(module) != structure:
                raise CompilationError(
                    message(
                        f"a call of {type(module).__name__} changes its structure.",
                        why="states are the variables that a module has before the first step, and "
                        "its other attributes are constants of the compiled step",
                        do="make all variables in __init__, and keep in them what changes",
                    )
                )
            return [*jax.tree.leaves(after), *jax.tree.leaves(out)]

        program = prune(trace(call, *leaves)[0])
        paths = [
            [path for path, v in nnx.to_flat_state(state) for _ in jax.tree.leaves(v)]
            for state in before
        ]
        changed = lambda i: program.outputs[i] is not program.inputs[i]
        read = {a for eqn in program.equations for a in eqn.inputs}
        read |= {o for i, o in enumerate(program.outputs) if o is not program.inputs[i]}
        bad = [path for i, path in enumerate(paths[0]) if changed(i)]
        if bad:
            raise CompilationError(
                message(
                    f"a call writes the parameter {', '.join(map(dotted, bad))}.",
                    why="an nnx.Param is trained, and constant while a sequence runs",
                    do="keep what changes from step to step in an nnx.Variable of another kind",
                )
            )
        written = [(path, i) for i, path in enumerate(paths[1], len(paths[0])) if changed(i)]
        entries = [(path, program.inputs[i]) for path, i in written]
        hidden = {path for path, v in entries if v.is_inexact and v in read}
        if not hidden:
            name = type(self.module).__name__
            raise CompilationError(
                message(
                    f"a call of {name} reads and writes no floating variable.",
                    why="online learning follows states from step to step, and an nnx module has "
                    "them as Variables (other than Param) that __call__ writes",
                    do=f"keep the recurrent arrays in Variables; {_EXPLICIT}",
                )
            )
        return frozenset(hidden), frozenset(path for path, _ in written)

    def _marked(self, state: Any, hidden: frozenset[tuple]) -> Any:
        """The variables, those that are not learned through marked."""
        nnx = self._nnx
        flat = nnx.to_flat_state(state)
        return nnx.from_flat_state(
            [(path, v if path in hidden else Untrained(v)) for path, v in flat]
        )

    def _now(self) -> tuple[Online, PyTree, Carry]:
        """The learner for the module as it is, with its parameters and the carry."""
        step = self._step()
        params, variables = self._variables()
        state = self._marked(variables, step.hidden)
        return step.net, params, Carry(state, self._traces, self._count)

    def _write(self, carry: Carry) -> None:
        if any(map(is_traced, jax.tree.leaves(carry))):
            raise type_error(
                "a learner of an nnx module was called inside of a transformation of JAX.",
                why="it keeps traces between calls, which would leave the transformation",
                do="call it outside: its calls are compiled; or use braintrace.online, whose calls "
                "are functions",
            )
        self._traces, self._count = carry.traces, carry.steps
        self._nnx.update(self.module, _bare(carry.state))

    # --------------------------------------------------------------------------------- public

    @property
    def online(self) -> Online:
        """The learner as functions of parameters and carry."""
        return self._step().net

    @property
    def report(self) -> CompilationReport:
        """The certificate: how every parameter is learned."""
        return self.online.report

    @property
    def memory(self) -> int:
        """Bytes of the traces."""
        return self.online.memory

    @property
    def carry(self) -> Carry:
        """The states with their traces, a pytree: what is saved, and assigned to go on from it."""
        return jax.tree.map(lambda a: a, self._now()[2])  # a copy

    @carry.setter
    def carry(self, carry: Carry) -> None:
        self._write(carry)

    def to_pytree(self) -> dict[str, Any]:
        """Variables and traces as nested dicts of arrays, see `ETraceAlgorithm.to_pytree`.

        The optimizer is not among them: `nnx.state(optimizer)` is its own tree.
        """
        return tree_of_values(self._values())

    def from_pytree(self, tree: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Put back what `to_pytree` returned, see `ETraceAlgorithm.from_pytree`."""
        self._put(values_of_tree(tree, self._values(), weights_only))

    def _values(self) -> dict[tuple[str, ...], Any]:
        params, variables = self._variables()
        module = {(WEIGHTS,): params, (STATES, "module"): variables}
        return {**module, (STATES, "traces"): self._traces, (STATES, "steps"): self._count}

    def _put(self, values: Mapping[tuple[str, ...], Any]) -> None:
        """Values of all these names, or of the weights alone."""
        self._nnx.update(self.module, values[(WEIGHTS,)])
        if (STATES, "module") in values:
            self._nnx.update(self.module, values[STATES, "module"])
            self._traces, self._count = values[STATES, "traces"], values[STATES, "steps"]

    def forget_past(self) -> None:
        """Zero the traces, so that what comes counts as a new sequence."""
        step = self._step()
        params, variables = self._variables()
        self._write(step.net.init(params, self._marked(variables, step.hidden), *self._inputs))

    def reset(self) -> None:
        """Give the states their values of `compile`, and zero the traces.

        Statistics (`nnx.BatchStat`) and random keys go on.
        """
        self._nnx.update(self.module, self._first)
        self.forget_past()

    def save(
        self,
        path: str | os.PathLike,
        *,
        optimizer: Any = None,
        step: int | None = None,
        extra: PyTree = None,
    ) -> None:
        """Write parameters, variables, traces and optimizer into one file, replaced at once.

        Args:
            path: the file; its folder is created if there is none.
            optimizer: an `nnx.Optimizer` of the module; None for none.
            step: how far training has come.
            extra: anything of dicts, lists, tuples, arrays, numbers, strings and None.
        """
        values = {name: (tree, "tree") for name, tree in self._saved(optimizer).items()}
        kind = None if optimizer is None else "tree"
        save_values(path, self._identity(), kind, values, step, extra)

    def load(self, path: str | os.PathLike, *, optimizer: Any = None) -> Checkpoint:
        """Put back what `save` wrote, so that training goes on as if it had never stopped.

        A file that is refused changes nothing.

        Args:
            path: the file.
            optimizer: an `nnx.Optimizer` of the module, if one was saved; False leaves the one in
                the file alone.

        Returns:
            A `Checkpoint`: step, extra, and the optimizer.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint, is damaged, or belongs to another module, rule or
                optimizer; all differences are listed.
        """
        file = File.read(path)
        if optimizer is not False:
            check_passed(path, file.header["optimizer"], optimizer is not None)
        optimizer = None if optimizer is False else optimizer
        values = file.values(self._identity(), self._saved(optimizer), optimizer is not None)
        extra = file.extra()
        self._put(values)
        if optimizer is not None:
            self._nnx.update(optimizer, values[OPTIMIZER,])
        return file.checkpoint(extra, optimizer)

    def _saved(self, optimizer: Any) -> dict[tuple[str, ...], PyTree]:
        """All that training goes on from, by name."""
        if optimizer is None:
            return self._values()
        self._check_optimizer(optimizer)
        return {**self._values(), (OPTIMIZER,): self._nnx.state(optimizer)}

    def _identity(self) -> dict[str, Any]:
        net = self.online
        named = {"rule": net.rule.name, "window": net.window, "marked_only": net.marked_only}
        return {**named, **of_rule(net.rule.record, net.rule.config)}

    def __call__(self, *inputs: PyTree, **extra: PyTree) -> PyTree:
        """One step; returns the output of the module."""
        net, params, carry = self._now()
        carry, out = net(params, carry, *inputs, **extra)
        self._write(carry)
        return out

    def scan(self, xs: PyTree, **extra: PyTree) -> PyTree:
        """Many steps; `xs` has a leading axis of time, a tuple if there are several inputs."""
        net, params, carry = self._now()
        carry, outs = net.scan(params, carry, xs, **extra)
        self._write(carry)
        return outs

    def grad(self, loss: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
        """The gradient of the summed losses of a sequence, as `nnx.Optimizer.update` takes it.

        Args:
            loss: `loss(out, *targets)`, the loss of one step.
            **options: those of `Online.grad`.

        Returns:
            `f(xs, *targets, mask=None, **extra)`, which returns `(grads, losses)`, and `aux` with
            `has_aux`. Keep it: it is compiled once.
        """

        runs: dict[Online, Callable[..., PyTree]] = {}

        def gradient(xs: PyTree, *targets: PyTree, mask: PyTree = None, **extra: PyTree) -> PyTree:
            net, params, carry = self._now()
            run = runs.setdefault(net, net.grad(loss, **options))
            grads, (carry, *results) = run(params, carry, xs, *targets, mask=mask, **extra)
            self._write(carry)
            return grads, *results

        return gradient

    def train(
        self, loss: Callable[..., PyTree], optimizer: Any, update_every: int = 1, **options: Any
    ) -> Callable[..., PyTree]:
        """Learn while the sequence runs: update the parameters every few steps.

        Args:
            loss: `loss(out, *targets)`, the loss of one step.
            optimizer: an `nnx.Optimizer` of the module.
            update_every: steps between two updates.
            **options: those of `Online.train`.

        Returns:
            `f(xs, *targets, mask=None, **extra)`, which returns the losses, and `aux` with
            `has_aux`. Keep it: it is compiled once.
        """
        nnx = self._nnx
        self._check_optimizer(optimizer)
        runs: dict[Online, Callable[..., PyTree]] = {}

        def train(xs: PyTree, *targets: PyTree, mask: PyTree = None, **extra: PyTree) -> PyTree:
            net, params, carry = self._now()
            updates = _Updates(nnx, self.module, optimizer)
            run = runs.setdefault(net, net.train(loss, updates, update_every, **options))
            own = nnx.state(optimizer)
            params, own, carry, *results = run(params, own, carry, xs, *targets, mask=mask, **extra)
            self._write(carry)
            nnx.update(self.module, params)
            nnx.update(optimizer, own)
            return results[0] if len(results) == 1 else tuple(results)

        return train

    def _check_optimizer(self, optimizer: Any) -> None:
        if not isinstance(optimizer, self._nnx.Optimizer):
            raise type_error(
                f"the optimizer has type {type(optimizer).__name__}.",
                why="it holds the state of an optimizer for the parameters of the module",
                do="pass nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)",
            )


class _Updates:
    """An optimizer of nnx as a transformation of optax: its state is its variables."""

    def __init__(self, nnx: Any, module: Any, optimizer: Any):
        self._nnx = nnx
        self._module, _, variables = nnx.split(module, nnx.Param, ...)
        self._others = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), variables)
        self._optimizer = nnx.graphdef(optimizer)

    def update(self, grads: PyTree, own: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        nnx = self._nnx
        copy = jax.tree.map(lambda a: a, params)  # a module writes to what it was merged from
        module = nnx.merge(self._module, copy, self._others)
        optimizer = nnx.merge(self._optimizer, own)
        optimizer.update(module, grads)
        change = jax.tree.map(lambda new, old: new - old, nnx.state(module, nnx.Param), params)
        return change, nnx.state(optimizer)


def _bare(state: Any) -> Any:
    marked = lambda n: isinstance(n, Untrained)
    return jax.tree.map(lambda n: n.value if marked(n) else n, state, is_leaf=marked)


def _check_arguments(module: Any, inputs: tuple[PyTree, ...]) -> None:
    try:
        inspect.signature(module).bind(*inputs)
    except TypeError as error:
        raise type_error(
            f"{type(module).__name__} is called with {len(inputs)} input(s): {error}.",
            why="braintrace.compile(module, rule, *inputs) calls module(*inputs), whose states are "
            "Variables of the module",
            do=f"pass an example of every argument; {_EXPLICIT}",
        ) from None
