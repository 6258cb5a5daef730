"""`braintrace.online`: an online learner from a plain function of arrays."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import dotted, message, refuse_pytorch, type_error, value_error
from ..engine import (
    Engine,
    Placement,
    check_engine,
    check_placement,
    check_surroundings,
    put,
)
from ..export import ExportedC, ExportedProgram, OneUpdate, write_c, write_program
from ..graph import ControlFlowPolicy, check_policy
from ..program import PyTree
from ..report import CompilationReport
from ..rules import (
    ETraceConfig,
    LearningRule,
    check_choice,
    check_count,
    check_limit,
    d_rtrl,
    rule_value,
)
from ._auto import AUTO, Wanted, automatic
from ._blocks import nbytes
from ._calls import Call
from ._checks import (
    check_exact,
    check_mask,
    check_moving,
    check_shared,
    check_traces,
    checked_loss,
    length_of,
)
from ._export import one_update, optimizing_tree
from ._finite import NONFINITE, LossWatch, check_stop, raise_stopped
from ._fork import check_process
from ._loop import (
    Options,
    Position,
    RunInfo,
    Stream,
    Updates,
    Weights,
)
from ._on_update import OnUpdate, check_on_update
from ._outside import Outside
from ._plan import Plan, Signature, make_plan, name_of
from ._record import Record, recorder_of
from ._sequence import Arrays, ended
from ._start import Start, Started, is_function, started
from ._states import States, check_same_state
from ._tree import is_weak, shape_of, split, strong

Array = jax.Array
_FAILED_UPDATE = message(
    "the optimizer failed.",
    why="it raised the error above; its state must be that of this optimizer and these parameters",
    do="pass opt=optimizer.init(params) to the first call, and what a call returns to the next; of "
    "an equinox module, optimizer.init(eqx.filter(module, eqx.is_inexact_array))",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Carry:
    """What goes from step to step: the user's state, the traces, and a count of steps.

    An ordinary pytree: it can be jitted, mapped, sharded, saved and donated. `start` is there if
    the initial state is learned. A state of one's own goes in by `replace`.
    """

    state: PyTree
    traces: list[PyTree]
    steps: Any
    start: Start | None = None

    def replace(self, *, state: PyTree, traces: str) -> Carry:
        """A carry with another state, and what becomes of the traces of the old one.

        Args:
            state: the new state, of the structure, shapes and types of the old one.
            traces: 'reset' for a new sequence, as after `init`; 'keep' where the new state depends
                on the parameters as the old one did, e.g. after a clip that changed nothing.

        Example:
            >>> import jax.numpy as jnp, braintrace
            >>> step = lambda w, h, x: (0.9 * h + x @ w, h)
            >>> net = braintrace.online(step, 'd_rtrl')
            >>> carry = net.init(jnp.ones((3, 4)), jnp.zeros(4), jnp.ones(3))
            >>> carry = carry.replace(state=jnp.ones(4), traces='reset')
        """
        if traces not in ("reset", "keep"):
            raise value_error(
                f"traces={traces!r}.",
                why="the traces are derivatives of the old state by the parameters",
                do="'reset' sets them to zero, 'keep' leaves them as they are",
            )
        state = jax.tree.map(strong, state)
        check_same_state(self.state, state)
        start = self.start and dataclasses.replace(self.start, first=np.zeros((), bool))
        if traces == "reset":
            zeros = jax.tree.map(jnp.zeros_like, self.traces)
            return Carry(state, zeros, np.zeros((), np.int32), start)
        steps = np.array(self.steps) if isinstance(self.steps, np.ndarray) else self.steps + 0
        return Carry(state, self.traces, steps, start)


def online(
    step: Callable[..., PyTree],
    rule: str | LearningRule | ETraceConfig | Mapping[str, Any] = "d_rtrl",
    *,
    window: int | None = None,
    strict: bool = False,
    memory_limit: int | None = None,
    control_flow: ControlFlowPolicy | None = None,
    marked_only: bool = False,
    engine: str = "auto",
    mesh: jax.sharding.Mesh | None = None,
    batch: str | None = None,
    units: str | None = None,
    **options: Any,
) -> Online:
    """Make an online learner of a step function.

    Args:
        step: `step(params, state, *inputs) -> (state, out)`, one step of a network. `params` and
            `state` are any pytrees; leaves that are not floating arrays are passed through.
        rule: a rule by name ('d_rtrl', 'pp_prop', ...), as a value (`braintrace.rules.d_rtrl()`)
            or by its coordinates; or a dict of rules for names of parameters as the report prints
            them, `{'cell': 'd_rtrl', 'gru.*': ('snap', {'n': 2}), '*': 'no_trace'}`, where
            `('d_rtrl', {'window': 8})` takes windows. With 'auto' `init` chooses: the fastest exact
            assignment that fits in `memory='2GB'` for sequences of `length` steps, else the longest
            windows that do; `choose` measures on data.
        window: steps in which nothing is cut, for `scan`, `grad` and `train`; None takes single
            steps, with recurrent entries cut.
        strict: refuse a step with a parameter whose gradient is not exact, naming all of them.
        memory_limit: bytes that the traces may take; default the rule's own limit.
        control_flow: which control flow around operators stays closed, none by default.
        marked_only: follow only weights that go through an operator of braintrace; by default
            plain JAX (`x @ w`, `h * a`, a convolution, a row of a table) is recognised.
        engine: what runs loops over time: 'auto' takes one kernel where units do not meet in a
            step and the device has it, 'scan' always `lax.scan`, 'kernel' the kernel on every
            device, interpreted where it cannot be compiled; `last_run` says which, and why.
        mesh: devices to spread a learner over: states, traces, parameters and inputs are placed on
            it by the operators of the step; what the user has spread over devices stays there.
        batch: the axis of the mesh that samples are split over.
        units: the axis of the mesh that units are split over: the columns of weights, and the
            synapses of sparse ones.
        **options: arguments of a rule named by a string, e.g. `decay_or_rank=0.9`.

    Returns:
        The learner: `init`, a call for one step, `scan`, `grad`, `train`, `report`, `memory`.

    Raises:
        ValueError: unknown rule, or options that do not fit.
        TypeError: `step` is not callable, or `rule` is no rule.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> def step(params, h, x):
        ...     h = jnp.tanh(0.9 * h + braintrace.matmul(x, params))
        ...     return h, h
        >>> net = braintrace.online(step, 'd_rtrl')
        >>> params, xs = jnp.ones((3, 4)), jnp.ones((10, 3))
        >>> carry = net.init(params, jnp.zeros(4), xs[0])
        >>> grads, (carry, losses) = net.grad(lambda out: (out**2).sum())(params, carry, xs)
        >>> grads.shape, losses.shape
        ((3, 4), (10,))
    """
    if isinstance(step, type):
        raise type_error(
            f"the step is the class {step.__name__}.",
            why="it is a function step(params, state, *inputs) -> (state, out); a call of a class "
            "makes an instance",
            do=f"make the instance the parameters: cell = {step.__name__}(...), "
            "online(lambda cell, h, x: (h := cell(x, h), h)), and init(cell, h, x)",
        )
    refuse_pytorch(step, "step")
    if not callable(step):
        raise type_error(
            f"the step has type {type(step).__name__}.",
            why="it is a function step(params, state, *inputs) -> (state, out)",
            do="pass a function; a lambda may adapt another signature",
        )
    window = None if window is None else check_count("window", window, "steps")
    wanted = None
    if isinstance(rule, str) and rule.strip().lower() == AUTO:
        if window is not None:
            raise value_error(
                f"'auto' with window={window}.",
                why="it chooses windows by itself",
                do="leave out window, or name a rule",
            )
        rule, options, wanted = d_rtrl(), {}, Wanted.of(options)
    value = rule_value(rule, options, window)
    if value.window is not None and window not in (None, value.window) and not value.shares:
        raise value_error(
            f"{value} with window={window}.",
            why="the rule has a window of its own",
            do=f"leave it out, or pass the rule by name: online(step, {value.name!r}, window=8)",
        )
    window = value.window if value.shares or value.window else window
    if window is not None and not value.shares and value.no_windows is not None:
        raise value_error(
            f"{value.name} has no windows (window={window}).",
            why=f"{value.no_windows}; inside a window reverse mode is the only signal",
            do="leave out window",
        )
    limit = check_limit(memory_limit)
    policy = check_policy(control_flow)
    how = check_engine(engine)
    place = check_placement(mesh, batch, units)
    more = (limit, policy, marked_only, how, place)
    return Online(step, value, window, strict, *more, wanted=wanted)


@dataclass(eq=False, repr=False)
class Online:
    """A step function as an online learner, see `braintrace.online`.

    It owns no state: parameters, optimizer and `Carry` are passed in and returned. Its calls can
    be jitted, mapped and differentiated. The derivative of a call by the parameters is the rule's
    gradient; by the carry it is zero.
    """

    step: Callable[..., PyTree]
    rule: LearningRule
    window: int | None
    strict: bool
    memory_limit: int | None
    control_flow: ControlFlowPolicy | None
    marked_only: bool
    engine: Engine = Engine.AUTO
    placement: Placement | None = None  # where its arrays lie, on a mesh
    wanted: Wanted | None = None  # of 'auto': what a rule may take, until `init` chooses one
    last_run: RunInfo | None = field(default=None, init=False)  # how the last sequence was run
    _outside: Outside = field(init=False)
    _states: States = field(init=False)  # of the last carry, and what init was called with
    _plans: dict[Signature, Plan] = field(default_factory=dict, init=False)
    _last: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._outside = Outside(self.step, self.strict)
        self._states = States(self.strict)

    def __repr__(self) -> str:
        status = "not analysed yet" if self._last is None else self.report.picture.summary
        return f"{self.rule.name} of {name_of(self.step)}\n  {status}"

    # ------------------------------------------------------------------------------- tracing

    def _plan(self, params: PyTree, state: PyTree, inputs: tuple[Array, ...]) -> Call:
        """The analysed step for these shapes, and a call of one step of it, with no traces."""
        check_surroundings(self.placement, (params, state, inputs))  # before it is analysed there
        names, trained, fixed = split(params)
        states, hidden, others = split(state)
        leaves, tree = jax.tree.flatten(inputs)
        arrays = (*fixed, *trained, *hidden, *others)
        shapes = (*(shape_of(a, is_weak(a)) for a in leaves), *map(shape_of, arrays))
        signature = Signature(names, states, tree, shapes)
        plan = self._plans.get(signature)
        if plan is None:
            windows, unmarked = self.window is not None, not self.marked_only
            how = (self.control_flow, self.memory_limit, windows, unmarked, self.engine)
            make = self._states.explained(inputs, make_plan)
            plan = make(self._outside, self.rule, signature, *how, self.placement)
            if self.strict:
                check_exact(plan.report().parameters.values(), self.rule.name)
            if plan.reusable:
                self._plans[signature] = plan
        self._last = plan
        weights = Weights(trained, fixed, plan.consts, dict(plan.rule.values))
        at = Position((tuple(hidden), tuple(others)), None, np.zeros((), np.int32))
        return Call(plan, weights, at, Stream(Arrays(tuple(leaves))))

    def _compiled(self) -> Plan:
        if self._last is None:
            raise RuntimeError(
                message(
                    "the step is not analysed yet.",
                    why="that needs the shapes of parameters, state and inputs",
                    do="call init(params, state, *inputs) first",
                )
            )
        return self._last

    @property
    def report(self) -> CompilationReport:
        """The certificate: how every parameter of the last analysed step is learned."""
        return self._compiled().report()

    @property
    def memory(self) -> int:
        """Bytes of the traces of the last analysed step."""
        return nbytes(self._compiled().trace_shapes)

    def shard(
        self, mesh: jax.sharding.Mesh, *, batch: str | None = None, units: str | None = None
    ) -> Online:
        """This learner on a mesh of devices, see `braintrace.online`; start it with `init`."""
        return replace(self, placement=check_placement(mesh, batch, units))

    # -------------------------------------------------------------------------------- calling

    def init(self, params: PyTree, state: PyTree, *inputs: PyTree) -> Carry:
        """Analyse the step; returns the state with zero traces.

        Args:
            params: the parameters; shapes and types count, values do not.
            state: the initial state. To learn it, a function of the parameters alone that returns
                it, `lambda params: state`; it is called again in the first step, so pass the same
                function each time.
            *inputs: inputs of one step; shapes and types count, values do not.
        """
        check_process()
        self._states.forget()
        if self.wanted is not None:
            self._choose(params, state, inputs)
        if is_function(state):
            call = self._plan(params, started(state, params), inputs)
        else:
            begin = jax.tree.map(strong, self._outside.state(state))
            call = self._plan(params, begin, inputs)
            plan = call.plan
            leaves = jax.tree.leaves(state)
            shared = [leaves[i] for i in _layouts(plan).state.trained]
            check_shared(plan.graph.step, split(params)[1], shared, self.strict)
        self._states.saw(inputs)
        at = replace(call.placed(timed=False).at, traces=call.plan.zeros(), count=call.at.count)
        return self._carry(call.plan, at)

    def _choose(self, params: PyTree, state: PyTree, inputs: tuple[PyTree, ...]) -> None:
        """The rule for these shapes, in place of 'auto'."""
        assert self.wanted is not None
        begin = started(state, params) if is_function(state) else jax.tree.map(strong, state)
        limit, self.memory_limit = self.memory_limit, sys.maxsize
        problem = self._plan(params, begin, inputs).plan.problem
        self.memory_limit, wanted = limit, self.wanted
        self.rule, self.window = automatic(problem, wanted)
        self.wanted = None
        self._plans.clear()

    def _check_chosen(self) -> None:
        if self.wanted is not None:
            raise RuntimeError(
                message(
                    "the rule is not chosen yet.",
                    why="'auto' needs the shapes of parameters, state and inputs",
                    do="call init(params, state, *inputs) first",
                )
            )

    def __call__(
        self, params: PyTree, carry: Carry, *inputs: PyTree, **extra: PyTree
    ) -> tuple[Carry, PyTree]:
        """One step.

        Args:
            params: the parameters.
            carry: from `init` or the last step.
            *inputs: inputs of the step.
            **extra: what the rule takes with a call, e.g. a modulator.

        Returns:
            The new carry and the output of the step.
        """
        call = self._fit(params, carry, self._outside.inputs(inputs), extra)
        at, outs = call.one(None if self.window is None else 1)
        return self._carry(call.plan, at), jax.tree.unflatten(call.plan.out_tree, outs)

    def scan(
        self, params: PyTree, carry: Carry, xs: PyTree, **extra: PyTree
    ) -> tuple[Carry, PyTree]:
        """Many steps, in blocks; differentiated, the sum of the steps' gradients.

        Args:
            params: the parameters.
            carry: from `init` or the last step.
            xs: the input of all steps, with a leading axis of time; a tuple if there are several.
            **extra: what the rule takes with a call, with a leading axis of time.

        Returns:
            The new carry, and the outputs of all steps.
        """
        call = self._sequence(params, carry, xs, (), None, extra)
        at, outs, self.last_run = call.scan(Options(self.window))
        return self._carry(call.plan, at), jax.tree.unflatten(call.plan.out_tree, outs)

    def grad(
        self,
        loss: Callable[..., PyTree],
        *,
        has_aux: bool = False,
        block_size: int | None = None,
        memory_budget: int | None = None,
        keep_traces: bool = True,
        progress: bool = False,
    ) -> Callable[..., PyTree]:
        """The gradient of the summed losses of a sequence, in memory that does not grow with it.

        Keep the function that is returned: it is compiled once.

        Args:
            loss: `loss(out, *targets)`, the loss of one step; or `(loss, aux)` with `has_aux`.
            has_aux: whether `loss` returns a pair.
            block_size: steps per block; default as many as pay.
            memory_budget: bytes that the values of one block may take, if it has no size.
            keep_traces: whether the traces afterwards are wanted; else they are zero, and a
                sequence that fits in one block never builds one.
            progress: whether to show a progress bar (needs tqdm).

        Returns:
            `f(params, carry, xs, *targets, mask=None, **extra)`, which returns
            `(grads, (carry, losses))`, or `(grads, (carry, losses, aux))`. `xs` is as for `scan`,
            targets have a leading axis of time, `mask` (T,) weighs the losses. Gradients have the
            structure of `params`, None where it has no floating array.
        """
        self._check_chosen()
        sized = Options(self.window, block_size, memory_budget, keep_traces).checked()
        checked = checked_loss(loss, has_aux)

        def gradient(
            params: PyTree,
            carry: Carry,
            xs: PyTree,
            *targets: PyTree,
            mask: PyTree = None,
            **extra: PyTree,
        ) -> PyTree:
            call = self._sequence(params, carry, xs, targets, mask, extra)
            # Traces of numpy's zero steps are zero, and nobody need ask a device for it.
            fresh = isinstance(carry.steps, np.ndarray) and carry.steps == 0
            options = replace(sized, fresh=bool(fresh))
            found = call.gradient(gradient, checked, options, progress)
            grads, at, results, self.last_run = found
            grads = _layouts(call.plan).params.only_trained(grads)
            return grads, (self._carry(call.plan, at), *_results(results, has_aux))

        return gradient

    def train(
        self,
        loss: Callable[..., PyTree],
        optimizer: Any,
        update_every: int = 1,
        *,
        has_aux: bool = False,
        block_size: int | None = None,
        memory_budget: int | None = None,
        keep_traces: bool = True,
        progress: bool = False,
        on_update: OnUpdate | None = None,
        nonfinite: str = "warn",
        record: Record | None = None,
    ) -> Callable[..., PyTree]:
        """Learn while the sequence runs: update the parameters every few steps.

        Keep the function that is returned: it is compiled once.

        Args:
            loss: `loss(out, *targets)`, the loss of one step; or `(loss, aux)` with `has_aux`.
            optimizer: an optax transformation, initialised with the floating arrays of `params`.
            update_every: steps between two updates; the gradient is that of their summed losses.
            has_aux: whether `loss` returns a pair.
            block_size: steps per block of the gradient of an update; default as many as pay.
            memory_budget: bytes that the values of one block may take, if it has no size.
            keep_traces: whether the traces after the sequence are wanted; else they are zero.
            progress: whether to show a progress bar (needs tqdm).
            on_update: `on_update(step, metrics)`, called for every update of this call, counted
                from 1, with its `loss` (the mean over its steps) and `grad_norm`. The calls are
                between compiled loops of 256 updates: for one loop while the next one runs.
            nonfinite: what an update does whose losses, gradients, parameters, states or traces
                are not finite: 'warn' once and go on; 'skip' it, so that parameters, optimizer,
                states and traces are those before its steps, counted in `last_run.skipped`; or
                'stop', raise a `NonFiniteError` whose `results` are those of the updates before.
                The last two keep the traces before an update beside those after it.
            record: what to record while training, see `braintrace.Record`.

        Returns:
            `f(params, opt, carry, xs, *targets, mask=None, **extra)`, which returns
            `(params, opt, carry, losses)`, or `(params, opt, carry, losses, aux)`; with `record`
            and a `braintrace.show.Recording`.
        """
        self._check_chosen()
        every = check_count("update_every", update_every, "steps")
        sized = Options(self.window, block_size, memory_budget, keep_traces).checked()
        checked = checked_loss(loss, has_aux)
        if not callable(getattr(optimizer, "update", None)):
            raise type_error(
                f"optimizer has type {type(optimizer).__name__}.",
                why="it must turn gradients into updates of the parameters",
                do="pass an optax transformation such as optax.adam(1e-3)",
            )
        check_choice("nonfinite", nonfinite, NONFINITE)
        sized = replace(sized, nonfinite=nonfinite)
        watch = LossWatch(name_of(self.step))

        def train(
            params: PyTree,
            opt: PyTree,
            carry: Carry,
            xs: PyTree,
            *targets: PyTree,
            mask: PyTree = None,
            **extra,
        ) -> PyTree:
            call = self._sequence(params, carry, xs, targets, mask, extra)
            plan, weights = call.plan, call.weights
            if self.strict:
                check_moving(plan.report().parameters.values(), self.rule.name, "train")
            layout = _layouts(plan).params
            if self.placement is not None:
                trained = layout.only_trained(weights.trained)
                opt = put(opt, self.placement.moments(opt, trained))

            def update(
                grads: list[Array], trained: list[Array], own: PyTree, at: Position
            ) -> PyTree:
                tree = layout.only_trained
                try:
                    updates, own = optimizer.update(tree(grads), own, tree(trained))
                except (AttributeError, TypeError, ValueError) as error:
                    error.add_note(_FAILED_UPDATE)
                    raise
                pairs = zip(trained, jax.tree.leaves(updates), strict=True)
                return [(p + u).astype(p.dtype) for p, u in pairs], own, at

            check_on_update(on_update, (call.weights, opt, call.at, call.stream))
            check_stop(nonfinite, (call.weights, opt, call.at, call.stream))
            recorder = None if record is None else recorder_of(plan, record, every, None)
            options, updates = replace(sized, recorder=recorder), Updates(update, every)
            trained, opt, at, results, self.last_run = call.train(
                train, None, checked, options, updates, opt, on_update, watch, progress
            )
            params = layout.join(trained, weights.fixed)
            at = at if keep_traces else ended(plan, at)
            returned = params, opt, self._carry(plan, at), *_results(results, has_aux)
            if recorder is not None:
                groups = tuple(g.hidden_paths for g in plan.graph.groups)
                returned = *returned, recorder.recording(results[-1], groups)
            if nonfinite == "stop":
                count = -(-call.stream.length // every)
                raise_stopped(self.last_run.skipped, count, returned)
            return returned

        return train

    # ----------------------------------------------------------------------------- exporting

    def export_c(
        self,
        params: PyTree,
        carry: Carry,
        x: PyTree,
        *targets: PyTree,
        loss: Callable[..., PyTree],
        optimizer: Any,
        path: str | os.PathLike,
        opt: PyTree = None,
        extra: dict[str, PyTree] | None = None,
        name: str = "learner",
        initial: str = "source",
    ) -> ExportedC:
        """Write the learner as a folder of C: network, traces, gradient and update.

        C99 without allocation, of `float` or `double` as the parameters are; one struct holds all
        arrays, of sizes that are known. What it computes is what `train(loss, optimizer)` does
        with `update_every=1`.

        Args:
            params: the parameters, as they are to be at first.
            carry: from `init`, as it is to be at first and after every reset.
            x: an example of the input of one step; a tuple if there are several.
            *targets: examples of the targets of one step.
            loss: `loss(out, *targets)`, the loss of one step.
            optimizer: an optax transformation.
            path: the folder.
            opt: the optimizer's state; default `optimizer.init` of the floating arrays of `params`.
            extra: examples of what the rule takes with a call, e.g. a modulator, by name.
            name: of the struct, the functions and the files.
            initial: where the values of the parameters stand: in the 'source', or in a 'file'
                beside it, which the program loads.

        Returns:
            What was written: its sizes, and conversion of saved bytes from and to arrays.

        Raises:
            NotSupportedError: the update does what has no C: sorts, loops of unknown length,
                calls of Python, random numbers by another generator than threefry; with the
                user's line.

        Example:
            >>> import tempfile, jax.numpy as jnp, optax, braintrace
            >>> step = lambda w, h, x: (h := jnp.tanh(0.9 * h + x @ w), h)
            >>> net = braintrace.online(step, 'd_rtrl')
            >>> w, x, y = jnp.ones((3, 4)), jnp.ones(3), jnp.ones(4)
            >>> carry = net.init(w, jnp.zeros(4), x)
            >>> loss = lambda out, y: jnp.mean((out - y) ** 2)
            >>> done = net.export_c(w, carry, x, y, loss=loss, optimizer=optax.sgd(0.1),
            ...                     path=tempfile.mkdtemp())
            >>> sorted(file.name for file in done.path.iterdir())
            ['README.md', 'learner.c', 'learner.h', 'main.c']
        """
        update = self._update(params, carry, x, targets, loss, optimizer, opt, extra)
        return write_c(update, path, name, initial)

    def export(
        self,
        params: PyTree,
        carry: Carry,
        x: PyTree,
        *targets: PyTree,
        loss: Callable[..., PyTree],
        optimizer: Any,
        path: str | os.PathLike,
        opt: PyTree = None,
        extra: dict[str, PyTree] | None = None,
        platforms: Sequence[str] = ("cpu",),
    ) -> ExportedProgram:
        """Write one update as a program that runs where JAX is, without braintrace.

        The folder has `update.stablehlo` (made by `jax.export`), `manifest.json`, the names, shapes
        and types of its arguments and results, and `start.npz`, the arrays to begin with. All
        arguments but the last are those of `export_c`.

        Args:
            platforms: what it is to run on, e.g. `("cpu", "cuda")`.

        Returns:
            What was written.
        """
        update = self._update(params, carry, x, targets, loss, optimizer, opt, extra)
        return write_program(update, path, platforms)

    def _update(
        self,
        params: PyTree,
        carry: Carry,
        x: PyTree,
        targets: tuple[PyTree, ...],
        loss: Callable[..., PyTree],
        optimizer: Any,
        opt: PyTree,
        extra: dict[str, PyTree] | None,
    ) -> OneUpdate:
        """One update as a function of arrays."""
        inputs = self._outside.inputs(x if type(x) is tuple else (x,))
        call = self._fit(params, carry, inputs, extra or {})
        layout = _layouts(call.plan)
        tree = layout.params.only_trained
        own = optimizer.init(tree(call.weights.trained)) if opt is None else opt
        optimizing = optimizing_tree(optimizer, own, tree)
        paths, states = layout.params.paths("params"), layout.state.paths("state")
        order = (*layout.state.trained, *layout.state.arrays)
        shown = lambda paths, numbers: [dotted(paths[i]) for i in numbers]
        names = shown(paths, layout.params.trained), shown(states, order)
        about = f"{name_of(self.step)}, which learns by {self.rule.name}"
        return one_update(call, loss, optimizing, names, inputs, targets, about)

    # -------------------------------------------------------------------------------- arrays

    def _sequence(
        self, params: PyTree, carry: Carry, xs: PyTree, targets: PyTree, mask: PyTree, extra: PyTree
    ) -> Call:
        check_process()
        inputs = self._outside.inputs(xs if type(xs) is tuple else (xs,))  # a named one is an input
        length = length_of((inputs, targets, extra))
        first = jax.tree.map(lambda a: a[0], inputs)
        call = self._fit(params, carry, first, extra)
        leaves = tuple(map(jnp.asarray, jax.tree.leaves(inputs)))
        arrays = Arrays(leaves, targets, call.stream.arrays.extra or None)
        return replace(call, stream=Stream(arrays, check_mask(mask, length)))

    def _fit(
        self, params: PyTree, carry: Carry, inputs: tuple[Array, ...], extra: dict[str, PyTree]
    ) -> Call:
        """A call of one step; of what it gives the rule, None is nothing."""
        check_process()
        if not isinstance(carry, Carry):
            raise type_error(
                f"the carry has type {type(carry).__name__}.",
                why="a call continues from a Carry: the state with its traces",
                do="start with init(params, state, *inputs), and pass on what calls return",
            )
        self._states.check(carry)
        state = carry.state if carry.start is None else Started(carry.state, carry.start)
        call = self._plan(params, state, inputs)
        plan = call.plan
        check_traces(carry.traces, plan.trace_shapes, self.rule.name)
        unknown = sorted(set(extra) - set(self.rule.takes))
        if unknown:
            raise type_error(
                f"{self.rule.name} takes no {', '.join(unknown)}.",
                why="with a call it takes "
                + (", ".join(self.rule.takes) or "nothing besides the inputs"),
                do="pass inputs of the step by position",
            )
        extra = {k: v for k, v in extra.items() if v is not None}
        plan.check_call(extra)
        stream = Stream(replace(call.stream.arrays, extra=extra))
        at = replace(call.at, traces=carry.traces, count=carry.steps)
        return replace(call, at=at, stream=stream)

    def _carry(self, plan: Plan, at: Position) -> Carry:
        state, start = _layouts(plan).state.join(*at.states), None
        if isinstance(state, Started):
            state, start = state.state, state.start
        carry = Carry(state, at.traces, at.count, start)
        self._states.returned(carry)
        return carry


def _layouts(plan: Plan) -> Signature:
    assert plan.signature is not None  # of a step of pytrees
    return plan.signature


def planned(
    step: Callable[..., PyTree], rule: LearningRule, params: PyTree, state: PyTree, *inputs: PyTree
) -> CompilationReport:
    """The report on a step, without traces and whatever their size."""
    net = online(step, rule, memory_limit=sys.maxsize)
    return net._plan(params, jax.tree.map(strong, state), inputs).plan.report()


def _results(results: tuple[Array, PyTree], has_aux: bool) -> tuple[Array, ...]:
    return results[:2] if has_aux else results[:1]
