"""Handwritten digits with a spiking network of snnTorch that learns online, in PyTorch.

An image of 8 x 8 pixels is a constant current for 100 steps. The network is one of snnTorch as it
is, its membranes inside of its layers; the optimizer is torch's, and so is the loss. A gradient
keeps traces and the values of 25 steps, so its memory does not grow with the length. With --bptt
the same network learns by torch's own backward pass, which keeps the values of all steps.

    python examples/torch_spiking_digits.py [--small] [--bptt]
"""

import argparse
import time

import snntorch
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import braintrace.torch as bt

STEPS, TRAIN, SIZE = 100, 1400, 100  # of 1797 images


class Net(torch.nn.Module):
    """Two layers of leaky integrate-and-fire neurons; the second one only sums."""

    def __init__(self, hidden):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10)
        self.spiking = snntorch.Leaky(0.9, init_hidden=True)
        self.sum = snntorch.Leaky(0.9, init_hidden=True, reset_mechanism="none", output=True)

    def forward(self, image):
        return self.sum(self.second(self.spiking(self.first(image))))[1]

    def reset(self):
        """What a new image does not see."""
        self.spiking.mem, self.sum.mem = torch.zeros(0), torch.zeros(0)


def main(small=False, bptt=False, seed=0):
    """Train and test; returns the accuracy on images that were held out."""
    torch.manual_seed(seed)
    steps, hidden, epochs = (5, 16, 1) if small else (STEPS, 128, 8)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 8).float(), torch.tensor(digits.target)
    net = Net(hidden)
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    learner = bt.online(net, "d_rtrl", None, images[:SIZE])
    gradient = learner.grad(F.cross_entropy, block_size=25, keep_traces=False)

    def by_bptt(xs, ys):
        net.reset()
        losses = torch.stack([F.cross_entropy(net(x), y) for x, y in zip(xs, ys, strict=True)])
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def accuracy():
        net.reset()
        scores = sum(net(images[TRAIN:]) for _ in range(steps))
        return float((scores.argmax(-1) == labels[TRAIN:]).float().mean())

    started = time.time()
    for epoch in range(epochs):
        for chosen in torch.randperm(TRAIN).split(SIZE)[: 2 if small else None]:
            xs, ys = (a[chosen].expand(steps, *a[chosen].shape) for a in (images, labels))
            if not bptt:
                learner.reset()
            adam.zero_grad()
            losses = by_bptt(xs, ys) if bptt else gradient(xs, ys)
            adam.step()
        right = accuracy()
        took = f"{time.time() - started:4.0f} s, epoch {epoch}"
        print(f"{took}: loss {losses.mean():.3f}, {right:.1%} of new images are right")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, learns little")
    parser.add_argument("--bptt", action="store_true", help="by torch's backward pass")
    arguments = parser.parse_args()
    main(arguments.small, arguments.bptt)
