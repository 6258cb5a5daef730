"""Stepping a learner through a sequence and recording it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import not_supported, type_error, value_error
from ..._online import norm
from ...learner import Learner, floating, length_of, signal_probe
from ._recording import Name, Path, PyTree, Recording, TraceRecord, lookup, path_of
from ._traces import trace_readers

MEMORY = 1 << 30


def record(
    learner: Learner,
    *sequences: PyTree,
    step_fn: Callable[..., jax.Array] | None = None,
    states: Iterable[Name] | None = None,
    weights: Iterable[Name] | None = None,
    entries: int = 8,
    sample: int | None = None,
    memory_limit: int = MEMORY,
) -> Recording:
    """Step a learner through a sequence and record outputs, states, traces and learning signals.

    Nothing changes: weights, states, traces and random keys are afterwards what they were before.
    The learning signal is `∂L_t/∂h_t`, the derivative of the loss of a step by the states that the
    step leaves behind, along random feedback or replaced if the rule does so. A state does not
    pass it on through states that share its traces, see `docs/rules.md`.

    Args:
        learner: a learner with single steps, as `braintrace.compile` returns it.
        *sequences: pytrees of arrays with a leading time axis, sliced in lockstep.
        step_fn: `step_fn(*slices)` calls the learner once and returns the loss of the step;
            without it there are no losses, signals and gradients.
        states: paths of the hidden states whose values and signals are recorded; default all.
        weights: paths of the parameters whose traces are recorded; default all that have one.
        entries: how many entries of each trace to record, evenly spread, besides its length.
        sample: record this sample of a batch only; default all.
        memory_limit: bytes that the recording may take.

    Raises:
        ValueError: sequences or options do not fit, or the recording would take too much memory.
        NotSupportedError: the learner is mapped over samples, or takes windows.

    Example:
        >>> import braintrace, jax.numpy as jnp
        >>> learner = braintrace.compile(braintrace.nn.GRUCell(3, 4), 'd_rtrl', jnp.zeros(3))
        >>> loss = lambda x: jnp.sum(learner(x) ** 2)
        >>> recording = braintrace.show.record(learner, jnp.ones((5, 3)), step_fn=loss)
        >>> recording.signals['h',].shape
        (5, 4)
    """
    _check(learner, step_fn, entries, sample)
    length = length_of(sequences)
    places = _places(learner, states)
    readers = trace_readers(learner, weights, entries, sample)
    batch = None if sample is None else learner.batch_size
    one = lambda a: a[sample] if jnp.shape(a)[:1] == (batch,) else a
    first = jax.tree.map(lambda a: a[0], sequences)
    call = learner if step_fn is None else step_fn
    touched = brainstate.transform.StatefulFunction(lambda *s: call(*s)).get_states(*first)
    signals_of, params = signal_probe(learner), floating(learner.param_states)

    def step(*slices: PyTree) -> dict[str, PyTree]:
        out: dict[str, PyTree] = {"losses": None, "signals": {}, "gradients": {}}
        if step_fn is None:
            outputs = learner(*slices)
        else:
            loss = lambda: _loss(step_fn, slices)
            before = [s.value for s in touched]
            signals, outputs = signals_of(loss)
            for state, value in zip(touched, before, strict=True):  # undo that step
                state.value = value
            gradient = brainstate.transform.grad(
                loss, params, return_value=True, check_states=False
            )
            grads, out["losses"] = gradient()
            out["signals"] = {path: one(signals[at.position]) for path, at in places.items()}
            out["gradients"] = {path: norm(grads[path]) for path in params}
        out["outputs"] = jax.tree.map(one, outputs)
        out["states"] = {path: jax.tree.map(one, at.read()) for path, at in places.items()}
        out["traces"] = {path: read() for path, read in readers.items()}
        return out

    loop = lambda *s: brainstate.transform.for_loop(step, *s)
    stateful = brainstate.transform.StatefulFunction(loop, return_only_write=False)
    used = stateful.get_states(*sequences)
    _check_memory(stateful.get_out_shapes(*sequences), memory_limit)
    # The states go in as arrays and their new values are dropped: nothing is written back.
    run = jax.jit(lambda values, sequences: stateful.jaxpr_call(values, *sequences)[1])
    recorded = run([s.value for s in used], sequences)
    read = recorded["traces"]
    traces = {p: TraceRecord(read[p][0], read[p][1], r.labels) for p, r in readers.items()}
    groups = tuple(g.hidden_paths for g in learner.graph.hidden_groups)
    rest = {k: recorded[k] for k in ("outputs", "states", "losses", "signals", "gradients")}
    return Recording(length=length, groups=groups, traces=traces, **rest)


@dataclass(frozen=True, slots=True)
class _Place:
    """A hidden leaf: its position, its state, and which leaf of the state's value it is."""

    position: int
    state: brainstate.State
    index: int
    alone: bool

    def read(self) -> PyTree:
        value = self.state.value
        return value if self.alone else jax.tree.leaves(value)[self.index]


def _places(learner: Learner, wanted: Iterable[Name] | None) -> dict[Path, _Place]:
    """Where the states to record are, by path; of a state of several arrays, by path and index."""
    states = learner.hidden_states
    leaves = learner.graph.module_info.step.hidden
    count = Counter(leaf.path for leaf in leaves)
    places = {}
    for i, leaf in enumerate(leaves):
        alone = count[leaf.path] == 1
        path = leaf.path if alone else (*leaf.path, leaf.index)
        places[path] = _Place(i, states[leaf.path], leaf.index, alone)
    if wanted is None:
        return places
    return {path_of(w): lookup(places, w, "hidden state", "the model") for w in wanted}


def _loss(step_fn: Callable[..., jax.Array], slices: PyTree) -> jax.Array:
    loss = step_fn(*slices)
    if isinstance(loss, tuple) or jnp.shape(loss) != ():
        kind = "a tuple" if isinstance(loss, tuple) else f"shape {jnp.shape(loss)}"
        raise value_error(
            f"step_fn returned {kind}, expected one number.",
            why="each step has one loss",
            do="reduce the loss over the batch and features in step_fn, and return only it",
        )
    return loss


def _check(learner: object, step_fn: object, entries: int, sample: int | None) -> None:
    if isinstance(getattr(learner, "module", None), Learner):
        raise not_supported(
            "a learner mapped over samples is not recorded.",
            why="its states and traces belong to single samples",
            do="compile with an explicit batch (vmap=False, batch_size=...)",
        )
    if not isinstance(learner, Learner) or not learner.is_compiled:
        raise type_error(
            f"{type(learner).__name__} is not a compiled learner.",
            why="its states and traces are those of the compiled graph",
            do="pass what braintrace.compile(model, rule, *example_inputs) returns",
        )
    if learner.vjp_method != "single-step":
        raise not_supported(
            "a learner of windows is not recorded.",
            why="inside a window there are no traces and signals of single steps",
            do="compile it again with vjp_method='single-step'",
        )
    if step_fn is not None and not callable(step_fn):
        raise type_error(
            f"step_fn has type {type(step_fn).__name__}.",
            why="it computes the loss of a step",
            do="pass step_fn=lambda x, y: loss(learner(x), y)",
        )
    _check_number("entries", entries)
    if sample is not None:
        if learner.batch_size is None:
            raise value_error(
                f"sample={sample!r} of a learner without a batch.",
                why="there is one sample only",
                do="leave it out",
            )
        _check_number("sample", sample, learner.batch_size)


def _check_number(name: str, value: int, below: int | None = None) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < 0 or (below is not None and value >= below):
        raise value_error(
            f"{name}={value!r}.",
            why="it is an integer >= 0" + (f" and < {below}" if below else ""),
            do="choose another one",
        )


def _check_memory(shapes: PyTree, limit: int) -> None:
    size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(shapes))
    if size > limit:
        raise value_error(
            f"the recording would take {size:,} bytes.",
            why=f"memory_limit is {limit:,} bytes",
            do="record less: name the states and weights, one sample, fewer entries; or raise "
            "memory_limit",
        )
