"""The least time a GRU gradient in block form can take, from ceilings measured in the same run.

Per step and sample, with N units, I inputs and O outputs: three gates read (I + N) numbers each.
The recurrent products run one step after the other, `[z, r]` before the candidate. Everything else
is one product per block: input projections, weight gradients, the way from the candidate back to
`r` (the one path through an operator inside a step), the read-out and its derivatives. Keeping the
traces adds their update for z and the candidate; `r` acts through an operator and has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _models import OUTPUTS, Size

BYTES = 4
# Numbers moved per unit and step by element-wise work. Forward: read 3 projections and h, write
# z, r, c, h. Backward: read z, r, c, h and the cotangent of the output; write D, the cotangent that
# travels back, and 3 of the gates.
MOVED = (3 + 1 + 4) + (5 + 2 + 3)


def phases(size: Size, keep: bool) -> dict[str, dict[str, float]]:
    """Work of one sequence in one block: FLOPs and bytes by phase."""
    n, inputs, rows = size.n, size.inputs, size.t * size.b
    wide = inputs + n
    found = {
        "recurrent": {"flops": 2 * rows * 3 * n * n, "bytes": 0},
        "inputs": {"flops": 2 * rows * 3 * inputs * n, "bytes": 0},
        "weight gradients": {"flops": 2 * rows * 3 * wide * n, "bytes": 0},
        "inside the step": {"flops": 2 * rows * n * n, "bytes": 0},
        "read-out": {"flops": 3 * 2 * rows * n * OUTPUTS, "bytes": 0},
        "element-wise": {"flops": 0, "bytes": BYTES * MOVED * rows * n},
    }
    if keep:  # read for the boundary term, read and written by the update
        moved = BYTES * 3 * 2 * size.b * wide * n
        found["traces"] = {"flops": 2 * rows * 2 * wide * n, "bytes": moved}
    return found


def estimate(ceiling: dict[str, float], size: Size, keep: bool) -> dict[str, Any]:
    """Seconds by phase, their sum, and the bound by the peak rates alone."""
    work = phases(size, keep)
    seconds = {
        name: w["flops"] / ceiling["block_flops"] + w["bytes"] / ceiling["copy_bytes"]
        for name, w in work.items()
    }
    seconds["recurrent"] = size.t * ceiling["step_s"]
    flops, moved = (sum(w[k] for w in work.values()) for k in ("flops", "bytes"))
    bound = max(flops / ceiling["peak_flops"], moved / ceiling["copy_bytes"])
    return {"phases": seconds, "sum_s": sum(seconds.values()), "bound_s": bound, "flops": flops}


def ceilings(size: Size) -> dict[str, float]:
    """Rates of this machine: the step's products in a scan, the block's product, GEMM, copy."""
    n, b, t, wide = size.n, size.b, size.t, size.n + size.inputs
    full = lambda *shape: jnp.full(shape, 1e-3)
    h, gates, candidate = full(b, n), full(n, 2 * n), full(n, n)

    @jax.jit
    def chain(h, gates, candidate):
        def step(h, _):
            zr = h @ gates
            return (zr[:, :n] + zr[:, n:]) @ candidate, None

        return jax.lax.scan(step, h, length=t)[0]

    product = jax.jit(jnp.matmul)
    large = 2048 if jax.default_backend() == "cpu" else 8192
    left, right, square = full(wide, t * b), full(t * b, 3 * n), full(large, large)
    kept = full(MOVED // 2, t * b, n)
    copy = jax.jit(lambda a: a + 1)
    return {
        "step_s": best(chain, h, gates, candidate) / t,
        "block_flops": 2 * wide * t * b * 3 * n / best(product, left, right),
        "peak_flops": 2 * large**3 / best(product, square, square),
        "copy_bytes": 2 * kept.nbytes / best(copy, kept),
    }


def roofline(size: Size) -> dict[str, Any]:
    """Ceilings and the estimates made of them, by mode."""
    ceiling = ceilings(size)
    keeps = {"ours:d_rtrl": True, "ours:d_rtrl:drop": False}
    estimates = {mode: estimate(ceiling, size, keep) for mode, keep in keeps.items()}
    return {"ceilings": ceiling, "estimates": estimates}


def best(fn: Callable, *args: Any, repeats: int = 10) -> float:
    """Seconds of the fastest of several warm calls."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - began)
    return min(times)
