"""Every rule, mixtures of them, and choices between them, for modules of torch."""

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import jax_twins as twins  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch_cells as cells  # noqa: E402

import braintrace  # noqa: E402
import braintrace.torch as bt  # noqa: E402
from braintrace._online import Dotted  # noqa: E402
from braintrace.rules import RULES, rule_value  # noqa: E402

f64, T, B = torch.float64, 6, 2
OPTIONS = {
    "pp_prop": {"decay_or_rank": 0.9},
    "rolling": {"window": 3},
    "ottt": {"leak": 0.8},
    "otpe": {"leak": 0.8},
    "osttp": {"B_list": [jnp.cos(jnp.arange(2.0 * cells.H)).reshape(cells.OUT, cells.H)]},
    "decolle": {"n_target": cells.OUT, "key": 1},
    "tess": {"n_target": cells.OUT},
    "r_stdp": {"post": lambda state: state[..., 0] > 0.1},
}
MIXTURE = {"cell.weight_hh": ("snap", {"n": 2}), "out.*": "no_trace", "*": "d_rtrl"}
GIVEN = {
    "modulator": lambda: torch.linspace(-1, 1, T, dtype=f64),
    "y_target": lambda: targets(1),
}


def begun(name, rule, **options):
    case = cells.CELLS[name]
    net, xs = cells.module_of(case), cells.sequences(case, T, B)
    return net, bt.online(net, rule, case.state(B), xs[0], **options), xs


def targets(seed=0):
    torch.manual_seed(seed)
    return torch.randn(T, B, cells.OUT, dtype=f64)


def loss(out, y):
    return ((out - y) ** 2).mean()


def assert_that_of_jax(rule, options, extra):
    """The gradient of a rule is that of the same cell in JAX."""
    net, learner, xs = begun("gru", rule, **options)
    ys = targets()
    learner.grad(loss)(xs, ys, **extra)
    params = {Dotted(n): jnp.asarray(p.detach().numpy()) for n, p in net.named_parameters()}
    xs, ys, extra = jax.tree.map(lambda a: jnp.asarray(a.numpy()), (xs, ys, extra))
    twin = braintrace.online(twins.gru, rule, **options)
    carry = twin.init(params, jnp.zeros((B, cells.H)), xs[0])
    expected, _ = twin.grad(loss)(params, carry, xs, ys, **extra)
    found = {n: jnp.asarray(p.grad.numpy()) for n, p in net.named_parameters()}
    assert [n for n in found if not jnp.allclose(found[n], expected[n], 1e-9, 1e-12)] == []
    assert any(bool(g.any()) for g in found.values())


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_rule_is_that_of_jax(rule):
    options = OPTIONS.get(rule, {})
    takes = rule_value(rule, dict(options)).takes
    assert_that_of_jax(rule, options, {name: GIVEN[name]() for name in takes})


def test_mixtures_and_windows_are_those_of_jax():
    assert_that_of_jax(MIXTURE, {}, {})
    assert_that_of_jax("d_rtrl", {"window": 3}, {})


def test_auto_takes_what_is_exact():
    found = []
    for rule, options in (("auto", {"memory": "10MB", "length": T}), ("rtrl", {})):
        net, learner, xs = begun("min_gru", rule, **options)
        learner.grad(loss)(xs, targets())
        found.append([p.grad for p in net.parameters()])
        assert learner.rule.name != "auto"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_choose_measures_rules_for_a_module():
    case = cells.CELLS["min_gru"]
    net, xs, ys = cells.module_of(case), cells.sequences(case, T, B), targets()
    choice = bt.choose(net, case.state(B), xs, ys, F.mse_loss, time=None)
    assert choice.best.cosine > 0.999 and {*choice.tried[0].parts} == {
        *dict(net.named_parameters())
    }
    learner = bt.online(net, choice.rule, case.state(B), xs[0])
    learner.grad(F.mse_loss)(xs, ys)
    assert all(p.grad is not None for p in net.parameters())


class Noisy(torch.nn.Module):
    """Noise and a dropout mask are inputs of the step."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(cells.IN, cells.H)

    def forward(self, h, x, noise, mask):
        h = self.cell(x + noise, h) * mask
        return h, h[..., : cells.OUT]


def test_random_numbers_are_inputs():
    xs, ys = torch.randn(T, B, cells.IN, dtype=f64), targets()

    def gradients(seed):
        random = torch.Generator().manual_seed(seed)
        noise = torch.randn(xs.shape, generator=random, dtype=f64)
        masks = 2 * torch.bernoulli(torch.full((T, B, cells.H), 0.5, dtype=f64), generator=random)
        torch.manual_seed(0)
        net, start = Noisy().double(), torch.zeros(B, cells.H, dtype=f64)
        learner = bt.online(net, "rtrl", start, xs[0], noise[0], masks[0])
        learner.grad(loss)((xs, noise, masks), ys)
        found, h, total = [p.grad for p in net.parameters()], start, 0.0
        for x, e, m, y in zip(xs, noise, masks, ys, strict=True):
            h, out = net(h, x, e, m)
            total = total + loss(out, y)
        expected = torch.autograd.grad(total, list(net.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        return found[0]

    first = gradients(1)
    assert torch.equal(gradients(1), first) and not torch.allclose(gradients(2), first)
