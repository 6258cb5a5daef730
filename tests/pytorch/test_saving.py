"""A learner of torch goes on from a file, and leaves Python as C; what cannot is refused."""

import copy
import io
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
import torch_cells as cells  # noqa: E402
from torch import nn  # noqa: E402

import braintrace.torch as bt  # noqa: E402

f64 = torch.float64


class Inside(nn.Module):
    """A membrane inside, and a running mean."""

    def __init__(self):
        super().__init__()
        self.weights, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.decay, self.v = nn.Parameter(torch.full((4,), 0.8)), torch.zeros(2, 4, dtype=f64)

    def forward(self, x):
        self.v = self.decay * self.v + self.norm(self.weights(x))
        return self.v


def begun(rule="d_rtrl", **options):
    torch.manual_seed(0)
    net = Inside().double()
    adam = torch.optim.Adam(net.parameters(), 0.05)
    learner = bt.online(net, rule, None, torch.zeros(2, 3, dtype=f64), **options)
    return net, adam, learner


def data(steps=8):
    torch.manual_seed(1)
    return torch.randn(steps, 2, 3, dtype=f64), torch.randn(steps, 2, 4, dtype=f64)


def test_a_learner_goes_on_from_a_file_in_the_middle_of_a_sequence():
    xs, ys = data()
    net, adam, learner = begun()
    train = learner.train(F.mse_loss, adam, 2)
    train(xs[:4], ys[:4])
    file = io.BytesIO()
    parts = {"net": net, "adam": adam, "learner": learner}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    rest = train(xs[4:], ys[4:])
    file.seek(0)
    saved = torch.load(file)
    other, again, resumed = begun()
    other.load_state_dict(saved["net"])
    again.load_state_dict(saved["adam"])
    resumed.load_state_dict(saved["learner"])
    assert torch.equal(resumed.train(F.mse_loss, again, 2)(xs[4:], ys[4:]), rest)
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(net.v, other.v)
    assert saved["learner"]["steps"] == 4 and saved["learner"]["rule"].startswith("d_rtrl")


def test_a_dict_is_a_copy():
    learner = begun()[2]
    learner.step(data()[0][0])
    saved = learner.state_dict()
    before = {k: a.clone() for k, a in saved.items() if isinstance(a, torch.Tensor)}
    learner.step(data()[0][1])
    assert before and all(torch.equal(saved[k], a) for k, a in before.items())


def test_a_dict_of_another_learner_is_refused_and_changes_nothing():
    learner = begun()[2]
    learner.step(data()[0][0])
    before = learner.state_dict()
    other = begun("pp_prop", decay_or_rank=0.9)[2].state_dict()
    with pytest.raises(ValueError) as found:
        learner.load_state_dict({**other, "inside.v": torch.zeros(5)})
    for part in ("rule: pp_prop", "inside.v: float32[5] in the dict", "  why: ", "  do: "):
        assert part in str(found.value)
    after = learner.state_dict()
    assert all(torch.equal(torch.as_tensor(after[k]), torch.as_tensor(a))
               for k, a in before.items() if k != "rule")  # fmt: skip
    with pytest.raises(TypeError, match="state_dict"):
        learner.load_state_dict(learner.net.state_dict())


@pytest.mark.parametrize("make", [copy.deepcopy, lambda a: torch.save(a, io.BytesIO())])
def test_a_learner_is_neither_copied_nor_pickled(make):
    with pytest.raises(TypeError, match=r"torch.save\(learner.state_dict\(\), path\)"):
        make(begun()[2])


def test_c_of_a_module_is_its_training(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "export"))
    try:
        from compiled import build, difference, run
    finally:
        sys.path.pop(0)
    steps, case = 20, cells.CELLS["min_gru"]
    xs, ys = cells.sequences(case, steps, 1), torch.randn(steps, 1, cells.OUT, dtype=f64)
    make = lambda net: bt.online(net, "d_rtrl", case.state(1), xs[0])
    learner = make(cells.module_of(case))
    how = {"loss": F.mse_loss, "optimizer": optax.adam(1e-2), "path": tmp_path}
    done = learner.export_c(xs[0], ys[0], **how)
    found = run(done, build(done), {"x": xs.numpy(), "target": ys.numpy()})
    net = cells.module_of(case)
    train = make(net).train(F.mse_loss, torch.optim.Adam(net.parameters(), 1e-2))
    assert difference(found.losses, train(xs, ys).numpy()) < 1e-7  # optax's eps is elsewhere
    weight = done.unpack(found.saved[0])["gates_weight"]
    assert difference(weight, np.asarray(net.gates.weight.detach())) < 1e-6
    with pytest.raises(TypeError, match=r"Adam of torch(.|\n)*why: (.|\n)*do: (.|\n)*optax"):
        how["optimizer"] = torch.optim.Adam(net.parameters())
        learner.export_c(xs[0], ys[0], **how)
