"""Handwritten digits with a spiking network of snnTorch that learns online, in PyTorch.

An image of 8 x 8 pixels is a constant current for 100 steps. The network is one of snnTorch as it
is, its membranes inside of its layers; loss and optimizer are torch's. The optimizer takes a step
after every 25 steps of the network, while the images are still shown, so memory does not grow with
their length. `benchmarks/torch_digits.py` measures the same network by torch's backward pass.

    python examples/torch_spiking_digits.py [--small]
"""

import sys

import snntorch
import torch
from sklearn.datasets import load_digits

import braintrace.torch as bt

STEPS, HIDDEN, EPOCHS = (5, 16, 1) if "--small" in sys.argv else (100, 128, 8)
digits = load_digits()
images, labels = torch.tensor(digits.data / 8).float(), torch.tensor(digits.target)
images, new_images = images.expand(STEPS, -1, -1).split([1400, 397], 1)
labels, new_labels = labels.split([1400, 397])


def network():
    """Two layers of leaky integrate-and-fire neurons; the second one only sums."""
    sums = snntorch.Leaky(0.9, init_hidden=True, output=True, reset_mechanism="none")
    spiking = torch.nn.Linear(64, HIDDEN), snntorch.Leaky(0.9, init_hidden=True)
    return torch.nn.Sequential(*spiking, torch.nn.Linear(HIDDEN, 10), sums)


def loss(out, label):
    """Of one step; the network returns spikes and sums."""
    return torch.nn.functional.cross_entropy(out[1], label)


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    learner = bt.online(net, "d_rtrl", None, images[0, :100])
    train = learner.train(loss, torch.optim.Adam(net.parameters(), 1e-3), update_every=25)
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(1400).split(100):
            learner.reset(None, images[0, chosen])
            losses = train(images[:, chosen], labels[chosen].expand(STEPS, -1))
        learner.reset(None, new_images[0])
        right = (learner.scan(new_images)[1].sum(0).argmax(-1) == new_labels).float().mean()
        print(f"epoch {epoch}: loss {losses.mean():.3f}, {right:.1%} of new images are right")
