"""Choices and loops inside `update` under other transformations."""

import brainstate
import jax
import jax.numpy as jnp
import pytest
from brainstate import transform as bst
from jax import lax

import braintrace as bt
from interpret import computed

from .control import KINDS, OPTIONS, assert_equal, inputs, learner_of, relax
from .zoo import (
    Draw,
    matmul,
)


class Cell(brainstate.nn.Module):
    """A model whose states are made by `init_state`, so that they can be mapped."""

    def __init__(self, draw, update):
        super().__init__()
        self.w, self.r = brainstate.ParamState(draw(3, 4)), brainstate.ParamState(draw(4, 4))
        self.start, self.step = draw(4), update

    def init_state(self, batch_size=None, **kwargs):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.broadcast_to(self.start, (*lead, 4)))

    def update(self, x):
        self.h.value = self.step(self, self.h.value, x)
        return self.h.value


def by_choice(m, h, x):
    sides = (lambda h: jnp.tanh(h + matmul(x, m.w.value)), lambda h: 0.5 * h + matmul(h, m.r.value))
    return lax.cond(x[0] > 0, *sides, h)


def by_scan(m, h, x):
    turn = lambda h, g: (0.6 * h + g * matmul(x, m.w.value) + 0.2 * matmul(h, m.r.value), None)
    return jnp.tanh(lax.scan(turn, h, jnp.arange(1.0, 4.0))[0])


def by_while(m, h, x):
    return 0.6 * relax(h, matmul(x, m.w.value)) + 0.4 * matmul(h, m.r.value)


def by_all(m, h, x):
    turn = lambda h, _: (lax.cond(x[0] > 0, lambda h: relax(h, x[1]), by_choice_of(m, x), h), None)
    return lax.scan(turn, h, None, 2)[0] + 0.1 * matmul(h, m.r.value)


def by_choice_of(m, x):
    return lambda h: 0.8 * h + matmul(x, m.w.value)


UPDATES = [by_choice, by_scan, by_while, by_all]


@pytest.mark.parametrize("update", UPDATES)
def test_jit_inside_and_outside(update, draw):
    cell = Cell(draw, lambda m, h, x: jax.jit(lambda h: update(m, h, x))(h))
    cell.init_state()
    learner = learner_of(bt.D_RTRL, cell, jnp.ones(3))
    loss = lambda x: jnp.sum(learner(x) ** 2)
    step = bst.grad(loss, learner.param_states)
    xs = draw(3, 3)
    eager = [step(x) for x in xs]
    cell.init_state()
    learner = learner_of(bt.D_RTRL, cell, jnp.ones(3))
    step = bst.jit(bst.grad(lambda x: jnp.sum(learner(x) ** 2), learner.param_states))
    for x, want in zip(xs, eager, strict=True):
        assert_equal(step(x), want)


def per_sample(update, rule, xs):
    """The summed gradient of a sequence, the samples one by one."""
    if (update, rule) not in _found:
        total = []
        for i in range(xs.shape[1]):
            cell = Cell(Draw("cell"), update)
            cell.init_state()
            total.append(summed(learner_of(KINDS[rule], cell, xs[0, 0], **OPTIONS[rule]), xs[:, i]))
        _found[update, rule] = jax.tree.map(lambda *g: sum(g), *total)
    return _found[update, rule]


_found: dict = {}


def summed(learner, xs):
    loss = lambda x: 0.5 * jnp.sum(learner(x) ** 2)
    return computed(lambda: dict(learner.etrace_grad(xs, step_fn=loss, reduction="sum")))


# Under pp_prop what an operator in a branch reads enters its trace where the branch is evaluated:
# of a mapped choice both are, for all samples (`docs/rules.md`).
@pytest.mark.parametrize(
    "update, rule",
    [*((u, "d_rtrl") for u in UPDATES), (by_scan, "pp_prop"), (by_while, "pp_prop")],
)
def test_mapped_by_compile(update, rule):
    xs = inputs(Draw("mapped"), 2, 3)
    cell = Cell(Draw("cell"), update)
    learner = bt.compile(cell, rule, xs[0], vmap=True, batch_size=2, **OPTIONS[rule])
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))


@pytest.mark.parametrize("update", UPDATES)
def test_mapped_by_brainstate(update):
    xs = inputs(Draw("mapped"), 2, 3)
    model = brainstate.nn.Map(Cell(Draw("cell"), update), init_map_size=2)
    model.init_all_states()
    found = summed(learner_of(bt.D_RTRL, model, xs[0]), xs)
    assert_equal({k[-1:]: v for k, v in found.items()}, per_sample(update, "d_rtrl", xs))


@pytest.mark.parametrize("rule", ["snap", "rtrl"])
@pytest.mark.parametrize("update", [by_choice, by_scan, by_while])
def test_mapped_with_crossings(update, rule):
    xs = inputs(Draw("mapped"), 2, 3)
    learner = bt.compile(Cell(Draw("cell"), update), rule, xs[0], vmap=True, batch_size=2)
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))


@pytest.mark.parametrize("rule", ["d_rtrl", "rtrl"])
def test_dead_branch_of_one_sample_among_others(rule, draw):
    """A choice under vmap runs both sides; the side of another sample must not reach a gradient."""

    def update(m, h, x):
        bad = lambda h: jnp.sqrt(x[0]) * h + matmul(x, m.w.value)
        return jnp.tanh(lax.cond(x[0] > 0, bad, lambda h: 0.5 * h + matmul(x, m.w.value), h))

    xs = inputs(draw, 2, 3)
    cell = Cell(Draw("cell"), update)
    learner = bt.compile(cell, rule, xs[0], vmap=True, batch_size=2, **OPTIONS[rule])
    assert_equal(summed(learner, xs), per_sample(update, rule, xs))
