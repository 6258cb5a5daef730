"""Layers, populations, sub-modules and surroundings of a model."""

import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison, online_grad

from .zoo import TIGHT, T, check, element_wise, matmul, net, sigmoid, squares


class Cell(brainstate.nn.Module):
    """tanh(leak * h + x @ w), driven by the input alone unless `recurrent`."""

    def __init__(self, draw, n_in, n, recurrent=False):
        super().__init__()
        self.w = brainstate.ParamState(draw(n_in, n))
        self.r = brainstate.ParamState(draw(n, n)) if recurrent else None
        self.h = brainstate.HiddenState(draw(n))

    def update(self, x, back=0.0):
        y = matmul(x, self.w.value) + back
        if self.r is not None:
            y = y + matmul(self.h.value, self.r.value)
        self.h.value = jnp.tanh(0.8 * self.h.value + y)
        return self.h.value


class Of(brainstate.nn.Module):
    """A step function over any sub-modules."""

    def __init__(self, step, **modules):
        super().__init__()
        self.step = step
        for name, module in modules.items():
            setattr(self, name, module)

    def update(self, x):
        return self.step(self, x)


def test_stacked_layers(draw):
    step = lambda m, x: m.b(m.a(x))
    check(Of(step, a=Cell(draw, 3, 4), b=Cell(draw, 4, 3)), draw(T, 3), exact=False)


def test_skip_connections(draw):
    def step(m, x):
        a = m.a(x)
        b = m.b(a) + a + x
        return jnp.concatenate([b, m.c(jnp.concatenate([a, b]))])

    model = Of(step, a=Cell(draw, 3, 3), b=Cell(draw, 3, 3), c=Cell(draw, 6, 2))
    check(model, draw(T, 3), exact=False)


def test_layers_side_by_side(draw):
    step = lambda m, x: jnp.concatenate([m.a(x), m.b(x[:2]) * 2])
    check(Of(step, a=Cell(draw, 3, 4), b=Cell(draw, 2, 2)), draw(T, 3))


def test_feedback_between_layers(draw):
    def step(m, x):
        a = m.a(x, back=matmul(m.b.h.value, m.back.value))
        return m.b(a)

    model = Of(step, a=Cell(draw, 3, 2), b=Cell(draw, 2, 4))
    model.back = brainstate.ParamState(draw(4, 2))
    check(model, draw(T, 3), exact=False)


def test_excitation_and_inhibition(draw):
    params = {"w": draw(3, 3), "ee": draw(3, 3), "ei": draw(3, 2), "ie": draw(2, 3)}

    @net(params, {"e": draw(2, 3), "i": draw(2, 2)})
    def model(m, x):
        e, i = sigmoid(m.e.value), sigmoid(m.i.value)
        drive = matmul(e, jnp.abs(m.ee.value)) - matmul(i, jnp.abs(m.ie.value))
        m.i.value = 0.7 * m.i.value + matmul(e, jnp.abs(m.ei.value))
        m.e.value = 0.8 * m.e.value + drive + matmul(x, m.w.value)
        return m.e.value

    check(model, draw(T, 2, 3), exact=False)


def test_local_inhibitory_partner(draw):
    @net({"w": draw(3, 4), "g": draw(4)}, {"e": draw(4), "i": draw(4)})
    def model(m, x):
        e = m.e.value
        m.e.value = jnp.tanh(0.8 * e - element_wise(m.g.value) * m.i.value + matmul(x, m.w.value))
        m.i.value = 0.7 * m.i.value + sigmoid(e)
        return m.e.value

    check(model, draw(T, 3))


def test_siamese_use_without_own_state(draw):
    linear = bt.nn.Linear(3, 4)

    @net({}, {"a": draw(4), "b": draw(4), "linear": linear})
    def model(m, x):
        m.a.value = jnp.tanh(0.8 * m.a.value + m.linear(x))
        m.b.value = jnp.tanh(0.7 * m.b.value + m.linear(jnp.cos(x)))
        return m.a.value * m.b.value

    check(model, draw(T, 3))


def test_module_with_a_state_called_twice(draw):
    step = lambda m, x: m.a(x) * m.a(jnp.sin(x))
    check(Of(step, a=Cell(draw, 3, 4)), draw(T, 3))


def test_recurrent_module_called_twice(draw):
    step = lambda m, x: m.a(x) * m.a(jnp.sin(x))
    check(Of(step, a=Cell(draw, 3, 3, recurrent=True)), draw(T, 3), exact=False)


def test_list_of_modules(draw):
    step = lambda m, x: sum(cell(x) for cell in m.cells)
    check(Of(step, cells=[Cell(draw, 3, 4), Cell(draw, 3, 4)]), draw(T, 3))


def test_dict_of_modules(draw):
    step = lambda m, x: jnp.concatenate([m.cells["a"](x), m.cells["deep"]["b"](x)])
    cells = {"a": Cell(draw, 3, 4), "deep": {"b": Cell(draw, 3, 2)}}
    check(Of(step, cells=cells), draw(T, 3))


def test_list_of_states(draw):
    def step(m, x):
        for h, w in zip(m.hs, m.ws, strict=True):
            h.value = jnp.tanh(0.8 * h.value + matmul(x, w.value))
        return m.hs[0].value * m.hs[1].value

    hs = [brainstate.HiddenState(draw(4)) for _ in range(2)]
    ws = [brainstate.ParamState(draw(3, 4)) for _ in range(2)]
    check(Of(step, hs=hs, ws=ws), draw(T, 3))


def test_one_parameter_in_two_modules(draw):
    a, b = Cell(draw, 3, 4), Cell(draw, 3, 4)
    b.w = a.w
    check(Of(lambda m, x: m.a(x) * m.b(jnp.sin(x)), a=a, b=b), draw(T, 3))


def test_sequential(draw):
    layers = [bt.nn.Linear(3, 4), jnp.tanh, Cell(draw, 4, 3), bt.nn.Linear(3, 2)]
    step = lambda m, x: m.layers(x)
    check(Of(step, layers=brainstate.nn.Sequential(*layers)), draw(T, 3), exact=False)


def test_cells_of_the_library(draw):
    model = Of(lambda m, x: m.out(m.cell(x)), cell=bt.nn.GRUCell(3, 3), out=bt.nn.Linear(3, 2))
    brainstate.nn.init_all_states(model, batch_size=2)
    check(model, draw(T, 2, 3), exact=False)


def test_leaky_readout_of_the_library(draw):
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Of(lambda m, x: m.out(x), out=bt.nn.LeakyRateReadout(3, 2))
        brainstate.nn.init_all_states(model, batch_size=2)
        check(model, draw(T, 2, 3))


def test_two_timescales(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4), "n": brainstate.ShortTermState(jnp.zeros((), int))})
    def model(m, x):
        slow = m.n.value % 2 == 0
        m.n.value = m.n.value + 1
        m.h.value = jnp.where(slow, jnp.tanh(0.8 * m.h.value + matmul(x, m.w.value)), m.h.value)
        return m.h.value

    check(model, draw(T, 3))


@pytest.mark.parametrize("fit", [False, True])
def test_surroundings(draw, fit):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        dt, t = brainstate.environ.get("dt"), brainstate.environ.get("t")
        gain = 2.0 if brainstate.environ.get("fit") else 1.0
        decay = jnp.exp(-dt / 2.0)
        m.h.value = decay * jnp.sin(m.h.value) + gain * matmul(x, m.w.value) * jnp.cos(t)
        return m.h.value

    with brainstate.environ.context(dt=0.5, t=0.3, fit=fit):
        check(model, draw(T, 3))


def test_time_that_passes(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        t = brainstate.environ.get("t")
        m.h.value = 0.9 * jnp.sin(m.h.value) * jnp.cos(t) + matmul(x, m.w.value)
        return m.h.value

    def loss(net, x, t):
        with brainstate.environ.context(t=t):
            return jnp.sum(net(x) ** 2)

    xs, ts = draw(T, 3), 0.3 * jnp.arange(T)
    with brainstate.environ.context(t=0.0):
        learner = bt.D_RTRL(model)
        learner.compile_graph(xs[0])
    found = online_grad(learner, loss, xs, ts)
    result = comparison(found, bptt_grad(model, loss, xs, ts))
    assert result.max_error <= TIGHT, result


def test_attributes_are_taken_at_call_time(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = jnp.tanh(m.leak * m.h.value + (y if m.plain else jnp.sin(2 * y)))
        return m.h.value

    model.leak, model.plain = 0.8, True
    xs, ys = draw(T, 3), draw(T, 4)
    learner = bt.D_RTRL(model)
    learner.compile_graph(xs[0])
    seen = []
    for leak, plain in [(0.8, True), (0.4, True), (0.4, False), (0.8, True)]:
        model.leak, model.plain = leak, plain
        found = online_grad(learner, squares, xs, ys)
        truth = bptt_grad(model, squares, xs, ys)
        result = comparison(found, truth)
        assert result.max_error <= TIGHT, result
        seen.append(found)
    assert comparison(seen[0], seen[3]).max_error <= TIGHT
    assert comparison(seen[0], seen[1]).max_error > 1e-3
    assert comparison(seen[1], seen[2]).max_error > 1e-3


def test_another_structure_than_the_compiled_one_is_refused(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x, m.w.value)
        m.h.value = jnp.tanh(0.8 * m.h.value + (y if m.plain else jnp.roll(y, 1) * y))
        return m.h.value

    model.plain = True
    learner = bt.D_RTRL(model)
    learner.compile_graph(jnp.zeros(3))
    model.plain = False
    with pytest.raises(bt.CompilationError, match="build a new learner"):
        learner(jnp.zeros(3))


def test_arguments_in_trees(draw):
    @net({"w": draw(3, 4)}, {"h": draw(4)})
    def model(m, x):
        y = matmul(x["now"], m.w.value) * x["gain"][0]
        m.h.value = jnp.tanh(0.8 * m.h.value + y)
        return m.h.value

    check(model, {"now": draw(T, 3), "gain": (draw(T),)})


def test_mapped_model(draw):
    class Made(Cell):
        def init_state(self, **kwargs):
            self.h = brainstate.HiddenState(draw(4))

    model = brainstate.nn.Map(Made(draw, 3, 4), init_map_size=2)
    model.init_all_states()
    check(model, draw(T, 2, 3))


def test_methods_and_closures(draw):
    class Wrapped(Cell):
        def drive(self, x):
            return jax.nn.relu(matmul(x, self.w.value))

        def update(self, x):
            inner = lambda: 0.8 * self.h.value + self.drive(x)
            self.h.value = jnp.tanh(inner())
            return self.h.value

    check(Wrapped(draw, 3, 4), draw(T, 3))
