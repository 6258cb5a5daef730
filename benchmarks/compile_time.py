"""Compile time against the number of equations of a step, and against the batch.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --sizes 100 300 1000 --family chain
    python benchmarks/compile_time.py --batches 1 32 --units 20000

With `--batches`, a sparse network of so many units is traced and analysed at each of these batch
sizes, in turn; its table has the ratio to the first one.

`trace` is the model traced into a program, `analysis` the graph of that program, `first call` one
step of the learner, XLA included. Raw results go to benchmarks/results/compile_time.json. Exit
status 1: two compilations of one model differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainevent
import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace as bt
from braintrace.frontend import extract_module_info, graph_of
from braintrace.program import fingerprint

WIDTH = 8
COLUMNS = ("trace", "analysis", "first call")


class Stack(brainstate.nn.Module):
    """Layers of two states each, as many as it takes to reach a number of equations."""

    def __init__(self, layer: Callable, per_layer: int, equations: int):
        super().__init__()
        rng = np.random.default_rng(0)
        weight = lambda: brainstate.ParamState(jnp.asarray(0.3 * rng.normal(size=(WIDTH, WIDTH))))
        self.layer, self.count = layer, max(1, round(equations / per_layer))
        self.w = [(weight(), weight()) for _ in range(self.count)]
        self.h = [
            tuple(brainstate.HiddenState(jnp.zeros(WIDTH)) for _ in range(2))
            for _ in range(self.count)
        ]

    def update(self, x: Any) -> Any:
        for weights, (a, b) in zip(self.w, self.h, strict=True):
            a.value, b.value = self.layer(x, a.value, b.value, *(w.value for w in weights))
            x = b.value
        return x


def chain(x: Any, a: Any, b: Any, w: Any, u: Any) -> tuple[Any, Any]:
    """A long chain of element-wise equations behind one operator."""
    v = bt.matmul(x, w) + bt.matmul(b, u)
    for _ in range(12):
        v = jnp.tanh(0.9 * v + 0.1 * a) - 0.2 * jnp.sin(b)
    return 0.9 * a + v, 0.8 * b + v


def mixing(x: Any, a: Any, b: Any, w: Any, u: Any) -> tuple[Any, Any]:
    """Operators, layer norms and softmax, few element-wise equations."""
    norm = lambda v: (v - v.mean()) / jnp.sqrt(v.var() + 0.1)
    new = 0.9 * a + norm(bt.matmul(x, w)) + 0.1 * jax.nn.softmax(b)
    return jnp.tanh(norm(new)), 0.8 * b + bt.matmul(jnp.tanh(new), u)


FAMILIES = {"chain": chain, "mixing": mixing}


def equations(model: Any) -> int:
    return len(extract_module_info(model, jnp.zeros(WIDTH)).step.program.equations)


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = jax.block_until_ready(fn())
    return time.perf_counter() - start, out


def measure(family: str, size: int, repeats: int, call: bool) -> dict[str, Any]:
    """Times of one model (the best of `repeats`; the first call once)."""
    per_layer = equations(Stack(FAMILIES[family], 1, 2)) // 2
    x, row = jnp.ones(WIDTH), {}
    make = lambda: Stack(FAMILIES[family], per_layer, size)
    infos = [timed(lambda: [extract_module_info(make(), x)]) for _ in range(repeats)]
    info = infos[0][1][0]
    graphs = [timed(lambda i=i: [graph_of(i[0])]) for _, i in infos]
    row["trace"], row["analysis"] = min(t for t, _ in infos), min(t for t, _ in graphs)
    row["equations"], row["layers"] = len(info.step.program.equations), len(make().h)
    if call:
        learner = bt.D_RTRL(make())
        learner.compile_graph(x)
        row["first call"] = timed(lambda: learner(x))[0]
    first, second = (compiled(make(), x) for _ in range(2))
    row["identical"] = first == second
    return {"family": family, **row}


def compiled(model: Any, x: Any) -> tuple:
    """What two compilations of one model must agree on."""
    learner = bt.D_RTRL(model)
    learner.compile_graph(x)
    info = learner.graph.module_info
    program = fingerprint(info.step.program, info.consts, values=True)
    tangent = fingerprint(learner.graph.analysis.tangent.program, ())
    return program, tangent, learner.report.to_str(3)


class Sparse(brainstate.nn.Module):
    """Adapting units with a fixed number of recurrent synapses each."""

    def __init__(self, units: int, fan: int):
        super().__init__()
        columns = np.random.default_rng(0).integers(0, units, units * fan)
        parts = (jnp.zeros(units * fan), jnp.asarray(columns), jnp.arange(units + 1) * fan)
        self.structure = brainevent.CSR(parts, shape=(units, units))
        self.w = brainstate.ParamState(jnp.zeros((WIDTH, units)))
        self.u = brainstate.ParamState(jnp.zeros(units * fan))
        self.units = units
        brainevent.config.set_backend("cpu", "jax_raw")

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        self.v, self.a = (
            brainstate.HiddenState(jnp.zeros((batch_size, self.units))) for _ in range(2)
        )

    def update(self, x: Any) -> Any:
        z = jax.nn.sigmoid(self.v.value - self.a.value)
        recurrent = bt.sparse_matmul(z, self.u.value, sparse_mat=self.structure)
        self.v.value = 0.9 * self.v.value + bt.matmul(x, self.w.value) + recurrent
        self.a.value = 0.98 * self.a.value + 0.02 * z
        return z


def batches(units: int, fan: int, sizes: list[int], repeats: int) -> dict[int, dict[str, float]]:
    """Seconds to trace and to analyse a sparse network: the best of interleaved repeats."""
    model = Sparse(units, fan)
    rows: dict[int, dict[str, float]] = {b: {} for b in sizes}
    for _ in range(repeats):
        for b, row in rows.items():
            brainstate.nn.init_all_states(model, batch_size=b)
            x = jnp.ones((b, WIDTH))
            trace, (info,) = timed(lambda x=x: [extract_module_info(model, x)])
            analysis, _ = timed(lambda i=info: [graph_of(i)])
            now = {"trace": trace, "analysis": analysis}
            row.update({k: min(row.get(k, np.inf), s) for k, s in now.items()})
    return rows


def exponent(rows: list[dict], column: str) -> float:
    """The slope of log time against log equations."""
    pairs = [(r["equations"], r[column]) for r in rows if column in r]
    if len(pairs) < 2:
        return float("nan")
    n, t = np.log(np.array(pairs)).T
    return float(np.polyfit(n, t, 1)[0])


def table(rows: list[dict]) -> str:
    lines = []
    for family in dict.fromkeys(r["family"] for r in rows):
        mine = [r for r in rows if r["family"] == family]
        lines.append(f"{family:>10}{'layers':>8}" + "".join(f"{c + ' s':>14}" for c in COLUMNS))
        lines[-1] += f"{'ms/equation':>14}{'identical':>11}"
        for r in mine:
            cells = "".join(f"{r[c]:14.3f}" if c in r else f"{'-':>14}" for c in COLUMNS)
            each = 1e3 * (r["trace"] + r["analysis"]) / r["equations"]
            told = "yes" if r["identical"] else "NO"
            lines.append(f"{r['equations']:>10}{r['layers']:>8}{cells}{each:14.3f}{told:>11}")
        slopes = "".join(f"{exponent(mine, c):14.2f}" for c in COLUMNS)
        lines += [f"{'exponent':>18}{slopes}", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 1000, 3000, 5000])
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-call", action="store_true", help="leave out the first call")
    parser.add_argument("--batches", type=int, nargs="+", help="a sparse network at these batches")
    parser.add_argument("--units", type=int, default=20_000, help="units of the sparse network")
    parser.add_argument("--fan", type=int, default=20, help="recurrent synapses per unit")
    options = parser.parse_args()
    if options.batches:
        by_batch = batches(options.units, options.fan, options.batches, options.repeats + 1)
        first = by_batch[options.batches[0]]["analysis"]
        print(f"{options.units:,} units, {options.fan} synapses each")
        for b, row in by_batch.items():
            print(
                f"  B={b:<6}trace {row['trace']:8.3f} s  analysis {row['analysis']:8.3f} s"
                f"  {row['analysis'] / first:6.2f} x"
            )
        return 0
    rows = []
    for family in [options.family] if options.family else FAMILIES:
        for size in options.sizes:
            rows.append(measure(family, size, options.repeats, not options.no_call))
            print(rows[-1], file=sys.stderr, flush=True)
    target = Path(__file__).parent / "results" / "compile_time.json"
    target.parent.mkdir(exist_ok=True)
    slopes = {
        f: {c: exponent([r for r in rows if r["family"] == f], c) for c in COLUMNS}
        for f in FAMILIES
    }
    found = {"jax": jax.__version__, "rows": rows, "exponents": slopes}
    target.write_text(json.dumps(found, indent=1))
    print(table(rows))
    return int(not all(r["identical"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
