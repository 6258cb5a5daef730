"""Layers of torch as users put them together: RTRL is BPTT of the unrolled module."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import braintrace.torch as bt  # noqa: E402

f64, T, B, H = torch.float64, 5, 2, 4


class Step(nn.Module):
    """Layers of a dict, and a step that uses them."""

    def __init__(self, step, **layers):
        super().__init__()
        self.step = step
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, state, x):
        return self.step(self, state, x)


def attention(net, memory, x):
    """Over the last inputs."""
    memory = torch.cat([memory[:, 1:], net.embed(x)[:, None]], 1)
    return memory, net.layer(memory)[:, -1]


def attention_of_heads(net, memory, x):
    memory = torch.cat([memory[:, 1:], net.embed(x)[:, None]], 1)
    return memory, net.layer(memory, memory, memory)[0][:, -1]


def remembered(net, state, x):
    """A cell that looks up its own past."""
    memory, h = state
    found = F.scaled_dot_product_attention(net.ask(x)[:, None], net.key(memory), memory)
    h = net.cell(torch.cat([x, found[:, 0]], -1), h)
    return (torch.cat([memory[:, 1:], h[:, None]], 1), h), h


def bilinear(net, h, x):
    h = torch.tanh(net.product(x, h) + 0.5 * h)
    return h, h


def convolved(net, h, x):
    h = torch.tanh(net.kernel(h) + net.drive(x)[:, :, None])
    return h, h.flatten(1)


def picked(net, h, x):
    drive = net.drive(x)
    top = drive.topk(2, -1).indices
    h = (net.decay * h).scatter_add(1, top, drive.gather(1, top))
    h = torch.where(h > 0.1, h, 0.1 * h).clone()
    h[:, 0] = h[:, 0] * 2
    h[..., 1:3] += drive[:, :2]
    return h, h


def stacked(net, states, x):
    after = []
    for cell, state in zip(net.cells, states, strict=True):
        x = cell(x, state)
        after.append(x)
    return after, net.out(x)


def listed(net, h, x):
    for w in net.weights:
        h = torch.tanh(net.more["decay"] * h + x @ w.T)
    return h, h


class Turned(torch.autograd.Function):
    """A product of complex numbers, with its gradient as torch defines it."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b.conj(), (grad * a.conj()).sum(0)


def turned(net, h, x):
    h = Turned.apply(h, net.pole) + x.to(h.dtype) @ net.into.T
    return h, (h * (1 + 2j)).real


def complex_poles(net, h, x):
    h = net.pole * h + x.to(h.dtype) @ net.into.T
    return h, (h @ net.out.T).real


def whole_layer(net, state, x):
    out, state = net.layer(x[None], state)
    return state, out[0]


def normalised(net, h, x):
    h = torch.tanh(net.mix(h) + net.drive(x) + net.spectral(x))
    return h, h


def descended(net, h, x):
    """A state that goes down an energy."""
    energy = lambda h: ((h - net.drive(x)) ** 2).sum()
    h = h - 0.1 * torch.func.grad(energy)(h)
    return h, h


def functional(net, h, x):
    h = torch.func.functional_call(net.cell, dict(net.cell.named_parameters()), (x, h))
    return h, h


def permuted(net, h, x):
    y = torch.einsum("bi,cin->bnc", x, net.w).permute(0, 2, 1).reshape(-1, 2, 2)
    h = 0.8 * h + y.transpose(1, 2).contiguous().movedim(1, 2).unflatten(-1, (2, 1)).squeeze(-1)
    return h, h.flatten(1)


def tied(net, h, token):
    h = net.cell(net.words(token), h)
    return h, net.out(h)


def bags(net, h, tokens):
    h = net.decay * h + net.words(tokens)
    return h, h


def words():
    """A table whose rows are also the read-out."""
    net = Step(tied, words=nn.Embedding(7, H, padding_idx=0), cell=nn.GRUCell(H, H))
    net.out = nn.Linear(H, 7, bias=False)
    net.out.weight = net.words.weight
    return net


def decay():
    return nn.Parameter(torch.rand(H))


def complex_parameter(*shape):
    return nn.Parameter(torch.randn(*shape, dtype=torch.complex128) * 0.5)


zeros = lambda *shape: torch.zeros(B, *shape, dtype=f64)
encoder = lambda: nn.TransformerEncoderLayer(H, 2, 8, dropout=0.0, batch_first=True)
heads = lambda: nn.MultiheadAttention(H, 2, batch_first=True)
CASES = {
    "memory": (
        lambda: Step(
            remembered, ask=nn.Linear(3, H), key=nn.Linear(H, H), cell=nn.GRUCell(3 + H, H)
        ),
        (zeros(3, H), zeros(H)),
    ),
    "encoder": (lambda: Step(attention, embed=nn.Linear(3, H), layer=encoder()), zeros(3, H)),
    "encoder_in_eval": (
        lambda: Step(attention, embed=nn.Linear(3, H), layer=encoder()).eval(),
        zeros(3, H),
    ),
    "heads_in_eval": (
        lambda: Step(attention_of_heads, embed=nn.Linear(3, H), layer=heads()).eval(),
        zeros(3, H),
    ),
    "bilinear": (lambda: Step(bilinear, product=nn.Bilinear(3, H, H)), zeros(H) + 0.1),
    "convolution": (
        lambda: Step(convolved, kernel=nn.Conv1d(2, 2, 3, padding=1), drive=nn.Linear(3, 2)),
        zeros(2, 5) + 0.1,
    ),
    "picked": (lambda: Step(picked, drive=nn.Linear(3, H), decay=decay()), zeros(H)),
    "stack": (
        lambda: Step(
            stacked,
            cells=nn.ModuleList([nn.GRUCell(3, H), nn.GRUCell(H, H)]),
            out=nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 2)),
        ),
        [zeros(H), zeros(H)],
    ),
    "lists": (
        lambda: Step(
            listed,
            weights=nn.ParameterList([torch.randn(H, 3) * 0.3 for _ in range(2)]),
            more=nn.ParameterDict({"decay": decay()}),
        ),
        zeros(H),
    ),
    "complex": (
        lambda: Step(
            complex_poles,
            pole=complex_parameter(H),
            into=complex_parameter(H, 3),
            out=complex_parameter(2, H),
        ),
        zeros(H).to(torch.complex128),
    ),
    "complex_function": (
        lambda: Step(turned, pole=complex_parameter(H), into=complex_parameter(H, 3)),
        zeros(H).to(torch.complex128) + 0.1j,
    ),
    "gru": (lambda: Step(whole_layer, layer=nn.GRU(3, H, 2)), zeros(H)[None].repeat(2, 1, 1)),
    "lstm": (lambda: Step(whole_layer, layer=nn.LSTM(3, H)), (zeros(H)[None], zeros(H)[None])),
    "parametrised": (
        lambda: Step(
            normalised,
            mix=parametrizations.orthogonal(nn.Linear(H, H)),
            drive=parametrizations.weight_norm(nn.Linear(3, H)),
            spectral=parametrizations.spectral_norm(nn.Linear(3, H)),
        ),
        zeros(H),
    ),
    "gradient": (lambda: Step(descended, drive=nn.Linear(3, H)), zeros(H)),
    "functional": (lambda: Step(functional, cell=nn.GRUCell(3, H)), zeros(H)),
    "permuted": (lambda: Step(permuted, w=nn.Parameter(torch.rand(2, 3, 2))), zeros(2, 2)),
    "tied": (words, zeros(H)),
    "bags": (lambda: Step(bags, words=nn.EmbeddingBag(7, H), decay=decay()), zeros(H)),
}


def made(name):
    torch.manual_seed(3)
    net = CASES[name][0]()
    return net if "complex" in name else net.double()


def inputs(name):
    torch.manual_seed(1)
    tokens = {"tied": (T, B), "bags": (T, B, 3)}.get(name)
    return torch.randint(0, 7, tokens) if tokens else torch.randn(T, B, 3, dtype=f64)


def loss(out, y):
    return ((out - y) ** 2).mean()


@pytest.mark.parametrize("name", CASES)
def test_rtrl_is_bptt(name):
    xs, state = inputs(name), CASES[name][1]
    other, start, total = made(name), state, 0.0
    ys = torch.randn(T, *other(state, xs[0])[1].shape, dtype=f64)
    other = made(name)  # with its buffers as they were
    for x, y in zip(xs, ys, strict=True):
        state, out = other(state, x)
        total = total + loss(out, y)
    total.backward()
    net = made(name)
    bt.online(net, "rtrl", start, xs[0]).grad(loss)(xs, ys)
    for (n, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=n)


def test_lstm_in_float32_is_not_the_operator_of_a_whole_layer():
    net, x = Step(whole_layer, layer=nn.LSTM(3, H)), torch.randn(B, 3)
    state = (torch.zeros(1, B, H), torch.zeros(1, B, H))
    learner = bt.online(net, "d_rtrl", state, x)
    torch.testing.assert_close(learner.step(x), net(state, x)[1].detach())
    assert torch._C._get_mkldnn_enabled() and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_stay_what_they_are(dtype):
    net, xs = Step(functional, cell=nn.GRUCell(3, H)).to(dtype), torch.randn(T, B, 3)
    learner = bt.online(net, "d_rtrl", torch.zeros(B, H, dtype=dtype), xs[0].to(dtype))
    losses = learner.grad(loss)(xs.to(dtype), torch.zeros(T, B, H, dtype=dtype))
    wide = Step(functional, cell=nn.GRUCell(3, H))
    wide.load_state_dict(net.state_dict())
    other = bt.online(wide, "d_rtrl", torch.zeros(B, H), xs[0])
    expected = other.grad(loss)(xs.to(dtype).float(), torch.zeros(T, B, H))
    torch.testing.assert_close(losses.float(), expected, rtol=0.1, atol=0.02)
    for p, q in zip(net.parameters(), wide.parameters(), strict=True):
        assert p.grad.dtype == dtype and learner.state.dtype == dtype
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=0.1, atol=0.05)


def test_a_compiled_module_is_the_module():
    net, x = Step(functional, cell=nn.GRUCell(3, H)), torch.randn(B, 3)
    learner = bt.online(torch.compile(net), "d_rtrl", torch.zeros(B, H), x)
    assert learner.net is net
    torch.testing.assert_close(learner.step(x), net(torch.zeros(B, H), x)[1].detach())
