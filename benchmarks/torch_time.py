"""A learner of a PyTorch module beside PyTorch's own BPTT: time and memory of one sequence.

    python benchmarks/torch_time.py [--length 128]

Every row runs both in one process, in turns; the time is the median of processor time, the memory
what BPTT keeps for its backward pass beside the traces and the values of a block of the learner.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import braintrace.torch as bt


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


class GRU(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.cell, self.out = nn.GRUCell(32, n), nn.Linear(n, 10)

    def forward(self, h, x):
        h = self.cell(x, h)
        return h, self.out(h)


class LIF(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.cell, self.out = nn.Linear(32, n), nn.Linear(n, 10)

    def forward(self, h, x):
        h = 0.9 * (h - Spike.apply(h - 1)) + self.cell(x)
        return h, self.out(Spike.apply(h - 1))


class MinGRU(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.cell, self.out = nn.Linear(32, 2 * n), nn.Linear(n, 10)

    def forward(self, h, x):
        z, g = self.cell(x).chunk(2, -1)
        z = torch.sigmoid(z)
        h = (1 - z) * h + z * g
        return h, self.out(h)


def bptt(net, h, xs, ys):
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        h, out = net(h, x)
        total = total + F.cross_entropy(out, y)
    total.backward()


def kept_bytes(net, h, xs, ys):
    """What autograd keeps, each memory once."""
    found = {}
    pack = lambda a: found.setdefault(a.untyped_storage().data_ptr(), a)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        bptt(net, h, xs, ys)
    own = {p.data_ptr() for p in net.parameters()}
    return sum(a.untyped_storage().nbytes() for place, a in found.items() if place not in own)


def timed(act):
    started, wall = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - started, time.perf_counter() - wall


def row(kind, n, batch, length, repeats):
    torch.manual_seed(0)
    net, h = kind(n), torch.zeros(batch, n)
    xs, ys = torch.randn(length, batch, 32), torch.randint(10, (length, batch))
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
    kept = kept_bytes(net, h, xs, ys)
    print(
        f"| {kind.__name__}, N={n}, B={batch}, T={length} | {wall[0] * 1e3:.1f} | "
        f"{wall[1] * 1e3:.1f} | {cpu[0] / cpu[1]:.2f} | "
        f"{learner.memory / 1e6:.1f} | {kept / 1e6:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    print("| network | learner, ms | BPTT, ms | processor time | traces, MB | BPTT keeps, MB |")
    print("|---|---|---|---|---|---|")
    for kind, n in ((LIF, 256), (MinGRU, 256), (GRU, 64), (GRU, 256)):
        row(kind, n, 16, given.length, given.repeats)
