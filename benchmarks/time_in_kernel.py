"""D-RTRL on element-wise recurrences against BPTT by `associative_scan`: time, memory, gradients.

    python benchmarks/time_in_kernel.py                 # the targets; needs a GPU
    python benchmarks/time_in_kernel.py --rows mingru lif --rounds 20
    python benchmarks/time_in_kernel.py --quick         # tiny sizes: does the harness work?

Every cell is a plain step function with a linear read-out of 16 outputs, and N/4 inputs. Modes are
timed in turn in one process: BPTT, D-RTRL with traces kept and dropped, dropped in blocks of at
most half a gigabyte, and kept with `engine="scan"`. Raw times go to
benchmarks/results/time-in-kernel.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import braintrace

RESULTS = Path(__file__).parent / "results" / "time-in-kernel.json"
MODES = ["bptt", "kept", "dropped", "dropped, 0.5 GB", "kept, scan"]
OUTPUTS = 16
RNG = np.random.default_rng(0)


def draw(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


def weight(*shape: int) -> jax.Array:
    return draw(*shape, scale=shape[0] ** -0.5)


class Cell(NamedTuple):
    """Parameters, the first state of some samples, a step; all states at once for BPTT."""

    params: dict[str, jax.Array]
    start: Callable[[int], Any]
    step: Callable[..., Any]
    states: Callable[..., Any] | None = None


def linear(gates: Callable, params: dict, n: int) -> Cell:
    """`h = a h + b`, where `gates` gives a and b; complex numbers as two states."""
    two = "out_im" in params

    def read(p, h):
        return h.real @ p["out"] - h.imag @ p["out_im"] if two else h @ p["out"]

    def step(p, h, x):
        a, b = gates(p, x)
        h = a * (lax.complex(*h) if two else h) + b
        return (h.real, h.imag) if two else h, read(p, h)

    def outputs(p, xs):
        a, b = gates(p, xs)
        a = jnp.broadcast_to(a, b.shape)
        join = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
        return read(p, lax.associative_scan(join, (a, b))[1])

    zeros = lambda b: jnp.zeros((b, n))
    return Cell(params, lambda b: (zeros(b), zeros(b)) if two else zeros(b), step, outputs)


def mingru(i: int, n: int) -> Cell:
    def gates(p, x):
        z = jax.nn.sigmoid(x @ p["wz"] + p["bz"])
        return 1 - z, z * (x @ p["wc"])

    both = {"wz": weight(i, n), "wc": weight(i, n), "bz": jnp.full((n,), -1.0)}
    return linear(gates, {**both, "out": weight(n, OUTPUTS)}, n)


def rglru(i: int, n: int) -> Cell:
    def gates(p, x):
        log_a = -8 * jax.nn.sigmoid(x @ p["wr"]) * jax.nn.softplus(p["rate"])
        scale = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), 1e-6))
        return jnp.exp(log_a), scale * jax.nn.sigmoid(x @ p["wi"]) * (x @ p["wu"])

    params = {k: weight(i, n) for k in ("wr", "wi", "wu")}
    return linear(gates, {**params, "rate": draw(n), "out": weight(n, OUTPUTS)}, n)


def lru(i: int, n: int) -> Cell:
    def gates(p, x):
        modulus, b = jnp.exp(-jnp.exp(p["nu"])), jnp.exp(p["gamma"])
        a = lax.complex(modulus * jnp.cos(p["theta"]), modulus * jnp.sin(p["theta"]))
        return a, lax.complex(b * (x @ p["b_re"]), b * (x @ p["b_im"]))

    params = {"nu": draw(n) - 2, "theta": draw(n), "gamma": draw(n)}
    params |= {"b_re": weight(i, n), "b_im": weight(i, n)}
    return linear(gates, {**params, "out": weight(n, OUTPUTS), "out_im": weight(n, OUTPUTS)}, n)


def s5(i: int, n: int) -> Cell:
    def gates(p, x):
        rate = lax.complex(-jnp.exp(p["rate"]), p["frequency"])
        growth = jnp.expm1(rate * jnp.exp(p["step"]))
        return growth + 1, growth / rate * lax.complex(x @ p["b_re"], x @ p["b_im"])

    params = {"rate": draw(n) - 1, "frequency": draw(n), "step": draw(n) - 3}
    params |= {"b_re": weight(i, n), "b_im": weight(i, n)}
    return linear(gates, {**params, "out": weight(n, OUTPUTS), "out_im": weight(n, OUTPUTS)}, n)


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (t,) = primals, tangents
    return spike(v), 0.3 * t / (1 + 5 * jnp.abs(v)) ** 2


def lif(i: int, n: int) -> Cell:
    def step(p, v, x):
        v = 0.9 * v + x @ p["w"] - spike(v - 1)
        return v, spike(v - 1) @ p["out"]

    params = {"w": 3 * weight(i, n), "out": weight(n, OUTPUTS)}
    return Cell(params, lambda b: jnp.zeros((b, n)), step)


class Row(NamedTuple):
    """A workload, and the most that a mode may take: milliseconds, or a multiple of BPTT."""

    cell: Callable[[int, int], Cell]
    n: int
    b: int
    t: int
    most: dict[str, float]
    of_bptt: bool = False


ROWS = {
    "mingru": Row(mingru, 512, 32, 4096, {"kept": 8, "dropped": 4.2, "dropped, 0.5 GB": 4.2}),
    "mingru-long": Row(mingru, 256, 16, 16384, {"kept": 10, "dropped": 6}),
    "mingru-few": Row(mingru, 64, 4, 16384, {}),
    "lru": Row(lru, 512, 32, 4096, {"kept": 1.5, "dropped": 1.5}, True),
    "s5": Row(s5, 512, 32, 4096, {"kept": 1.5, "dropped": 1.5}, True),
    "rglru": Row(rglru, 512, 32, 4096, {"kept": 1.5, "dropped": 1.5}, True),
    "lif": Row(lif, 512, 32, 1000, {"kept": 4}),
}


def loss(out, y):
    return ((out - y) ** 2).mean()


def modes(cell: Cell, b: int) -> dict[str, Callable]:
    """Functions `(params, xs, ys) -> gradients`, or the gradients and the traces."""

    def bptt(p, xs, ys):
        if cell.states is not None:
            return jax.vmap(loss)(cell.states(p, xs), ys).sum()

        def body(state, now):
            state, out = cell.step(p, state, now[0])
            return state, loss(out, now[1])

        return lax.scan(body, cell.start(b), (xs, ys))[1].sum()

    def online(engine: str, keep: bool, **options: Any) -> Callable:
        net = braintrace.online(cell.step, "d_rtrl", engine=engine)
        gradient = net.grad(loss, keep_traces=keep, **options)

        def run(p, xs, ys):
            grads, (carry, _) = gradient(p, net.init(p, cell.start(b), xs[0]), xs, ys)
            return (grads, carry) if keep else grads

        return run

    half = {"memory_budget": 1 << 29}
    return {
        "bptt": jax.grad(bptt),
        "kept": online("auto", True),
        "dropped": online("auto", False),
        "dropped, 0.5 GB": online("auto", False, **half),
        "kept, scan": online("scan", True),
    }


def measured(name: str, row: Row, rounds: int, asked: list[str]) -> dict[str, Any]:
    cell = row.cell(row.n // 4, row.n)
    arrays = (cell.params, draw(row.t, row.b, row.n // 4), draw(row.t, row.b, OUTPUTS))
    print(f"{name}: N={row.n} B={row.b} T={row.t}")
    found: dict[str, Any] = {}
    programs = {}
    for mode, function in modes(cell, row.b).items():
        if mode not in ("bptt", *asked):
            continue
        began = time.perf_counter()
        programs[mode] = program = jax.jit(function).lower(*arrays).compile()
        out = jax.block_until_ready(program(*arrays))
        grads = out[0] if mode.startswith("kept") else out
        reference = found.setdefault("gradient", grads)
        norm = lambda g: float(jnp.linalg.norm(g))
        found[mode] = {
            "first_s": time.perf_counter() - began,
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            "differs": max(norm(grads[k] - g) / norm(g) for k, g in reference.items()),
            "seconds": [],
        }
    for _ in range(rounds):
        for mode, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            found[mode]["seconds"].append(time.perf_counter() - began)
    found.pop("gradient")
    bptt = 1e3 * median(found["bptt"]["seconds"])
    for mode, values in found.items():
        ms = 1e3 * median(values["seconds"])
        most = row.most.get(mode, np.inf) * (bptt if row.of_bptt else 1)
        verdict = (
            "" if most == np.inf else f"  target {most:.1f}: {'met' if ms <= most else 'MISSED'}"
        )
        print(
            f"  {mode:16}{ms:8.2f} ms {ms / bptt:6.2f} BPTT {values['temp_bytes'] / 1e6:7.0f} MB  "
            f"first {values['first_s']:5.1f} s  differs {values['differs']:.0e}{verdict}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    tiny = {"n": 8, "b": 2, "t": 24}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name in options.rows:
        row = ROWS[name]._replace(**tiny) if options.quick else ROWS[name]
        results[name] = measured(name, row, options.rounds, options.modes)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
