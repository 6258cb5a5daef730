"""Modules of flax's nnx that keep their states as `Variable`s, as online learners."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import CompilationError, check_takes, dotted, message, type_error
from .._online import Carry, Online, Untrained, online
from ..checkpoint import (
    STATES,
    WEIGHTS,
    CheckpointMixin,
    Named,
    named,
    renewed,
    swap,
)
from ..program import PyTree, is_traced, prune, trace
from ..report import CompilationReport
from ..rules import rule_identity
from ._alone import OneThread, alone

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


class ModuleLearner(CheckpointMixin):
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
        self.one_thread = OneThread()
        self.module = module
        self._rule, self._options = rule, options
        self._steps: dict[Any, _Step] = {}
        shape = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        self._inputs = jax.tree.map(shape, inputs)
        check_takes(
            module,
            ["an input"] * len(inputs),
            "braintrace.compile(module, rule, *inputs) calls module(*inputs), whose states are "
            "Variables of the module",
            f"pass an example of every argument; {_EXPLICIT}",
            type(module).__name__,
        )
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

    @alone
    def named_arrays(self) -> Named:
        """Parameters, variables, traces and the count of steps, by name."""
        return {k: v for name, tree in self._trees().items() for k, v in named(name, tree).items()}

    @alone
    def assign(self, values: Named) -> None:
        """Give all of these, or the parameters alone, other values: all of them or none."""
        old = self._trees()
        weights_only = set(values) == set(named(WEIGHTS, old[WEIGHTS]))
        taken = {WEIGHTS: old[WEIGHTS]} if weights_only else old
        new = {**old, **{name: renewed(name, tree, values) for name, tree in taken.items()}}
        swap([(lambda: self._put(new), lambda: self._put(old))])

    def identity(self) -> dict[str, Any]:
        """The rule, and how it is run."""
        net = self.online
        own = {"window": net.window, "marked_only": net.marked_only}
        return {**rule_identity(net.rule, net.rule.record), **own}

    def _trees(self) -> dict[str, Any]:
        params, variables = jax.tree.map(lambda a: a, self._variables())  # a copy
        carry = {f"{STATES}/traces": self._traces, f"{STATES}/steps": self._count}
        return {WEIGHTS: params, f"{STATES}/module": variables, **carry}

    def _put(self, trees: Mapping[str, Any]) -> None:
        self._nnx.update(self.module, trees[WEIGHTS])
        self._nnx.update(self.module, trees[f"{STATES}/module"])
        self._traces, self._count = trees[f"{STATES}/traces"], trees[f"{STATES}/steps"]

    @alone
    def forget_past(self) -> None:
        """Zero the traces, so that what comes counts as a new sequence."""
        step = self._step()
        params, variables = self._variables()
        self._write(step.net.init(params, self._marked(variables, step.hidden), *self._inputs))

    @alone
    def reset(self) -> None:
        """Give the states their values of `compile`, and zero the traces.

        Statistics (`nnx.BatchStat`) and random keys go on.
        """
        self._nnx.update(self.module, self._first)
        self.forget_past()

    @alone
    def __call__(self, *inputs: PyTree, **extra: PyTree) -> PyTree:
        """One step; returns the output of the module."""
        net, params, carry = self._now()
        carry, out = net(params, carry, *inputs, **extra)
        self._write(carry)
        return out

    @alone
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
            with self.one_thread:
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
            `f(xs, *targets, mask=None, **extra)`, which returns the losses, `aux` with `has_aux`,
            and a recording with `record`. Keep it: it is compiled once.
        """
        nnx = self._nnx
        self.check_optimizer(optimizer)
        runs: dict[Online, Callable[..., PyTree]] = {}

        def train(xs: PyTree, *targets: PyTree, mask: PyTree = None, **extra: PyTree) -> PyTree:
            with self.one_thread:
                net, params, carry = self._now()
                updates = _Updates(nnx, self.module, optimizer)
                run = runs.setdefault(net, net.train(loss, updates, update_every, **options))
                own, more = nnx.state(optimizer), dict(mask=mask, **extra)
                params, own, carry, *results = run(params, own, carry, xs, *targets, **more)
                self._write(carry)
                nnx.update(self.module, params)
                nnx.update(optimizer, own)
                return results[0] if len(results) == 1 else tuple(results)

        return train

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse what is no optimizer of nnx."""
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
