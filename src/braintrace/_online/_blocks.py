"""How a sequence is cut into blocks, and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph import Graph, Site, Step, reach
from ..ops import Operator
from ..program import Program, PyTree, Var, trace

# A block of K steps is one batch of K times the samples. Three things bound K:
#
#   memory      K * stored: x, f, D and the values of all its steps exist at once
#   the trace   read and written once per block, so a step pays traces / K of that
#   the start   of a block's program, the same whatever K is
#
# With stored = 1 MB, traces = 64 MB: K = 8 moves 8 MB of trace for each step and 1 MB of values;
# K = 256 moves 0.25 MB of trace, and twice as many steps would save 0.125 MB of 1.25.
#
# Bounds by memory. A device that tells its size gives a block a sixteenth of it, so that weights,
# traces, an optimizer's moments and XLA's own copies have room; one that does not, 1 GiB.
BUDGET = 1 << 30
SHARE = 16
# Bounds by the trace: from 256 steps on it is a part that is not noticed (the example above).
MOST_STEPS = 256
# On a GPU small steps take more time to launch than to compute. Blocks grow beyond 256 steps while
# they take less than 640 MiB, and to 512 steps while those take less than 1.25 GiB. Tuned, not
# derived: on another device benchmarks/speed.py says what they cost.
LIGHT_BLOCK = 5 << 27
LIGHT_STEPS = 512
# Where traces are smaller than the values of four steps there is nothing to save by long blocks. On
# a CPU the values of 32 steps stay in the cache; on a GPU 128 steps are enough: longer ones gained
# 3 %, and 32 steps lost 13 %.
FEW_STEPS = {"cpu": 32, "gpu": 128}
# Blocks that are taken backward have no trace between them: on a CPU they are as long as their
# values stay in its caches, but have enough steps to fill a product. Tuned on a GRU with 16 to 512
# units and 1 to 128 samples, on quiet cores with 32 MiB of L3.
CACHED, BACKWARD_STEPS = 1 << 25, (16, 128)
# Not less than this, whatever the memory; tuned as well.
LEAST_STEPS = 16
# Between two traces, all states are stored: this much, or as much as the traces take.
SEGMENT = 1 << 25
# What XLA stores of the values of a step and of its tangents, the rest is fused: 0.21 to 0.42 of
# them for the cells of the benchmarks.
STORED = 0.3
# On a GPU a block costs as much time as moving 512 MiB, besides the trace, which is read, advanced
# and written: three times. It is long enough if its steps move twelve times that, so that the block
# itself is a thirteenth of the time:   K * moved = TIMES * (PER_BLOCK + 3 traces).
PER_BLOCK, TIMES = 1 << 29, 12


def calls_per_block(
    step: StepBytes,
    window: int,
    count: int,
    traces: PyTree,
    block_size: int | None,
    budget: int | None,
    keep: bool = True,
    shards: int = 1,
    backward: bool = False,
) -> int:
    """How many windows make a block, of `count` in all.

    Args:
        step: what one step takes, of all devices.
        window: steps per window.
        count: windows in the sequence.
        traces: the traces that a block touches.
        block_size: steps per block that the user asked for.
        budget: bytes that the values of one block may take.
        keep: whether traces are wanted afterwards; if not, one block builds none at all.
        shards: devices that share the values of a step and the traces.
        backward: whether blocks can be taken backward.
    """
    if block_size is not None:
        return max(1, min(count, block_size // window))
    cpu = jax.default_backend() == "cpu"
    size, touched = max(1, step.stored // shards), nbytes(traces) // shards
    light = touched < 4 * size
    steps = min(FEW_STEPS["cpu" if cpu else "gpu"], MOST_STEPS) if light else MOST_STEPS
    if cpu and backward:
        least, most_steps = BACKWARD_STEPS
        steps = min(max(CACHED // size, least), most_steps)
        # Two blocks run their states twice, one runs them once: it may be up to twice as long.
        # Traces that are wanted afterwards pay for long blocks: 128 steps took less than 256.
        all_steps, longest = count * window, min(2 * steps, most_steps) if keep else 2 * steps
        if all_steps <= longest or all_steps * size <= CACHED:
            steps = all_steps
    if not cpu:
        pays = TIMES * (PER_BLOCK + 3 * touched) // max(1, step.moved // shards)
        longer = LIGHT_STEPS if LIGHT_STEPS * size <= 2 * LIGHT_BLOCK else steps
        steps = min(max(longer, LIGHT_BLOCK // size), max(LEAST_STEPS, pays))
    if budget is None:
        whole = _budget()
        room = max(whole - touched - step.weights, whole // SHARE)
        fits = max(room // size, LEAST_STEPS) // window
    else:
        fits = budget // (window * size)
    if not (keep or light or (cpu and backward)) and count <= fits:
        return count
    # 1,000 calls of which 256 fit: 4 blocks of 250, a divisor, and one program. Of 1,009 calls (a
    # prime) 4 blocks of 253 would leave a last one of 250: two programs, but 1,009 of one call each
    # would be worse, so a divisor is taken only if it is more than half of what fits.
    most = max(1, min(count, fits, max(1, steps // window)))
    blocks = -(-count // most)
    equal = [n for n in range(-(-count // blocks), 0, -1) if count % n == 0]
    # Blocks of one size are one program; a divisor that is not much smaller saves the second.
    return equal[0] if 2 * equal[0] > most else -(-count // blocks)


class Segments(NamedTuple):
    """Calls per segment; whether states before every step are stored, or before every block."""

    calls: int
    stored: bool = True


def calls_per_segment(
    kept: int, states: int, count: int, size: int, traces: PyTree, budget: int | None, keep: bool
) -> Segments:
    """How a sequence is cut into segments, whose blocks are taken from the last to the first.

    If no trace is wanted afterwards, one segment needs none: to store the states before blocks
    alone, and to run each once more, takes less time than traces between segments.

    Args:
        kept: bytes that are kept of a call until the traces are written: states, deposits.
        states: bytes of the states of a call, and of those before a block.
        count: calls in the sequence.
        size: calls in a block.
        traces: what is read, and written if there are more segments, once in each.
        budget: bytes that the user allows.
        keep: whether traces are wanted afterwards.
    """
    room = max(SEGMENT, nbytes(traces)) if budget is None else budget
    if not keep:
        for stored, taken in ((True, states * count), (False, states * -(-count // size))):
            if taken <= room:
                return Segments(count, stored)
    # 1 kB of states per call, 32 MB of room, blocks of 128: 32,768 calls are a segment. Of 100,000
    # calls that makes 4 segments, of 25,000 each, rounded up to blocks: 25,088. The traces are
    # written 4 times, and the states of 25,088 calls are stored while one segment is taken.
    most = max(1, room // max(1, kept) // size) * size
    segments = -(-count // most)
    return Segments(min(count, -(-count // segments // size) * size))


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a step takes: memory in a block of many, what it moves, and the weights it reads."""

    stored: int
    moved: int = 0
    weights: int = 0

    def __add__(self, stored: int) -> StepBytes:
        return replace(self, stored=self.stored + stored, moved=self.moved + stored)

    def __mul__(self, samples: int) -> StepBytes:
        return replace(self, stored=self.stored * samples, moved=self.moved * samples)


def nbytes(tree: PyTree) -> int:
    """The bytes of all arrays, or shapes of arrays, in a pytree."""
    return sum(a.size * getattr(a.dtype, "itemsize", 4) for a in jax.tree.leaves(tree))


def _budget() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", SHARE * BUDGET) // SHARE


def step_bytes(graph: Graph) -> StepBytes:
    """An estimate of what one step of a block takes.

    What an operator computes inside is there for all steps at once if no state feeds it back to
    its input, otherwise for one.
    """
    step, tangent = graph.step, graph.tangent
    params = {step.entry(leaf) for leaf in step.params}
    stored = stored_bytes(step.program, params)
    # The tangent program has the inputs of the step, in order, and those of its tangents.
    inputs = zip(tangent.program.inputs, (*step.program.consts, *step.program.inputs), strict=False)
    stored += stored_bytes(tangent.program, {v for v, of in inputs if of in params})
    for r in (r for part in graph.parts or (graph,) for r in part.relations):
        stored += prod(r.slots.shape) * r.slots.width**2 * np.dtype(r.slots.dtype).itemsize
        if r.slots.table is not None:
            stored += r.slots.table.index.size * np.dtype(r.slots.dtype).itemsize
    weights = nbytes(list(params))
    inside = [(_inside(s.operator), _is_fed_back(step, s)) for s in graph.sites]
    batched = sum(size for size, fed_back in inside if not fed_back)
    moved = stored + weights + sum(size for size, _ in inside)
    return StepBytes(max(stored + batched, 1), moved, weights)


def state_bytes(graph: Graph) -> int:
    """The states of a step that vary."""
    step = graph.step
    leaves = [a for a in (*step.stored, *step.others) if step.exit(a) is not step.entry(a)]
    return nbytes([step.entry(leaf) for leaf in leaves])


def deposit_bytes(graph: Graph) -> int:
    """What a step deposits in traces, until it is put there; without an input, steps are added."""
    size = 0
    for r in graph.relations:
        if r.operator.record is not None:
            slots = prod(r.slots.shape) * r.slots.width * np.dtype(r.slots.dtype).itemsize
            size += (slots + nbytes(r.operator.record)) * (r.site.iterations or 1)
    return size


def _inside(op: Operator) -> int:
    """The bytes of what an operator computes that is larger than its input and its result."""
    program, _ = trace(op.primitive.apply(dict(op.params)), *op.operands)
    own = max(nbytes(op.y), nbytes(op.x))
    sizes = [nbytes(v) for e in program.equations for v in e.outputs]
    return sum(n for n in sizes if n > own)


def _is_fed_back(step: Step, site: Site) -> bool:
    """Whether the input of an operator depends on its result through the states."""
    leaves = (*step.hidden, *step.others)
    entries = {step.entry(leaf): 1 << i for i, leaf in enumerate(leaves)}
    reads = reach(step.program, entries, differentiable=False)
    bits = lambda found, atom: found.get(atom, 0) if isinstance(atom, Var) else 0
    after = reach(step.program, {site.y: 1}, differentiable=False)
    # `h' = f(x @ W + h @ R)`: what R computes reaches h, and R reads h, so its inside exists for
    # one step at a time. What W computes reaches h too, but W reads x alone: for all steps at once.
    # In a loop over two states (R's result in g, g in h, h read by R) `reached` grows from g to h.
    reached = sum(1 << i for i, leaf in enumerate(leaves) if bits(after, step.exit(leaf)))
    for _ in leaves:
        for i, leaf in enumerate(leaves):
            if bits(reads, step.exit(leaf)) & reached:
                reached |= 1 << i
    return any(bits(reads, a) & reached for a in site.equation.inputs)


def stored_bytes(program: Program, constant: Collection[Var]) -> int:
    """What XLA stores of the values of a program that depend on more than `constant`."""
    return int(STORED * varying_bytes(program, constant))


def varying_bytes(program: Program, constant: Collection[Var]) -> int:
    """The size of all values that depend on more than the constants and `constant`."""
    inputs = {v: 1 for v in program.inputs if v not in constant}
    varying = reach(program, inputs, differentiable=False)
    outputs = (v for e in program.equations for v in e.outputs if v in varying)
    return sum(v.size * getattr(v.dtype, "itemsize", 4) for v in outputs)


def scan_blocks(
    step: Callable,
    carry: PyTree,
    arrays: PyTree,
    count: int,
    size: int,
    *,
    backward: bool = False,
    of_blocks: PyTree = None,
) -> PyTree:
    """Scan `step` over blocks of `size` entries, and apply it to a shorter last one.

    `step(carry, entries)`; or `step(carry, (entries, own))` with the entry of `of_blocks` for each
    block. `backward` goes from the last block to the first; results are in the order of the arrays.
    """
    full, rest = divmod(count, size)
    cut = full * size
    paired = (lambda a, own: a) if of_blocks is None else (lambda a, own: (a, own))

    def one(carry: PyTree, start: int, stop: int) -> PyTree:
        own = jax.tree.map(lambda a: a[start // size], of_blocks)
        return step(carry, paired(jax.tree.map(lambda a: a[start:stop], arrays), own))

    def whole(carry: PyTree) -> PyTree:
        if full == 1:
            return one(carry, 0, size)
        split = lambda a: a[:cut].reshape((full, size, *a.shape[1:]))
        own = jax.tree.map(lambda a: a[:full], of_blocks)
        entries = paired(jax.tree.map(split, arrays), own)
        carry, results = lax.scan(step, carry, entries, reverse=backward)
        return carry, jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:])), results)

    last = lambda carry: one(carry, cut, count)
    parts, out = [whole] * (full > 0) + [last] * (rest > 0), []
    for part in reversed(parts) if backward else parts:
        carry, results = part(carry)
        out.append(results)
    return carry, joined(out[::-1] if backward else out)


def joined(results: list[PyTree]) -> PyTree:
    """Results of consecutive parts of a sequence as one."""
    return jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *results)
