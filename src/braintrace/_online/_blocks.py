"""How a sequence is cut into blocks, and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import Program, PyTree, Var
from ..graph import Graph, reach

BUDGET = 1 << 30  # bytes that the values of one block may take, on a device that does not say more
SHARE = 8  # or this part of the memory of one that does
MOST_STEPS = 256  # of a block: the trace is touched once per block, and longer ones gain little
LIGHT_BLOCK = 1 << 31  # on a GPU also more steps than that, while their estimate is below this,
LIGHT_STEPS = 512  # or twice this and no more steps than these
FEW_STEPS = 32  # where there is next to no trace to touch: values that stay in the cache of a CPU


def calls_per_block(
    size: int,
    window: int,
    count: int,
    traces: PyTree,
    block_size: int | None,
    budget: int | None,
    keep: bool = True,
) -> int:
    """How many windows make a block, of `count` in all.

    Args:
        size: bytes that the values of one step take.
        window: steps per window.
        count: windows in the sequence.
        traces: the traces that a block touches.
        block_size: steps per block that the user asked for.
        budget: bytes that the values of one block may take.
        keep: whether traces are wanted afterwards; if not, one block builds none at all.
    """
    if block_size is not None:
        return max(1, min(count, block_size // window))
    cpu = jax.default_backend() == "cpu"
    light = cpu and nbytes(traces) < 4 * size
    steps = min(FEW_STEPS, MOST_STEPS) if light else MOST_STEPS
    if not cpu:
        longer = LIGHT_STEPS if LIGHT_STEPS * size <= 2 * LIGHT_BLOCK else steps
        steps = max(longer, LIGHT_BLOCK // size)
    fits = (_budget() if budget is None else budget) // (window * size)
    if not keep and not light and count <= fits:
        return count
    most = max(1, min(count, fits, max(1, steps // window)))
    blocks = -(-count // most)
    equal = [n for n in range(-(-count // blocks), 0, -1) if count % n == 0]
    # Blocks of one size are one program; a divisor that is not much smaller saves the second.
    return equal[0] if 2 * equal[0] > most else -(-count // blocks)


def nbytes(tree: PyTree) -> int:
    """The bytes of all arrays, or shapes of arrays, in a pytree."""
    return sum(a.size * getattr(a.dtype, "itemsize", 4) for a in jax.tree.leaves(tree))


def _budget() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", SHARE * BUDGET) // SHARE


def step_bytes(graph: Graph) -> int:
    """An estimate of the memory that one step of a block takes."""
    step, tangent = graph.step, graph.tangent
    params = {step.entry(leaf) for leaf in step.params}
    total = varying_bytes(step.program, params)
    # The tangent program has the inputs of the step, in order, and those of its tangents.
    inputs = zip(tangent.program.inputs, (*step.program.consts, *step.program.inputs), strict=False)
    total += varying_bytes(tangent.program, {v for v, of in inputs if of in params})
    for r in graph.relations:
        cells = prod(r.slots.shape) * r.slots.width
        total += 4 * cells * np.dtype(r.slots.dtype).itemsize
        if r.slots.table is not None:
            total += 2 * r.slots.table.index.size * np.dtype(r.slots.dtype).itemsize
    return max(total, 1)


def varying_bytes(program: Program, constant: Collection[Var]) -> int:
    """The size of all values that depend on more than the constants and `constant`."""
    inputs = {v: 1 for v in program.inputs if v not in constant}
    varying = reach(program, inputs, differentiable=False)
    outputs = (v for e in program.equations for v in e.outputs if v in varying)
    return sum(v.size * getattr(v.dtype, "itemsize", 4) for v in outputs)


def scan_blocks(step: Callable, carry: PyTree, arrays: PyTree, count: int, size: int) -> PyTree:
    """Scan `step` over blocks of `size` entries, and apply it to a shorter last one."""
    full, rest = divmod(count, size)
    out = []
    if full == 1:
        carry, results = step(carry, jax.tree.map(lambda a: a[:size], arrays))
        out.append(results)
    elif full:
        split = lambda a: a[: full * size].reshape((full, size, *a.shape[1:]))
        carry, results = lax.scan(step, carry, jax.tree.map(split, arrays))
        out.append(jax.tree.map(lambda a: a.reshape((full * size, *a.shape[2:])), results))
    if rest:
        carry, results = step(carry, jax.tree.map(lambda a: a[full * size :], arrays))
        out.append(results)
    return carry, joined(out)


def joined(results: list[PyTree]) -> PyTree:
    """Results of consecutive parts of a sequence as one."""
    return jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *results)
