"""A learner of a PyTorch module beside PyTorch's own BPTT: time and memory of one sequence.

    python benchmarks/torch_time.py [--length 128] [--threads 1]

Every row runs both in one process, in turns; the times are medians, the memory what BPTT keeps for
its backward pass beside the traces of the learner. `--threads` are those of PyTorch; JAX takes what
it has. Where other processes run, threads of PyTorch that wait for each other cost it most.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pytorch"))
import torch_cells as cells

import braintrace.torch as bt

INPUTS, CLASSES = 32, 10


class LIF(nn.Module):
    """A layer of leaky integrate-and-fire neurons."""

    def __init__(self, sizes):
        super().__init__()
        inputs, units, outputs = sizes
        self.cell, self.out = nn.Linear(inputs, units), nn.Linear(units, outputs)

    def forward(self, h, x):
        h = 0.9 * (h - cells.spike(h - 1)) + self.cell(x)
        return h, self.out(cells.spike(h - 1))


NETS = {
    "LIF": LIF,
    "minGRU": cells.MinGRU,
    "GRU": lambda sizes: cells.Recurrent(nn.GRUCell, sizes),
}


def bptt(net, h, xs, ys):
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        h, out = net(h, x)
        total = total + F.cross_entropy(out, y)
    total.backward()


def kept_bytes(net, act):
    """What autograd keeps until the backward pass in `act`, each memory once."""
    found = {}
    pack = lambda a: found.setdefault(a.untyped_storage().data_ptr(), a)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        act()
    own = {p.data_ptr() for p in net.parameters()}
    return sum(a.untyped_storage().nbytes() for place, a in found.items() if place not in own)


def timed(act):
    started, wall = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - started, time.perf_counter() - wall


def row(name, n, batch, length, repeats):
    torch.manual_seed(0)
    net, h = NETS[name]((INPUTS, n, CLASSES)), torch.zeros(batch, n)
    xs, ys = torch.randn(length, batch, INPUTS), torch.randint(CLASSES, (length, batch))
    learner = bt.online(net, "d_rtrl", h, xs[0])
    gradient = learner.grad(F.cross_entropy, keep_traces=False)

    def online():
        net.zero_grad()
        learner.reset()
        gradient(xs, ys)

    def backward():
        net.zero_grad()
        bptt(net, h, xs, ys)

    online(), backward()
    pairs = [(timed(online), timed(backward)) for _ in range(repeats)]
    cpu, wall = ([statistics.median(p[i][k] for p in pairs) for i in (0, 1)] for k in (0, 1))
    kept = kept_bytes(net, backward)
    print(
        f"| {name}, N={n}, B={batch}, T={length} | {wall[0] * 1e3:.1f} | "
        f"{wall[1] * 1e3:.1f} | {cpu[0] / cpu[1]:.2f} | "
        f"{learner.memory / 1e6:.1f} | {kept / 1e6:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| network | learner, ms | BPTT, ms | processor time | traces, MB | BPTT keeps, MB |")
    print("|---|---|---|---|---|---|")
    for name, n in (("LIF", 256), ("minGRU", 256), ("GRU", 64), ("GRU", 256)):
        row(name, n, 16, given.length, given.repeats)
