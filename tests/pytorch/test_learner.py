"""A learner of a module: tensors in and out, in the memory of torch, from call to call."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
import torch_cells as cells  # noqa: E402
from torch import nn  # noqa: E402

import braintrace.torch as bt  # noqa: E402

T, B = 6, 2
f64 = torch.float64


@pytest.fixture
def case():
    return cells.CELLS["min_gru"]


@pytest.fixture
def data(case):
    torch.manual_seed(1)
    return cells.sequences(case, T, B), torch.randn(T, B, cells.OUT, dtype=f64)


def begun(case, rule="d_rtrl", **options):
    net = cells.module_of(case)
    return net, bt.online(net, rule, case.state(B), torch.zeros(B, cells.IN, dtype=f64), **options)


def grads_of(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def gradient(case, data, loss=F.mse_loss, rule="d_rtrl", mask=None, **options):
    net, learner = begun(case, rule, **options)
    losses = learner.grad(loss)(*data, mask=mask)
    return grads_of(net), losses


def test_steps_and_scans_are_the_module(case, data):
    net, learner = begun(case)
    state, outs = case.state(B), []
    with torch.no_grad():
        for x in data[0]:
            state, out = net(state, x)
            outs.append(out)
    outs = torch.stack(outs)
    torch.testing.assert_close(torch.stack([learner.step(x) for x in data[0]]), outs)
    torch.testing.assert_close(learner.state, state)
    learner.reset()
    torch.testing.assert_close(learner.scan(data[0]), outs)


def test_a_sequence_goes_on_in_the_next_call(case, data):
    xs, ys = data
    whole, losses = gradient(case, data)
    net, learner = begun(case)
    run = learner.grad(F.mse_loss)
    parts = torch.cat([run(xs[:2], ys[:2]), run(xs[2:], ys[2:])])
    torch.testing.assert_close(parts, losses)
    torch.testing.assert_close(grads_of(net), whole)  # they add up, as those of backward do
    net.zero_grad()
    learner.reset()
    run(xs, ys)
    torch.testing.assert_close(grads_of(net), whole)


def test_a_loss_is_a_function_of_torch_or_of_jax(case, data):
    expected, losses = gradient(case, data)
    of_jax, losses_of_jax = gradient(case, data, lambda out, y: jnp.mean(jnp.square(out - y)))
    torch.testing.assert_close(of_jax, expected)
    torch.testing.assert_close(losses_of_jax, losses)
    of_optax, _ = gradient(case, data, lambda out, y: optax.l2_loss(out, y).mean())
    torch.testing.assert_close(2 * of_optax, expected)


def test_masks_and_windows_are_those_of_online(case, data):
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=f64)
    xs, ys = data
    _, losses = gradient(case, data)
    weighed, masked = gradient(case, data, mask=mask)
    torch.testing.assert_close(masked, losses)  # the gradient is that of weighed ones
    net, state, total = cells.module_of(case), case.state(B), 0.0
    for x, y, weight in zip(xs, ys, mask, strict=True):
        state, out = net(state, x)
        total = total + weight * F.mse_loss(out, y)
    total.backward()
    torch.testing.assert_close(weighed, grads_of(net))
    in_windows, _ = gradient(case, data, rule="no_trace", window=T)
    torch.testing.assert_close(in_windows, gradient(case, data)[0])


def test_parameters_that_change_in_place_are_seen(case, data):
    net, learner = begun(case)
    learner.grad(F.mse_loss)(*data)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    learner.reset()
    _, twice = begun(case)
    with torch.no_grad():
        for p in twice.net.parameters():
            p.copy_(p * 2)
    torch.testing.assert_close(learner.scan(data[0]), twice.scan(data[0]))


def test_memory_is_shared_and_nobody_writes_into_the_state(case, data):
    net, learner = begun(case)
    x = torch.zeros(B, cells.IN, dtype=f64)
    learner.step(x)
    array = learner._parameters.arrays["gates.weight"]
    assert array.unsafe_buffer_pointer() == net.gates.weight.data_ptr()
    before = learner.state.clone()
    learner.step(x).fill_(9.0)
    x.fill_(7.0)
    learner.state.fill_(5.0)
    expected = begun(case)[1]
    for _ in range(3):
        expected.step(torch.zeros_like(x))
    learner.step(torch.zeros_like(x))
    assert not torch.equal(before, torch.full_like(before, 5.0))
    torch.testing.assert_close(learner.state, expected.state)


def test_threads_share_a_learner_one_after_another(case, data):
    net, learner = begun(case)
    run = learner.grad(F.mse_loss)
    threads = [threading.Thread(target=run, args=data) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert learner.state_dict()["steps"] == 4 * T
    other, alone = begun(case)
    for _ in range(4):
        alone.grad(F.mse_loss)(*data)
    torch.testing.assert_close(grads_of(net), grads_of(other))
    torch.testing.assert_close(learner.state, alone.state)


class Delay(nn.Module):
    """A state that is an input of the step before."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, state, x):
        h, last = state
        h = 0.5 * h + self.w * last
        return (h, x), x


def test_inputs_may_be_changed_after_the_call():
    x = torch.ones(2)
    learner = bt.online(Delay(), "d_rtrl", (torch.zeros(2), torch.zeros(2)), x)
    out = learner.step(x)
    x.fill_(7.0)
    assert out.tolist() == [1, 1]
    learner.step(x)
    assert learner.state[0].tolist() == [1, 1]


def test_training_is_an_update_after_every_few_steps(case, data):
    xs, ys = data
    net, learner = begun(case)
    train = learner.train(F.mse_loss, torch.optim.Adam(net.parameters(), 0.01), update_every=2)
    losses = train(xs, ys)
    by_hand, other = begun(case)
    optimizer, run, found = torch.optim.Adam(by_hand.parameters(), 0.01), None, []
    run = other.grad(F.mse_loss)
    for start in range(0, T, 2):
        optimizer.zero_grad()
        found.append(run(xs[start : start + 2], ys[start : start + 2]))
        optimizer.step()
    torch.testing.assert_close(losses, torch.cat(found))
    for p, q in zip(net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_float32_stays_float32_and_indices_are_long():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.decay = nn.Embedding(5, 3), nn.Parameter(torch.rand(3))

        def forward(self, h, token):
            h = self.decay * h + self.table(token)
            return h, h.argmax(-1)

    net = Tokens()
    learner = bt.online(net, "d_rtrl", torch.zeros(2, 3), torch.tensor([1, 2]))
    out = learner.step(torch.tensor([3, 4]))
    assert out.dtype == torch.int64 and learner.state.dtype == torch.float32
    assert {str(a.dtype) for a in learner._carry.traces[0].values()} <= {"float32"}


def test_names_are_those_of_the_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
            self.cell = nn.GRUCell(4, 4)

        def forward(self, h, x):
            h = self.cell(self.layers(x), h)
            return h, h

    net = Net()
    learner = bt.online(net, "d_rtrl", torch.zeros(2, 4), torch.zeros(2, 3))
    text = str(learner.report)
    assert all(f"  {name}: " in text for name, _ in net.named_parameters())
    assert "test_learner.py" in text  # and the line is that of the user
    assert learner.memory > 0 and "d_rtrl of Net" in repr(learner)


def test_rules_by_name_and_advice_in_a_program_of_float32():
    jax.config.update("jax_enable_x64", False)
    try:
        case = cells.CELLS["stack"]
        net, x = cells.module_of(case).float(), torch.zeros(B, cells.IN)
        state = tuple(a.float() for a in case.state(B))
        learner = bt.online(net, {"first.*": "rtrl", "*": "d_rtrl"}, state, x)
        learner.grad(lambda out, _: (out**2).mean())(torch.ones(3, B, cells.IN), torch.zeros(3))
        leaves = jax.tree.leaves((learner._carry.traces, learner._carry.state))
        assert {str(a.dtype) for a in leaves} == {"float32"}
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        assert "first.weight_ih: trace" in str(learner.report)
        assert "cell.weight_hh" in str(begun(cells.CELLS["gru"])[1].report.advice)
    finally:
        jax.config.update("jax_enable_x64", True)


class Normed(nn.Module):
    """Running means and a counter inside."""

    def __init__(self):
        super().__init__()
        self.weights, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, h, x):
        h = 0.9 * h + self.norm(self.weights(x))
        return h, h


def test_buffers_that_a_step_changes_are_states_and_stay_in_the_module():
    torch.manual_seed(0)
    xs, state = torch.randn(T, B, 3, dtype=f64), torch.zeros(B, 4, dtype=f64)
    net, other = Normed().double(), Normed().double()
    other.load_state_dict(net.state_dict())
    learner = bt.online(net, "d_rtrl", state, xs[0])
    mean = net.norm.running_mean
    learner.scan(xs)
    with torch.no_grad():
        for x in xs:
            state, _ = other(state, x)
    assert net.norm.running_mean is mean
    for name, buffer in other.named_buffers():
        torch.testing.assert_close(dict(net.named_buffers())[name], buffer)
    learner.reset()
    torch.testing.assert_close(net.norm.running_mean, other.norm.running_mean)
    assert net.norm.num_batches_tracked == T
    net.eval()
    learner.reset()
    torch.testing.assert_close(learner.step(xs[0]), net(torch.zeros(B, 4, dtype=f64), xs[0])[1])


class Counting(nn.Module):
    """A membrane that begins as a number, a list of two, and a value for its user to see."""

    def __init__(self):
        super().__init__()
        self.w, self.v, self.both = nn.Parameter(torch.ones(3)), 0.5, [torch.zeros(3), None]
        self.shown = None

    def forward(self, x):
        self.v = 0.9 * self.v + self.w * x
        self.both = [self.both[0] + self.v, x.sum()]
        self.shown = self.v * 2
        return self.v + self.both[0]


def test_attributes_that_a_step_changes_are_states():
    xs = torch.randn(T, 3)
    net = Counting()
    learner = bt.online(net, "rtrl", None, xs[0])
    learner.grad(lambda out, _: (out**2).sum())(xs, xs)
    assert {"v", "both.0", "both.1"} == {
        n for i in learner._step.inner.values() if i.state for n in i.names
    }
    other, total = Counting(), 0.0
    for x in xs:
        total = total + (other(x) ** 2).sum()
    total.backward()
    torch.testing.assert_close(net.w.grad, other.w.grad)
    torch.testing.assert_close(net.v, other.v.detach())
    learner.reset()
    torch.testing.assert_close(learner.step(xs[0]), Counting()(xs[0]).detach())


class Cut(nn.Module):
    """Gradients that stop: what is detached, what is computed without gradients, what is frozen."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(3, dtype=f64)) for _ in range(3))
        self.frozen = nn.Parameter(torch.rand(3, dtype=f64), requires_grad=False)

    def forward(self, h, x):
        with torch.no_grad():
            gain = 1 + self.b
        h = self.a * h + gain * (self.c * x).detach() + self.frozen * self.b * x
        h = h.clone()
        with torch.no_grad():
            h.clamp_(-0.8, 0.8)
        return h, h


def test_gradients_stop_where_torch_stops_them():
    xs, h = torch.randn(T, 3, dtype=f64), torch.zeros(3, dtype=f64)
    net = Cut()
    learner = bt.online(net, "rtrl", h, xs[0])
    learner.grad(lambda out, _: (out**2).sum())(xs, xs)
    found = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    total = 0.0
    for x in xs:
        h, out = net(h, x)
        total = total + (out**2).sum()
    total.backward()
    for name in "ab":
        torch.testing.assert_close(found[name], getattr(net, name).grad)
    assert net.c.grad is None and found["c"] is None and found["frozen"] is None


def test_a_parameter_that_no_step_uses_has_no_gradient():
    net = Normed().double()
    net.spare = nn.Linear(2, 2)
    learner = bt.online(net, "d_rtrl", torch.zeros(B, 4, dtype=f64), torch.zeros(B, 3, dtype=f64))
    xs, ys = torch.randn(T, B, 3, dtype=f64), torch.zeros(T, B, 4, dtype=f64)
    learner.grad(F.mse_loss)(xs, ys)
    assert [n for n, p in net.named_parameters() if p.grad is None] == [
        "spare.weight",
        "spare.bias",
    ]


def test_hooks_of_parameters_run(case, data):
    net, learner = begun(case)
    net.out.weight.register_hook(lambda grad: 3 * grad)
    plain, _ = begun(case)
    other = bt.online(plain, "d_rtrl", case.state(B), data[0][0])
    learner.grad(F.mse_loss)(*data)
    other.grad(F.mse_loss)(*data)
    torch.testing.assert_close(net.out.weight.grad, 3 * plain.out.weight.grad)


def test_a_registered_operator_is_used():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(3, dtype=f64))

        def forward(self, h, x):
            h = 0.5 * h + torch.special.bessel_j0(self.w * x)
            return h, h

    x = torch.rand(3, dtype=f64)
    bt.register(torch.ops.aten.special_bessel_j0, lambda a: jnp.cos(a))
    try:
        learner = bt.online(Odd(), "d_rtrl", torch.zeros(3, dtype=f64), x)
        torch.testing.assert_close(learner.step(x), torch.cos(learner.net.w.detach() * x))
    finally:
        from braintrace.torch import _tracing

        _tracing._registered.clear()
