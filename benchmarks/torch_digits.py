"""The network of examples/torch_spiking_digits.py, learned online and by torch's backward pass.

    python benchmarks/torch_digits.py [--seeds 3] [--length 100] [--epochs 8]

Every row is a process, with the same images and as many sequences. `online` updates every 25 steps
with Adam(1e-3), `sequence` and `bptt` after a sequence with Adam(2e-3). A gradient works with the
traces and the buffers of XLA, or with what autograd keeps; `rise` is how far the resident memory of
the process rose, compilation included. `--epochs 0` learns two sequences, for the memory alone.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = ("online", "sequence", "bptt")


def run(method, seed, length, epochs):
    """Learn; returns accuracy, seconds of an epoch, bytes of a gradient, bytes of the process."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
    import jax
    import torch
    import torch_spiking_digits as example
    from torch_time import kept_bytes

    import braintrace.torch as bt

    torch.manual_seed(seed)
    net = example.network()
    adam = torch.optim.Adam(net.parameters(), 1e-3 if method == "online" else 2e-3)
    images, labels = example.images[0], example.labels
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def losses(xs, ys):
        net[1].mem, net[3].mem = torch.zeros(0), torch.zeros(0)
        return torch.stack([example.loss(net(x), y) for x, y in zip(xs, ys, strict=True)])

    if method == "bptt":

        def learn(xs, ys):
            adam.zero_grad()
            losses(xs, ys).sum().backward()
            adam.step()

        working = lambda xs, ys: kept_bytes(net, lambda: losses(xs, ys).sum().backward())
    else:
        every = 25 if method == "online" else length
        learner = bt.online(net, "d_rtrl", None, images[:100])
        train = learner.train(example.loss, adam, every, block_size=25)

        def learn(xs, ys):
            learner.reset(None, xs[0])
            train(xs, ys)

        def working(xs, ys):
            with learner._on():
                of_arrays = lambda out, y: jax.nn.log_softmax(out[1])[
                    jax.numpy.arange(100), y
                ].sum()
                gradient = learner.online.grad(of_arrays, block_size=25)
                arrays = learner._weights(), learner._carry, *learner._arrays((xs, ys))
                memory = jax.jit(gradient).lower(*arrays).compile().memory_analysis()
            return learner.memory + memory.temp_size_in_bytes

    before, started = peak(), time.time()
    for _ in range(max(epochs, 1)):
        for chosen in torch.randperm(1400).split(100)[: None if epochs else 2]:
            learn(images[chosen].expand(length, -1, -1), labels[chosen].expand(length, -1))
    seconds, rise = (time.time() - started) / max(epochs, 1), peak() - before
    xs, ys = images[:100].expand(length, -1, -1), labels[:100].expand(length, -1)
    steps = slice(None, 25 if method == "online" else None)
    if method != "bptt":
        learner.reset(None, xs[0])
    needed = working(xs[steps], ys[steps])
    with torch.no_grad():
        net[1].mem, net[3].mem = torch.zeros(0), torch.zeros(0)
        scores = sum(net(x)[1] for x in example.new_images[0].expand(length, -1, -1))
    right = float((scores.argmax(-1) == example.new_labels).float().mean())
    return right, seconds, needed, rise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(*run(given.one[0], int(given.one[1]), given.length, given.epochs))
        sys.exit()
    print(
        "| | accuracy | s per epoch | a gradient works with, MB | rise, MB |\n|---|---|---|---|---|"
    )
    for method in given.methods:
        rows = []
        for seed in range(given.seeds):
            more = ["--length", str(given.length), "--epochs", str(given.epochs)]
            command = [sys.executable, __file__, "--one", method, str(seed), *more]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append([float(v) for v in done.stdout.split()[-4:]])
        rights, *others = zip(*rows, strict=True)
        seconds, needed, rise = (statistics.median(v) for v in others)
        scores = ", ".join(f"{r:.1%}" for r in rights)
        print(f"| {method} | {scores} | {seconds:.1f} | {needed / 1e6:.1f} | {rise / 1e6:.0f} |")
