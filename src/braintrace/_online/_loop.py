"""The loop over a sequence: outputs, gradients or updates, block by block.

A gradient is training without an optimizer; a window is a call of several steps in which nothing is
cut; a step is a call of one. All of it is a pure function of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ..engine import COUNTED, Behind, Deposits, Fresh, States, TimeLoop, left_at, running_placement
from ..program import PyTree
from ..rules import Rule, check_count, in_parts
from ._blocks import (
    CACHED,
    Segments,
    calls_per_block,
    calls_per_segment,
    deposit_bytes,
    joined,
    nbytes,
    scan_blocks,
    state_bytes,
)
from ._finite import guarded

if TYPE_CHECKING:
    from ._record import Recorder
    from ._sequence import PlanBody as Body

Array = jax.Array
Tick = Callable[[int], None]
WAITING = 16  # steps that wait beside a trace before they are folded in


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Position:
    """Where a sequence goes on: states, traces, and a count that is zero if the traces are."""

    states: PyTree
    traces: PyTree  # a list; or `Deposits`, until the gradients of a segment are there
    count: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Stream:
    """The arrays of a sequence with a leading axis of time, or of calls; without any it is one."""

    arrays: PyTree
    mask: PyTree = None

    @property
    def length(self) -> int:
        leaves = jax.tree.leaves(self)
        return leaves[0].shape[0] if leaves else 1

    def mean_scale(self) -> Array | float:
        """One over the number of steps that count."""
        return 1.0 / (self.length if self.mask is None else jnp.maximum(self.mask.sum(), 1))

    def at(self, start: int, stop: int) -> Stream:
        return jax.tree.map(lambda a: a[start:stop], self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Weights:
    """Arrays to differentiate by, and whatever else stays the same over a sequence.

    `consts` are the arrays that the step closes over, `of_rule` those that the rule's signal reads.
    """

    trained: list[Array]
    fixed: PyTree
    consts: tuple[Array, ...] = ()
    of_rule: PyTree = None


@dataclass(frozen=True, slots=True)
class Options:
    """How a sequence is run.

    Attributes:
        window: steps per call, in which reverse mode is complete; None for single steps.
        block_size: steps per block, None to choose.
        memory_budget: bytes that the values of one block may take.
        keep: whether the traces afterwards are wanted.
        tick: called on the host after every block with the number of calls in it.
        fresh: whether the traces before the first step are zero for certain; None if it is not to
            be looked up either.
        mean: whether gradients are divided by the number of steps, or the sum of the mask.
        places: on a mesh, where gradients and new weights lie, each where its weight does.
        own_places: and where the optimizer's arrays do.
        norms: whether results are (results, norm of the update's gradient for each step).
        nonfinite: what an update that is not finite does, see `NONFINITE`; unless it warns, the
            optimizer's arrays are `Guarded`.
        only: the numbers of the weights whose gradients are wanted; None for all.
        recorder: what training records; within updates the states of every step are the last of
            the bodies' results.
    """

    window: int | None = None
    block_size: int | None = None
    memory_budget: int | None = None
    keep: bool = True
    tick: Tick | None = None
    fresh: bool | None = False
    mean: bool = False
    places: tuple[Any, ...] | None = None
    own_places: tuple[Any, ...] | None = None
    norms: bool = False
    nonfinite: str = "warn"
    only: tuple[int, ...] | None = None
    recorder: Recorder | None = None

    def checked(self) -> Options:
        """These, with the sizes that users give."""
        if self.block_size is not None:
            check_count("block_size", self.block_size, "steps")
        if self.memory_budget is not None:
            check_count("memory_budget", self.memory_budget, "bytes")
        return self

    def wanted(self, weights: Sequence[Any]) -> list[Any]:
        """Of something for each weight, what belongs to a gradient that is wanted."""
        return list(weights) if self.only is None else [weights[i] for i in self.only]

    @property
    def wanted_places(self) -> tuple[Any, ...] | None:
        """Where these gradients lie."""
        return None if self.places is None else tuple(self.wanted(self.places))


@dataclass(frozen=True, slots=True)
class RunInfo:
    """How a sequence was run: many calls of the step function at once, or why not.

    `loops` are its loops over time, in the order in which they were traced; `left_out` the number
    of updates that were not finite, an array.
    """

    in_blocks: bool
    reason: str | None = None
    loops: tuple[TimeLoop, ...] = ()
    left_out: Any = 0

    @property
    def skipped(self) -> int:
        """How many updates of training with `nonfinite="skip"` were left out."""
        return int(self.left_out)


@dataclass(frozen=True, slots=True)
class Updates:
    """How weights change every so many steps: `update` is a function

    (grads, trained, own, position) -> (trained, own, position).
    """

    update: Callable[
        [list[Array], list[Array], PyTree, Position], tuple[list[Array], PyTree, Position]
    ]
    every: int


@dataclass(frozen=True, slots=True)
class Mode:
    """How a block is run: see `engine.run_block`. `substitute` is per call, None without a mask."""

    keep: bool = True
    fresh: Any = None
    substitute: Array | None = None
    later: bool = False
    behind: Behind | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of `engine.run_block`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


Bodies = Callable[[int | None], "Body"]  # by the size of a window


def run_outputs(
    bodies: Bodies, weights: Weights, at: Position, stream: Stream, options: Options
) -> tuple[Position, PyTree]:
    """The results of all calls; differentiated, the sum of the calls' online gradients."""

    def block(body: Body, at: Position, part: Stream) -> tuple[Position, PyTree]:
        results, _, at = body.run(body.record, weights, at, part.arrays, Mode())
        return at, results

    at = replace(at, count=jnp.asarray(at.count))
    out = []
    for part, window in _parts(stream, options.window):
        body = bodies(window)
        size = _calls(body, part.length, window, at, options)
        at, results = scan_blocks(partial(block, body), at, part, part.length, size)
        out.append(_in_time(results, window))
    return at, joined(out)


def run_gradient(
    bodies: Bodies,
    weights: Weights,
    at: Position,
    stream: Stream,
    options: Options,
    record: Rule | None = None,
) -> tuple[list[Array], Position, PyTree]:
    """The gradient of the summed losses; the position after; the results of all calls."""
    at = replace(at, count=jnp.asarray(at.count))
    totals: list[Array] = []
    out: list[Array] = []
    parts = _parts(stream, options.window)
    for part, window in parts:
        if out and window is not None:  # the last window is after all others: effects have an order
            part = _depending_on(at.count, part)
        body = bodies(window)
        rule = body.record if record is None else record
        size = _calls(body, part.length, window, at, options, rule)
        cut = _segments(body, rule, part, size, window, at, options)
        single = len(parts) == 1 and cut.calls >= part.length
        if not single and not totals:
            totals = [jnp.zeros_like(p) for p in options.wanted(weights.trained)]
        segment = _Segment(body, rule, weights, options, size, cut.stored, single)
        (totals, at), results = scan_blocks(segment, (totals, at), part, part.length, cut.calls)
        out.append(_in_time(results, window))
    if options.mean:
        totals = [t * jnp.asarray(stream.mean_scale(), t.dtype) for t in totals]
    return left_at(totals, options.wanted_places), at, joined(out)


@dataclass(frozen=True, eq=False)
class _Segment:
    """The gradient of a segment, added to those of the segments before it: a step of a loop."""

    body: Body
    rule: Rule
    weights: Weights
    options: Options
    size: int  # calls in a block
    stored: bool  # whether states before every step are, see `Segments`
    single: bool  # the only one: if no trace is wanted afterwards it builds none

    def __call__(
        self, carry: tuple[list[Array], Position], part: Stream
    ) -> tuple[tuple[list[Array], Position], PyTree]:
        options, (totals, at) = self.options, carry
        fresh = options.fresh if self.single else None  # a branch in a loop makes a GPU wait
        fresh = at.count == 0 if fresh is False else fresh
        keep = options.keep or not self.single
        run: Any = block_gradient
        if part.length > self.size:
            run = partial(segment_gradient, self.size, self.stored)
        found = run(self.body, self.rule, self.weights, at, part, keep, fresh, options.tick)
        grads, at, results = found
        grads = options.wanted(grads)
        if totals:
            grads = [t + g for t, g in zip(totals, grads, strict=True)]
        return (left_at(grads, options.wanted_places), at), results


def _depending_on(count: Array, part: Stream) -> Stream:
    """The same sequence, after what the count depends on."""
    return jax.tree.map(lambda a: jnp.where(count < 0, 0, a), part)


def run_updates(
    bodies: Bodies,
    weights: Weights,
    at: Position,
    stream: Stream,
    options: Options,
    updates: Updates,
    own: PyTree,
) -> tuple[list[Array], PyTree, Position, PyTree]:
    """Change the weights after every so many steps; `own` is the optimizer's state.

    Returns:
        trained parameters, the optimizer's own state, the position after, results of all calls.
    """
    if options.recorder is not None:
        return _recorded_updates(bodies, weights, at, stream, options, updates, own)
    every, inner = updates.every, replace(options, keep=True, fresh=None)
    body = bodies(options.window if options.window is None else min(options.window, every))
    # Inside of a loop and after it: the compiler may place the results of a loop elsewhere.
    placed = lambda *pair: map(left_at, pair, (options.places, options.own_places))

    def once(record: Rule | None) -> Callable:
        def block(carry, part):
            trained, own, at = carry
            now = replace(weights, trained=trained)
            grads, at, results = run_gradient(bodies, now, at, part, inner, record)
            losses = results[0]
            if options.norms:
                squares = [jnp.sum(jnp.abs(g) ** 2) for g in grads]
                norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
                results = results, jnp.full(part.length, norm)
            if options.nonfinite == "warn":
                trained, own, at = updates.update(grads, trained, own, at)
            else:
                trained, moments, at = updates.update(grads, trained, own.own, at)
                new = trained, own._replace(own=moments), at
                how = (losses, part.mask, grads)
                trained, own, at = guarded(options.nonfinite, carry, new, *how)
            return (*placed(trained, own), at), results

        return block

    # Weights change at every step, but a trace of (16, 128, 128) floats need not be written at
    # each: 8 updates run on `opened` traces, where a step only appends its (x_i, v_i) and moves M
    # and the earlier v on. `once(pending.rule)` reads base, M, v and x; `fold` writes the base
    # anew:
    #
    #     update    1            2                    ...   8, then fold
    #     trace     base         M base + x_1 v_1           M base + sum_i x_i v_i  ->  base
    def several(carry, part):
        """As many updates as wait beside the traces."""
        trained, own, at = carry
        length, pending = part.length, body.record.pending
        assert pending is not None  # see `_waiting`
        opened = pending.open(body.relations, at.traces, length)
        blocks = jax.tree.map(lambda a: a.reshape((length // every, every, *a.shape[1:])), part)
        carry = (trained, own, replace(at, traces=opened))
        (trained, own, at), results = lax.scan(once(pending.rule), carry, blocks)
        folded = pending.fold(body.relations, at.traces)
        results = jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), results)
        return (trained, own, replace(at, traces=folded)), results

    at = replace(at, count=jnp.asarray(at.count))
    carry, out = (weights.trained, own, at), []
    waiting = _waiting(body, every) if options.nonfinite == "warn" else 1  # each may be left out
    group = min(waiting, stream.length // every) * every
    grouped = stream.length // group * group if group > every else 0
    parts = ((0, grouped, group, several), (grouped, stream.length, every, once(None)))
    for start, stop, size, block in parts:
        if start < stop:
            part = stream.at(start, stop)
            carry, results = scan_blocks(block, carry, part, stop - start, size)
            out.append(results)
    trained, own, at = carry
    return (*placed(trained, own), at, joined(out))


def _recorded_updates(
    bodies: Bodies,
    weights: Weights,
    at: Position,
    stream: Stream,
    options: Options,
    updates: Updates,
    own: PyTree,
) -> tuple[list[Array], PyTree, Position, PyTree]:
    """`run_updates` inside of a loop over records; what is recorded comes last in the results."""
    recorder, inner = options.recorder, replace(options, recorder=None)
    assert recorder is not None

    def records(carry: tuple, part: Stream) -> tuple[tuple, PyTree]:
        trained, own, at = carry
        now = replace(weights, trained=trained)
        trained, own, at, results = run_updates(bodies, now, at, part, inner, updates, own)
        results, norms = results if options.norms else (results, None)
        *plain, of_steps = results if recorder.within else (*results, None)
        results = (*plain, recorder.after(part.length, of_steps, at.states, at.traces))
        return (trained, own, at), (results, norms) if options.norms else results

    size = max(recorder.every, updates.every)
    carry = weights.trained, own, replace(at, count=jnp.asarray(at.count))
    (trained, own, at), results = scan_blocks(records, carry, stream, stream.length, size)
    return trained, own, at, results


def block_gradient(
    body: Body,
    record: Rule,
    weights: Weights,
    at: Position,
    stream: Stream,
    keep: bool,
    fresh: Fresh,
    tick: Tick | None,
) -> tuple[list[Array], Position, PyTree]:
    """The gradient of one block by the trained weights."""
    later = record.backward is not None and in_parts(at.traces)
    mode = Mode(keep, fresh, later=later)
    (grads, _), new, results = _differentiated(body, record, weights, at, stream, mode)
    if isinstance(new.traces, Deposits):
        late = after_gradients(new.traces, grads)
        new = replace(new, traces=body.put(record, weights, at.traces, late, fresh))
    if tick is not None:
        jax.debug.callback(tick, stream.length)
    return grads, new, results


def segment_gradient(
    size: int,
    stored: bool,
    body: Body,
    record: Rule,
    weights: Weights,
    at: Position,
    stream: Stream,
    keep: bool,
    fresh: Fresh,
    tick: Tick | None,
) -> tuple[list[Array], Position, PyTree]:
    """The gradient of blocks of `size` calls, taken from the last to the first.

    First the states alone go through all steps, and are `stored`, or only those before blocks. No
    trace is made between blocks, but adjoints go from each to the one before it, see
    `engine.Backward`.
    """

    # Three blocks A B C of a segment that begins with the trace eps:
    #
    #     ahead     A B C    states before every step (`stored`), or the first ones of A, B and C
    #     block     C        adjoints 0 after it -> q_C before it; gradients of C by its steps
    #               B        q_C -> q_B
    #               A        q_B -> q_A
    #     read      <q_A, eps>: what the past has to do with all of these losses, once
    #     put       eps' = D_C D_B D_A eps + the deposits of A, B and C, each moved to the end of C
    def ahead(at: Position, part: Stream) -> tuple[Position, States]:
        states, last = body.states(weights, at, part.arrays)
        return replace(at, states=last), states if stored else body.first(states)

    def block(carry: tuple, part: tuple[Stream, States]) -> tuple[tuple, tuple]:
        totals, adjoints, moves = carry
        stream, states = part
        if not stored:
            states = jax.tree.map(lambda a: a[None], states)
        behind = Behind(adjoints, tuple(weights.trained), states, moves)
        mode = Mode(keep, True, behind=behind)
        (own, before), new, results = _differentiated(body, record, weights, at, stream, mode)
        if tick is not None:
            jax.debug.callback(tick, stream.length)
        moves, deposits = None, None
        if isinstance(new.traces, Deposits):
            moves, deposits = new.traces.moves, new.traces.of_steps
        totals = [t + g for t, g in zip(totals, own, strict=True)]
        return (totals, before, moves), (results, deposits)

    count = stream.length
    last, path = scan_blocks(ahead, at, stream, count, size)
    zeros = [jnp.zeros_like(p) for p in weights.trained]
    carry = zeros, *body.behind_all(record, keep)
    arrays, starts = ((stream, path), None) if stored else (stream, path)
    how: dict[str, Any] = dict(backward=True, of_blocks=starts)
    carry, (results, deposits) = scan_blocks(block, carry, arrays, count, size, **how)
    grads, adjoints, moves = carry
    past = body.read(record, weights, at.traces, adjoints, fresh)
    grads = [g + p for g, p in zip(grads, past, strict=True)]
    steps = count * body.steps
    at = replace(at, states=last.states, count=counted(at.count, steps))
    if keep:
        late = after_gradients(Deposits(moves, deposits), grads)
        at = replace(at, traces=body.put(record, weights, at.traces, late, fresh))
    return grads, at, results


def _differentiated(
    body: Body, record: Rule, weights: Weights, at: Position, stream: Stream, mode: Mode
) -> tuple[tuple[list[Array], PyTree], Position, PyTree]:
    """Gradients by the trained weights, and adjoints before the block; position and results."""
    count, mask, behind = stream.length, stream.mask, mode.behind
    active, own_signal = None, body.own_signal
    if mask is not None:
        active = jnp.any(mask.reshape((count, -1)) != 0, axis=1)
        if own_signal or not body.adds_constants:
            substitute = jnp.where(active, jnp.arange(count), jnp.argmax(active))
            mode = replace(mode, substitute=substitute)

    # The derivative by `trained` is the gradient within the steps and what the rule credits; that
    # by the adjoints `given` is what goes to the block before, as a block is a linear function of
    # them.
    def total(trained: list[Array], given: PyTree) -> tuple[Array, PyTree]:
        now, how = replace(weights, trained=trained), mode
        if behind is not None:
            counts = None if active is None else active.any()
            adjoints, params = given
            ours = replace(behind, adjoints=adjoints, params=params, counts=counts)
            how = replace(mode, behind=ours)
        results, losses, new = body.run(record, now, at, stream.arrays, how)
        if mask is not None:
            losses = jnp.where(mask == 0, 0, mask * losses)
        return jnp.sum(losses), (new, results)

    given = None if behind is None else (behind.adjoints, behind.params)
    both, (new, results) = jax.grad(total, (0, 1), has_aux=True)(weights.trained, given)
    grads, of_behind = both
    if active is not None:
        grads = [_counted(g, active.any(), own_signal) for g in grads]
    if behind is None:
        return (grads, None), new, results
    adjoints, credited = of_behind
    if active is not None:
        met = [jnp.any(a != 0) for a in behind.adjoints]
        counts = jnp.stack([active.any(), *met]).any()
        credited = [_counted(g, counts, own_signal) for g in credited]
    grads = [g + c for g, c in zip(grads, credited, strict=True)]
    return (grads, adjoints), new, results


def after_gradients(deposits: Deposits, gradients: Sequence[Array]) -> Deposits:
    """Deposits for traces that are to be changed once the gradients have read them.

    XLA copies an array that a loop writes and that is also read, unless the order is certain: what
    is added gets a zero that comes from the gradients.
    """
    late = [jnp.real(g.ravel()[0]) > jnp.inf for g in gradients if g.size]
    zero = sum(late[1:], late[0]) if late else jnp.zeros((), bool)
    tails = [(x, v + zero.astype(v.dtype)) for x, v in deposits.of_steps]
    return replace(deposits, of_steps=tails)


def _counted(gradient: Array, counts: Array, own_signal: bool) -> Array:
    """The gradient of a block in which some call counts, or none: then NaN is nothing.

    A loss that does not count has a gradient of zeros, and penalties; but not a signal beside it.
    """
    return jnp.where(counts if own_signal else counts | jnp.isfinite(gradient), gradient, 0)


def counted(count: Array, steps: int) -> Array:
    """How many steps there were after so many more."""
    return lax.stop_gradient(jnp.minimum(count + steps, COUNTED))


def _parts(stream: Stream, window: int | None) -> list[tuple[Stream, int | None]]:
    """A sequence as calls: whole windows, and the shorter last one."""
    if window is None:
        return [(stream, None)]
    length = stream.length
    whole = length // window * window
    cut = lambda size, a: a.reshape((a.shape[0] // size, size, *a.shape[1:]))
    parts = [(0, whole, window), (whole, length, length - whole)]
    return [
        (jax.tree.map(partial(cut, size), stream.at(start, stop)), size)
        for start, stop, size in parts
        if start < stop
    ]


def _in_time(results: PyTree, window: int | None) -> PyTree:
    """Results of calls, (calls, window, ...), along time."""
    if window is None:
        return results
    return jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), results)


def _calls(
    body: Body,
    count: int,
    window: int | None,
    at: Position,
    options: Options,
    record: Rule | None = None,
) -> int:
    """How many of so many calls make a block; `record` is the rule of a gradient."""
    if body.one_by_one:
        return 1
    placement = running_placement()
    shards = 1 if placement is None else placement.parts
    backward = record is not None and _goes_back(body, record)
    sizes = (options.block_size, options.memory_budget, options.keep, shards, backward)
    return calls_per_block(body.step_bytes, window or 1, count, at.traces, *sizes)


def samples_at_once(bodies: Bodies, options: Options, at: Position, stream: Stream) -> int:
    """Of how many samples of a `vmap` a CPU's caches hold a block and the traces."""
    body, window = bodies(options.window), options.window
    count = max(1, stream.length // body.steps)
    steps = body.steps * _calls(body, count, window, at, options, body.record)
    return CACHED // max(1, steps * body.step_bytes.stored + nbytes(at.traces))


def _goes_back(body: Body, record: Rule) -> bool:
    """Whether blocks are taken backward."""
    # On a mesh the compiler would keep what is stored of all steps whole on every device. A GPU
    # waits for the loop over the states, which runs twice then: 1.6 times as long for a GRU.
    alone = running_placement() is None and jax.default_backend() == "cpu"
    return alone and record.backward is not None and body.goes_back


def _segments(
    body: Body,
    record: Rule,
    part: Stream,
    size: int,
    window: int | None,
    at: Position,
    options: Options,
) -> Segments:
    """How a sequence of calls is cut into segments, of blocks of this size."""
    if not _goes_back(body, record) or size * (window or 1) == 1:
        return Segments(size)
    states = state_bytes(body.plan.graph) * (window or 1)
    kept = states + deposit_bytes(body.plan.graph) * (window or 1)
    how = (options.memory_budget, options.keep)
    return calls_per_segment(kept, states, part.length, size, at.traces, *how)


def _waiting(body: Body, steps: int) -> int:
    """How many updates, of so many steps each, wait before the traces are rewritten."""
    if not body.relations or body.record.pending is None or steps > WAITING // 2:
        return 1
    return WAITING // steps if body.record.pending.fits(body.relations) else 1
