"""The gradient of a sequence with defaults against BPTT, over models and sizes.

    python benchmarks/sizes.py                          # all points
    python benchmarks/sizes.py --only 'GRU.*N=64'       # those whose name has this pattern
    python benchmarks/sizes.py --only eqx --blocks 16 64 256   # and these sizes of blocks

Each point compiles `online(step).grad(loss, keep_traces=False)` and `jax.grad` of a `lax.scan` of
the same step, plain and with rematerialisation (`jax.checkpoint` over parts of √T steps); a cell of
another library also its twin in plain JAX. They run in turns in one process: medians of seconds on
the clock and of the processor, temporary bytes by XLA, and seconds until the first result, apart.
Every repetition goes to `results/sizes.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import _cells as cells
import jax
import jax.numpy as jnp
import numpy as np
from _cells import Make
from _modes import divisor

import braintrace

OUTPUTS = 16
SECONDS = 3.0  # that the repetitions of a point may take, if there are LEAST of them
LEAST, MOST = 5, 21


@dataclass(frozen=True, slots=True)
class Point:
    """A model of a size, and how its gradient is taken."""

    name: str
    make: Make
    n: int
    b: int
    t: int
    inputs: int
    rule: Any = "d_rtrl"
    window: int | None = None
    twin: Make | None = None

    def __str__(self) -> str:
        more = f" windows of {self.window}" if self.window else ""
        return f"{self.name}{more} N={self.n} B={self.b} T={self.t}"


@dataclass(slots=True)
class Way:
    """A way to take the gradient, and what it cost."""

    name: str
    first: float  # seconds until it has been traced, analysed and compiled
    first_cpu: float
    temporary: int
    error: float  # of the gradient, relative to the largest entry of BPTT's
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def points() -> Iterator[Point]:
    quarter = lambda n: max(8, n // 4)
    sizes = ((64, 512), (64, 4096), (128, 128), (256, 128), (512, 128))
    for n, t in (*sizes, *((n, 256) for n in (16, 32, 64, 128, 256, 512))):
        yield Point("GRU", cells.gru, n, 16, t, quarter(n))
    for name, make in cells.FOREIGN.items():
        yield Point(name, make, 64, 16, 512, 16, twin=cells.TWINS[name])
    yield Point("LSTM", cells.lstm, 64, 16, 512, 16)
    yield Point("ALIF", cells.alif, 128, 16, 256, 32)
    yield Point("LRU", cells.lru, 128, 16, 256, 32)
    mixed = cells.chained(cells.mingru, cells.gru)
    for window in (8, 64):
        yield Point("GRU", cells.gru, 128, 16, 128, 32, window=window)
    yield Point("minGRU, GRU", mixed, 128, 16, 128, 32)
    yield Point("minGRU, GRU", mixed, 128, 16, 128, 32, window=8)
    yield Point("SnAp(2) coupled", cells.coupled, 64, 8, 500, 16, braintrace.rules.snap(n=2))
    for name, core in (("minGRU", cells.mingru), ("LRU", cells.lru)):
        yield Point(f"4 {name} + MLP", cells.stack(core), 64, 16, 128, 64)
    for window in (None, 16):
        yield Point("4 Mamba-2 + MLP", cells.stack(cells.mamba), 32, 4, 64, 32, window=window)


Gradient = Callable[[Any, Any, Any], Any]


def loss(out: Any, target: Any) -> Any:
    return jnp.mean((out - target) ** 2)


def ours(point: Point, made: cells.Cell, block: int | None = None) -> Gradient:
    step, _, state = made
    net = braintrace.online(step, point.rule, window=point.window)
    grad = net.grad(loss, keep_traces=False, block_size=block)
    return lambda params, xs, ys: grad(params, net.init(params, state, xs[0]), xs, ys)[0]


def bptt(made: cells.Cell, parts: int | None = None) -> Gradient:
    """Reverse mode through a scan; in parts of which only the first state is stored."""
    step, _, state = made

    def total(params: Any, xs: Any, ys: Any) -> Any:
        def run(h: Any, part: Any) -> Any:
            h, outs = jax.lax.scan(lambda h, x: step(params, h, x), h, part[0])
            return h, jax.vmap(loss)(outs, part[1]).sum()

        if parts is None:
            return run(state, (xs, ys))[1]
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (xs, ys))
        return jax.lax.scan(jax.checkpoint(run), state, cut)[1].sum()

    def gradient(params: Any, xs: Any, ys: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        at = [i for i, a in enumerate(leaves) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]

        def of(trained: list[Any]) -> Any:
            new = list(leaves)
            for i, a in zip(at, trained, strict=True):
                new[i] = a
            return total(jax.tree.unflatten(tree, new), xs, ys)

        return jax.grad(of)([leaves[i] for i in at])

    return gradient


def ways(point: Point, blocks: list[int]) -> Iterator[tuple[str, Gradient, cells.Cell]]:
    with_readout = partial(cells.with_readout, outputs=OUTPUTS)
    sizes = (point.inputs, point.n, point.b)
    made = with_readout(point.make)(*sizes)
    yield "BPTT", bptt(made), made
    yield "ours", ours(point, made), made
    yield "BPTT remat", bptt(made, divisor(point.t)), made
    if point.twin is not None:
        twin = with_readout(point.twin)(*sizes)
        yield "twin", ours(point, twin), twin
        yield "twin BPTT", bptt(twin), twin
    for block in blocks:
        if block <= point.t:
            yield f"block {block}", ours(point, made, block), made


def measure(point: Point, blocks: list[int]) -> list[Way]:
    rng = np.random.default_rng(0)
    draw = lambda n: jnp.asarray(rng.normal(size=(point.t, point.b, n)).astype(np.float32))
    xs, ys = draw(point.inputs), draw(OUTPUTS)
    found, calls = [], []
    reference: list[Any] = []
    for name, gradient, (_, params, _) in ways(point, blocks):
        wall, cpu = time.perf_counter(), time.process_time()
        compiled = jax.jit(gradient).lower(params, xs, ys).compile()
        first = time.perf_counter() - wall, time.process_time() - cpu
        call = partial(compiled, params, xs, ys)
        grads = [a for a in jax.tree.leaves(call()) if jnp.issubdtype(a.dtype, jnp.inexact)]
        reference = reference or grads
        error = nan = float("nan")
        if not name.startswith("twin"):
            pairs = list(zip(grads, reference, strict=True))
            scale = max(float(jnp.abs(b).max()) for _, b in pairs)
            error = max(float(jnp.abs(a - b).max()) for a, b in pairs) / scale
        analysis = compiled.memory_analysis()
        temporary = nan if analysis is None else analysis.temp_size_in_bytes
        found.append(Way(name, *first, temporary, error))
        calls.append(call)
    started = time.perf_counter()
    while len(found[0].wall) < MOST:
        if len(found[0].wall) >= LEAST and time.perf_counter() - started > SECONDS:
            break
        for way, call in zip(found, calls, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            way.wall.append(time.perf_counter() - wall)
            way.cpu.append(time.process_time() - cpu)
    return found


COLUMNS = ("ms", "of BPTT", "cpu", "MB", "BPTT ms", "MB", "remat", "MB", "first", "of BPTT")


def row(found: list[Way]) -> dict[str, float]:
    """Medians, and ratios of medians."""
    by = {way.name: way for way in found}
    of = lambda name, what: median(getattr(by[name], what))
    out = {
        "ms": 1e3 * of("ours", "wall"),
        "wall": of("ours", "wall") / of("BPTT", "wall"),
        "cpu": of("ours", "cpu") / of("BPTT", "cpu"),
        "MB": by["ours"].temporary / 1e6,
        "BPTT ms": 1e3 * of("BPTT", "wall"),
        "BPTT MB": by["BPTT"].temporary / 1e6,
        "remat wall": of("BPTT remat", "wall") / of("BPTT", "wall"),
        "remat MB": by["BPTT remat"].temporary / 1e6,
        "first": by["ours"].first,
        "first cpu": by["ours"].first_cpu / by["BPTT"].first_cpu,
    }
    if "twin" in by:
        out["twin wall"] = of("ours", "wall") / of("twin", "wall")
        out["twin cpu"] = of("ours", "cpu") / of("twin", "cpu")
        out["twin BPTT wall"] = of("BPTT", "wall") / of("twin BPTT", "wall")
    blocks = {way.name: of(way.name, "wall") for way in found if way.name.startswith("block")}
    if blocks:
        best = min(blocks, key=lambda k: blocks[k])
        out |= {"best block": int(best.split()[1]), "best wall": blocks[best] / of("BPTT", "wall")}
        out["over best"] = of("ours", "wall") / min(blocks.values())
    return out


def line(point: Point, r: dict[str, float]) -> str:
    text = (
        f"{point!s:44}{r['ms']:8.1f}{r['wall']:9.2f}{r['cpu']:7.2f}{r['MB']:8.1f}"
        f"{r['BPTT ms']:9.1f}{r['BPTT MB']:8.1f}{r['remat wall']:7.2f}{r['remat MB']:8.1f}"
        f"{r['first']:7.1f}{r['first cpu']:9.2f}"
    )
    if "twin wall" in r:
        text += f"   of its twin {r['twin wall']:.2f}, cpu {r['twin cpu']:.2f}"
    if "best wall" in r:
        text += f"   best block {r['best block']}: {r['best wall']:.2f}"
    return text


def summary(rows: list[dict[str, Any]]) -> str:
    said = []
    for name, key in (("wall", "wall"), ("cpu", "cpu"), ("first call, cpu", "first cpu")):
        values = [r[key] for r in rows]
        said.append(f"{name}: median {median(values):.2f}, worst {max(values):.2f}")
    twins = [r["twin wall"] for r in rows if "twin wall" in r]
    if twins:
        said.append(f"of the twin: worst {max(twins):.2f}")
    return "of BPTT, " + "; ".join(said)


def main() -> int:
    about, usage = __doc__.split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=raw)
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression")
    parser.add_argument("--blocks", nargs="+", type=int, default=[], metavar="K")
    out = Path(__file__).parent / "results" / "sizes.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    width = (8, 9, 7, 8, 9, 8, 7, 8, 7, 9)
    print(" " * 44 + "".join(f"{c:>{w}}" for c, w in zip(COLUMNS, width, strict=True)))
    for point in points():
        if not re.search(options.only, str(point)):
            continue
        found = measure(point, options.blocks)
        ratios = row(found)
        rows.append({"point": str(point), **ratios, "ways": [asdict(way) for way in found]})
        print(line(point, ratios), flush=True)
        jax.clear_caches()
    if not rows:
        parser.error(f"no point has {options.only!r} in its name")
    print(summary(rows))
    options.out.parent.mkdir(exist_ok=True, parents=True)
    cores = len(os.sched_getaffinity(0))
    found = {"jax": jax.__version__, "cores": cores, "load": os.getloadavg(), "rows": rows}
    options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
