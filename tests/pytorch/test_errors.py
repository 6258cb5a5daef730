"""What cannot be learned is refused, in four parts and all of it at once."""
# ruff: noqa: E501

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import braintrace  # noqa: E402
import braintrace.torch as bt  # noqa: E402


class Net(nn.Module):
    """A leaky unit whose input goes through a function of the test."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.rand(3)), function
        self.layer = nn.Linear(3, 3)
        self.count, self.seen = 0, []

    def forward(self, h, x):
        h = 0.9 * h + self.function(self, self.w * x)
        return h, h


def learner(function=lambda net, v: v, rule="d_rtrl", **options):
    return bt.online(Net(function), rule, torch.zeros(2, 3), torch.ones(2, 3), **options)


def refused(kind, act, *words):
    """The error has four parts, of which `words` are some."""
    with pytest.raises(kind) as found:
        act()
    text = str(found.value)
    assert "  why: " in text and "  do: " in text
    for word in words:
        assert word in text, text
    return text


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return (v > 0).float()


class BadBackward(NoBackward):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.nothing


class Dirty(NoBackward):
    @staticmethod
    def forward(ctx, v):
        ctx.mark_dirty(v)
        return v


class Clipped(NoBackward):
    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


outside, learned = torch.zeros(2, 3), torch.ones(3, requires_grad=True)
NOT = braintrace.NotSupportedError


def counted(net, v):
    net.count += 1
    return v


def listed(net, v):
    net.seen.append(v)
    return v


def scaled(net, v):
    net.w.data.mul_(0.5)
    return v


def unknown(net, v):
    a = torch.special.bessel_j0(v)
    return a + torch.special.airy_ai(v)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unknown, ("2 operator(s)", "aten.special_bessel_j0.default, aten.special_airy_ai.default",
                   "test_errors.py:", "register(torch.ops.aten.special_bessel_j0")),
        (lambda net, v: F.dropout(v, 0.5), ("random numbers: aten.bernoulli_", "net(state, x, noise)")),
        (lambda net, v: v + torch.randn(3), ("aten.randn", "test_errors.py:")),
        (lambda net, v: v if v.sum() > 0 else -v, ("the value of a tensor", "torch.where")),
        (lambda net, v: v * v.max().item(), ("the value of a tensor", "test_errors.py:")),
        (lambda net, v: v + v[v > 0].sum(), ("the shape of what aten.index", "torch.where")),
        (lambda net, v: (outside.add_(v), v)[1], ("writes into a tensor", "aten.add_", "a buffer")),
        (scaled, ("writes into the parameter(s) w", "between calls")),
        (counted, ("changes count of the module", "keep a tensor")),
        (listed, ("changes seen of the module",)),
        (lambda net, v: NoBackward.apply(v), ("the derivative of NoBackward", "its backward raised")),
        (lambda net, v: BadBackward.apply(v), ("BadBackward", "AttributeError", "test_errors.py:")),
        (lambda net, v: Dirty.apply(v.clone()), ("mark_dirty", "return a new tensor")),
        (lambda net, v: v * learned, ("comes from outside", "test_errors.py:", "torch.no_grad()")),
        (lambda net, v: v[None].squeeze_(0), ("aten.squeeze_", "changes the shape", "x.squeeze(1)")),
        (lambda net, v: torch.func.vmap(net.layer)(v), ("changes the shape", "place of vmap")),
        (lambda net, v: torch.autograd.grad((v.detach().requires_grad_() ** 2).sum(), v),
         ("torch.autograd.grad", "test_errors.py:", "torch.func.grad")),
        (lambda net, v: v * torch.as_tensor(v.numpy()), ("the value of a tensor", "test_errors.py:")),
        (lambda net, v: v * np.tanh(v), ("the value of a tensor", "test_errors.py:")),
        (lambda net, v: (v.register_hook(abs), v)[1], ("a hook on a tensor", "autograd.Function")),
        (lambda net, v: F.embedding(torch.tensor([0, 1]), net.layer.weight, scale_grad_by_freq=True),
         ("aten.embedding", "scale_grad_by_freq")),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_refused(function, words):
    refused(NOT, lambda: learner(function), *words)


def test_a_derivative_that_is_not_linear_is_refused_by_rules_that_follow_everything():
    refused(NOT, lambda: learner(lambda net, v: Clipped.apply(v), "rtrl"), "no forward derivative")


def test_backward_hooks_are_refused():
    net = Net(lambda net, v: v)
    net.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    start = lambda: bt.online(net, "d_rtrl", torch.zeros(2, 3), torch.ones(2, 3))
    refused(NOT, start, "Net has backward hooks", "p.grad")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: bt.online(lambda h, x: (h, h), "d_rtrl", torch.zeros(2)), ("type function", "nn.Module")),
        (lambda: bt.online(nn.ReLU(), "d_rtrl", torch.zeros(2), torch.zeros(2)), ("no parameter",)),
        (lambda: bt.online(nn.Linear(2, 2), "d_rtrl", torch.zeros(1, 2)),
         ("not a pair", "net(*inputs) -> out")),
        (lambda: bt.online(nn.GRUCell(2, 2), "d_rtrl", torch.zeros(1, 2), torch.zeros(1, 2)),
         ("nn.GRUCell takes its input first", "return state, self.out(state)")),
        (lambda: bt.online(nn.GRU(2, 2), "d_rtrl", torch.zeros(1, 2), torch.zeros(1, 2)),
         ("nn.GRU runs over a whole sequence", "call nn.GRUCell", "weight_ih_l0 of nn.GRU")),
        (lambda: bt.online(nn.LSTM(2, 2), "d_rtrl", torch.zeros(1, 2), torch.zeros(1, 2)),
         ("nn.LSTM runs over", "nn.LSTMCell")),
        (lambda: learner().step(torch.ones(2, 3).to_sparse()), ("torch.sparse_coo", "to_dense()")),
        (lambda: learner().grad(3), ("the loss has type int",)),
        (lambda: learner().train(F.mse_loss, object()), ("optimizer has type object", "torch.optim")),
        (lambda: bt.register("aten.add", jnp.add), ("no operator of torch", "torch.ops")),
    ],
)  # fmt: skip
def test_wrong_types_are_refused(act, words):
    refused(TypeError, act, *words)


def test_an_optimizer_of_something_else_is_refused():
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    refused(
        ValueError, lambda: learner().train(F.mse_loss, optimizer), "no parameter of the module"
    )


def test_a_loss_that_needs_the_gradient_of_something_else_is_refused():
    one, ones, readout = learner(), torch.ones(4, 2, 3), nn.Linear(3, 3)
    penalised = lambda out, y: F.mse_loss(out, y) + one.net.w.pow(2).sum()
    read = lambda out, y: F.mse_loss(readout(out), y)
    for loss in (penalised, read):
        refused(
            NOT, lambda loss=loss: one.grad(loss)(ones, ones), "outside of the module's forward"
        )


def test_what_was_computed_with_a_gradient_is_refused():
    one, layer = learner(), nn.Linear(3, 3)
    refused(ValueError, lambda: one.step(layer(torch.ones(2, 3))), "with a gradient", "x.detach()")
    start = nn.Parameter(torch.zeros(2, 3))
    again = lambda: one.reset(start)
    refused(ValueError, again, "a parameter is passed", "initial state")
    one.step(torch.ones(2, 3, requires_grad=True))


def test_a_module_without_a_device_of_jax_is_refused():
    net, ones = Net(lambda net, v: v), torch.ones(2, 3)
    start = lambda: bt.online(net, "d_rtrl", torch.zeros(2, 3), ones)
    net.to("meta")
    refused(NOT, start, "is on meta", "net.cpu()")
    net.layer.to_empty(device="cpu")
    refused(NOT, start, "several devices: cpu, meta", "net.to(device)")
    refused(ValueError, lambda: learner().step(ones.to("meta")), "on meta, the module on cpu")


def test_torch_script_and_an_optimizer_that_asks_again_are_refused():
    net = Net(lambda net, v: v)
    net.layer = torch.jit.script(net.layer)
    start = lambda: bt.online(net, "d_rtrl", torch.zeros(2, 3), torch.ones(2, 3))
    refused(NOT, start, "layer is TorchScript", "torch.jit.script")
    one = learner()
    optimizer = torch.optim.LBFGS(one.net.parameters())
    refused(NOT, lambda: one.train(F.mse_loss, optimizer), "LBFGS", "torch.optim.Adam")


class InputFirst(Net):
    def forward(self, x, h):
        return super().forward(h, x)


@dataclasses.dataclass
class Pair:
    h: object


@pytest.mark.parametrize(
    ("net", "state", "words"),
    [
        (InputFirst, torch.zeros(2, 3), ("InputFirst.forward(x, h) has its input", "self, h, x")),
        (Net, Pair(torch.zeros(2, 3)), ("type Pair", "register_dataclass")),
    ],
)
def test_steps_and_states_of_another_form_are_refused(net, state, words):
    start = lambda: bt.online(net(lambda net, v: v), "d_rtrl", state, torch.ones(2, 3))
    refused(TypeError, start, *words)


def test_a_list_of_steps_and_a_module_without_a_state_are_refused():
    refused(TypeError, lambda: learner().scan([torch.ones(2, 3)] * 4), "a list of 4", "torch.stack")
    start = lambda: bt.online(Net(lambda net, v: v), "d_rtrl", None, torch.ones(2, 3))
    refused(
        TypeError, start, "Net.forward(h, x) is not for 1 argument(s)", "missing", "rule, state"
    )
    start = lambda: bt.online(nn.Linear(3, 3), "d_rtrl", None, torch.ones(2, 3))
    refused(braintrace.CompilationError, start, "Linear has no state", "self.h = ...")


def test_a_tensor_is_shown_without_its_value():
    seen = []
    learner(lambda net, v: (seen.append(f"{v} {v.device}"), v)[1])
    assert seen[0] == "tensor of a traced step, float32[2, 3] cpu"


def test_a_lazy_module_is_refused():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(3)

        def forward(self, h, x):
            return h + self.layer(x), h

    start = lambda: bt.online(Lazy(), "d_rtrl", torch.zeros(2, 3), torch.zeros(2, 4))
    refused(ValueError, start, "layer.weight", "call the module once")


def test_a_state_that_does_not_start_with_zeros_is_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(3)), None

        def forward(self, x):
            self.v = torch.ones_like(x) if self.v is None else 0.9 * self.v + self.w * x
            return self.v

    start = lambda: bt.online(Late(), "d_rtrl", None, 2 * torch.ones(3))
    refused(ValueError, start, "starts v", "first value")


def test_a_module_that_has_changed_is_refused():
    net = Net(lambda net, v: F.dropout(v, 0.5, net.training)).eval()
    one = bt.online(net, "d_rtrl", torch.zeros(2, 3), torch.ones(2, 3))
    net.train()
    refused(ValueError, lambda: one.step(torch.ones(2, 3)), "train() or eval()", "learner.reset()")
    net.eval()
    one.step(torch.ones(2, 3))
    for change in (lambda: net.w.requires_grad_(False), lambda: net.double()):
        change()
        refused(ValueError, lambda: one.step(torch.ones(2, 3)), "replaced, frozen or moved")
        net.float().requires_grad_()
    net.count = 4
    refused(ValueError, lambda: one.step(torch.ones(2, 3)), "count", "learner.reset()")


def test_a_state_inside_that_somebody_changed_is_refused():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(3)), torch.zeros(3)

        def forward(self, x):
            self.v = 0.9 * self.v + self.w * x
            return self.v

    net, x = Inside(), torch.ones(3)
    one = bt.online(net, "d_rtrl", None, x)
    one.step(x)
    net.v = torch.zeros(3)
    refused(ValueError, lambda: one.step(x), "the state v inside", "learner.reset()")
    one.reset()
    assert one.step(x).tolist() == [1, 1, 1]


def test_strict_refuses_what_is_not_exact():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, h, x):
            h = self.cell(x, h)
            return h, h

    start = lambda: bt.online(Cell(), "d_rtrl", torch.zeros(2, 4), torch.zeros(2, 3), strict=True)
    refused(braintrace.CompilationError, start, "strict=True", "cell.weight_hh")


def test_errors_of_the_loss_are_those_of_torch():
    run = learner().grad(lambda out, y: F.mse_loss(out, y, reduction="nothing"))
    with pytest.raises(ValueError, match="nothing") as found:
        run(torch.ones(4, 2, 3), torch.ones(4, 2, 3))
    assert any("of arrays it raised" in note for note in found.value.__notes__)


def test_a_function_of_the_wrong_shape_is_refused():
    from braintrace.torch import _tracing

    bt.register(torch.ops.aten.special_airy_ai, lambda v: v.sum())
    try:
        start = lambda: learner(lambda net, v: torch.special.airy_ai(v))
        refused(ValueError, start, "aten.special_airy_ai.default", "(2, 3)")
    finally:
        _tracing._registered.clear()
