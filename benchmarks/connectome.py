"""Firing rates of a network of the size of the fly's brain, trained online.

    python benchmarks/connectome.py --scale 0.01
    python benchmarks/connectome.py --updates 200 --checkpoint out/fly.ckpt --plot out/fly.png
    python benchmarks/connectome.py --edges edges.parquet --rule pp_prop
    python benchmarks/connectome.py --measure --rule pp_prop --steps 1000 --block 10
    python benchmarks/connectome.py --measure --neurons 1000000 --synapses 50000000 --rule pp_prop

139,255 neurons with current or conductance synapses, 15.1 million of them, as in
examples/connectome.py; or the network of a file of edges: columns pre, post, weight (mV; the sign
of a sender is that of the sum of its weights), perhaps delay (steps), in CSV, Parquet or npz.

A checkpoint is written after every update and continued from if it is there. `--measure` only times
gradients: a line of JSON with seconds to build, to analyse, and until the first gradient, seconds
per step, and the peak memory, of the device or, on a CPU, of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
import scipy.sparse

import braintrace

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from connectome import CHANNELS, OPTIMIZER, Connectome, random_edges


class Conductances(Connectome):
    """Conductances in units of the leak, with their reversal potentials.

    A synapse is trained by its effect at rest, in mV as a current has it.
    """

    def connect(self, sender, receiver, weight, sign):
        shape = (self.delays * self.n, self.n)
        part = lambda own: (weight[own], (sender[own], receiver[own]))
        parts = (scipy.sparse.coo_array(part(sign == kind), shape) for kind in (1, -1))
        self.synapses = [braintrace.nn.SparseLinear(p) for p in parts]

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.g = [brainstate.HiddenState(jnp.zeros(self.n)) for _ in range(2)]

    def arriving(self, sent, V, keep):
        total = 0 * u.mV
        for layer, g, reversal in zip(self.synapses, self.g, (52, -18), strict=True):
            g.value = keep * g.value + layer(abs(sent)) / abs(reversal)
            total += g.value * (reversal * u.mV - V)
        return total


def network_of(options: argparse.Namespace) -> Connectome:
    """The network of the command line."""
    kind = Conductances if options.kind == "conductance" else Connectome
    if options.edges:
        edges = braintrace.data.read_edges(options.edges)
        return kind({k: v for k, v in edges.items() if k != "id"})
    sizes = {"neurons": options.neurons, "synapses": options.synapses}
    return kind(random_edges(options.scale, **{k: v for k, v in sizes.items() if v}))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of the gradients of one rule."""
    start = time.perf_counter()
    network = network_of(options)
    built = time.perf_counter()
    learner, loss = learner_of(network, options)
    jax.block_until_ready([s.value for s in learner.states().values()])
    analysed = time.perf_counter()
    xs = jax.random.uniform(jax.random.key(0), (options.steps, CHANNELS))

    def gradient() -> None:
        out = learner.etrace_grad(xs, step_fn=loss, block_size=options.block or None)
        jax.block_until_ready(out)

    gradient()
    first = time.perf_counter()
    times = []
    for _ in range(options.repeats):
        begin = time.perf_counter()
        gradient()
        times.append(time.perf_counter() - begin)
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    states = network.states(brainstate.ParamState).values()
    return {
        "device": device.device_kind,
        "rule": options.rule,
        "neurons": int(network.n),
        "synapses": sum(a.size for s in states for a in jax.tree.leaves(s.value)),
        "steps": options.steps,
        "block": options.block,
        "spikes per step": float(jnp.mean(network.rate.value.mantissa) / 1000),
        "build s": round(built - start, 2),
        "analysis s": round(analysed - built, 2),
        "first gradient s": round(first - analysed, 2),
        "ms per step": round(1e3 * min(times) / options.steps, 4),
        "peak GB": round(stats.get("peak_bytes_in_use", host) / 1e9, 3),
        "of": "device" if stats else "process",
    }


def learner_of(network: Connectome, options: argparse.Namespace) -> tuple[Any, Any]:
    """The learner, and the loss of a step: the rates of a hundredth of all neurons, at least 10."""
    more = {} if options.rule == "d_rtrl" else {"decay_or_rank": 0.9}
    learner = braintrace.compile(network, options.rule, jnp.zeros(CHANNELS), **more)
    some, target = subset(network.n)
    return learner, lambda x: jnp.mean((learner(x)[some] / u.Hz - target) ** 2)


def subset(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Neurons with a target, and the targets in Hz."""
    rng = np.random.default_rng(1)
    size = min(n, max(10, n // 100))
    return rng.choice(n, size, replace=False), rng.uniform(5, 20, size)


def rates(network: Connectome, steps: int = 500) -> np.ndarray:
    """The rates of the trained neurons in the next steps."""
    some, _ = subset(network.n)

    @brainstate.transform.jit
    def run(xs):
        def step(total, x):
            network(x)
            return total + network.spikes()[some], None

        return brainstate.transform.scan(step, jnp.zeros(len(some)), xs)[0] / steps * 1000

    return np.asarray(run(jax.random.uniform(jax.random.key(7), (steps, CHANNELS))))


def train(options: argparse.Namespace) -> None:
    from tqdm import trange

    network = network_of(options)
    learner, loss = learner_of(network, options)
    print(learner.report.to_str(1))
    target = subset(network.n)[1]
    off = lambda now: float(np.sqrt(np.mean((now - target) ** 2)))
    before, first = rates(network), 0
    learner.init_optimizer(OPTIMIZER)
    if options.checkpoint and Path(options.checkpoint).exists():
        saved = learner.load(options.checkpoint, optimizer=OPTIMIZER)
        first, before = saved.step, np.asarray(saved.extra)
        print(f"{options.checkpoint}: goes on after update {first}")
    print(f"{network.n:,} neurons, rates off by {off(before):.2f} Hz")
    for i in (bar := trange(first, options.updates)):
        xs = jax.random.uniform(jax.random.key(i), (options.steps, CHANNELS))
        losses = learner.etrace_train(
            xs, step_fn=loss, optimizer=OPTIMIZER, update_every=options.block
        )
        bar.set_postfix_str(f"off by {float(losses.mean()) ** 0.5:.2f} Hz")
        if options.checkpoint:
            learner.save(options.checkpoint, step=i + 1, extra=before, optimizer=OPTIMIZER)
    after = rates(network)
    print(f"rates off by {off(before):.2f} Hz before, {off(after):.2f} Hz after")
    if options.plot:
        plot(options.plot, target, before, after)


def plot(path: str, target: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(target, before, ".", color="0.7", label="before")
    axes.plot(target, after, ".", color="C0", label="after")
    axes.axline((0, 0), slope=1, color="k", lw=0.5)
    axes.set(xlabel="target (Hz)", ylabel="rate (Hz)")
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the network that is drawn")
    parser.add_argument("--neurons", type=int, help="its neurons at scale 1")
    parser.add_argument("--synapses", type=int, help="its synapses at scale 1")
    parser.add_argument("--edges", help="a file of edges instead")
    parser.add_argument("--kind", choices=("current", "conductance"), default="current")
    parser.add_argument("--rule", choices=("d_rtrl", "pp_prop"), default="d_rtrl")
    parser.add_argument("--steps", type=int, default=50, help="of 1 ms, per update or gradient")
    parser.add_argument(
        "--block", type=int, default=10, help="steps per block or per update; 0: as many as fit"
    )
    parser.add_argument("--updates", type=int, default=20, help="sequences of --steps to train on")
    parser.add_argument("--checkpoint", help="file to write, and to continue from")
    parser.add_argument("--plot", help="file for a plot of the rates before and after")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: what JAX finds")
    parser.add_argument("--measure", action="store_true", help="time gradients, train nothing")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(options.device, options.device))
    brainstate.environ.set(dt=1.0 * u.ms)
    if options.measure:
        print(json.dumps(measure(options)), flush=True)
    else:
        train(options)


if __name__ == "__main__":
    main()
