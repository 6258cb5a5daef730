"""Influence maps, primitive by primitive, against the numeric Jacobian."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import braintrace

from .step_models import carried, claimed, driven, normal

pytestmark = pytest.mark.usefixtures("whole_batch")

INDEX = jnp.asarray([4, 0, 0, 2])
MASK = jnp.asarray([True, False, True, True, False, True])
COLUMN = normal(1, 3)


def grid(y):
    return y.reshape(2, 3)


MOVES = {
    "identity": lambda y: y,
    "tanh": jnp.tanh,
    "slice": lambda y: y[1:4],
    "strided slice": lambda y: y[::2],
    "integer index": lambda y: y[3],
    "reshape": lambda y: grid(y),
    "transpose": lambda y: grid(y).T,
    "permuted axes": lambda y: y.reshape(1, 2, 3).transpose(2, 0, 1),
    "expand and squeeze": lambda y: jnp.squeeze(jnp.expand_dims(y, 0), 0),
    "concatenate": lambda y: jnp.concatenate([y[3:], jnp.ones(2), y[:3]]),
    "stack": lambda y: jnp.stack([y, 2 * y], axis=1),
    "pad": lambda y: jnp.pad(y, (1, 2)),
    "interior pad": lambda y: lax.pad(y, 0.0, [(-1, 2, 1)]),
    "grid pad": lambda y: jnp.pad(grid(y), ((1, 0), (0, 2))),
    "edge pad": lambda y: jnp.pad(y, 1, mode="edge"),
    "rev": lambda y: y[::-1],
    "flip": lambda y: jnp.flip(grid(y), 1),
    "gather": lambda y: y[INDEX],
    "gather rows": lambda y: grid(y)[jnp.asarray([1, 0, 1])],
    "gather pairs": lambda y: grid(y)[jnp.asarray([1, 0]), jnp.asarray([2, 0])],
    "take": lambda y: jnp.take(y, INDEX),
    "take along axis": lambda y: jnp.take_along_axis(grid(y), jnp.asarray([[2], [0]]), 1),
    "boolean mask": lambda y: y[np.asarray(MASK)],
    "dynamic slice": lambda y: lax.dynamic_slice(y, (jnp.asarray(2),), (3,)),
    "dynamic update": lambda y: lax.dynamic_update_slice(jnp.zeros(8), y, (jnp.asarray(1),)),
    "set a constant": lambda y: y.at[1].set(0.5),
    "set into zeros": lambda y: jnp.zeros(8).at[2:8].set(y),
    "set at an index": lambda y: jnp.zeros(6).at[jnp.asarray([5, 1])].set(y[:2]),
    "set onto itself": lambda y: y.at[0].set(y[5]),
    "roll": lambda y: jnp.roll(y, 2),
    "roll on a grid": lambda y: jnp.roll(grid(y), 1, axis=1),
    "broadcast": lambda y: jnp.broadcast_to(y, (4, 6)),
    "broadcast column": lambda y: jnp.broadcast_to(y[:, None], (6, 2)),
    "scalar broadcast": lambda y: y[0] * jnp.ones(4),
    "repeat": lambda y: jnp.repeat(y, 2),
    "tile": lambda y: jnp.tile(y, 2),
    "clip": lambda y: jnp.clip(y, -10, 10),
    "outer": lambda y: jnp.outer(y, COLUMN),
    "outer by einsum": lambda y: jnp.einsum("i,j->ji", y, COLUMN),
    "product by einsum": lambda y: jnp.einsum("i,i->i", y, 1 + jnp.arange(6.0)),
    "unstack": lambda y: sum(k * p for k, p in enumerate(jnp.unstack(grid(y)), 1)),
    "iteration": lambda y: (lambda a, b: a * 2 + b)(*grid(y)),
    "split": lambda y: sum(k * p for k, p in enumerate(jnp.split(y, 3), 1)),
    "gates": lambda y: jnp.tanh(y[:2]) * jax.nn.sigmoid(y[2:4]) + y[4:],
    "neighbours": lambda y: y + 0.5 * jnp.roll(y, 1),
    "sum of a unit axis": lambda y: y[:, None].sum(1),
    "jit": lambda y: jax.jit(lambda a: a[::-1])(y),
    "remat": lambda y: jax.checkpoint(lambda a: jnp.tanh(a[1:]))(y),
    "checkpoint name": lambda y: checkpoint_name(y, "y"),
    "device_put": lambda y: jax.device_put(y),
    "optimization barrier": lambda y: lax.optimization_barrier(y),
    "vmap": lambda y: jax.vmap(lambda r: r[::-1])(grid(y)),
}
SCATTERS = {
    "add at an index": lambda y: jnp.zeros(8).at[jnp.asarray([5, 1])].add(y[:2]),
    "add onto itself": lambda y: y.at[:2].add(y[2:4]),
}
# Here a map may claim more than there is, never less.
CHOICES = {
    "where a mask": lambda y: jnp.where(MASK, y, 0.0),
    "where another": lambda y: jnp.where(MASK, y, jnp.roll(y, 1)),
    "select": lambda y: lax.select(MASK, y, jnp.ones(6)),
    "complex parts": lambda y: lax.complex(y, y[::-1]).imag,
    "diagonal": lambda y: jnp.diag(y),
    "sort": jnp.sort,
    "sum": lambda y: y.sum(),
    "sum of a feature axis": lambda y: grid(y).sum(1),
    "maximum": lambda y: grid(y).max(0),
    "weighted sum": lambda y: jnp.einsum("ij,ij->j", grid(y), normal(5, 2, 3)),
    "average pooling": lambda y: lax.reduce_window(y, 0.0, lax.add, (2,), (2,), "VALID"),
    "overlapping windows": lambda y: lax.reduce_window(y, 0.0, lax.add, (3,), (2,), "SAME")[:1],
    "maximum pooling": lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID"),
    "gather at data": lambda y: y[jnp.argmax(y)],
    "rows at data": lambda y: grid(y)[jnp.argmax(y) // 3],
    "slice at data": lambda y: lax.dynamic_slice(grid(y), (jnp.argmax(y) // 3, 1), (1, 2)),
    "update at data": lambda y: lax.dynamic_update_slice(y, 2 * y[:2], (jnp.argmax(y) // 2,)),
    "set at data": lambda y: jnp.zeros((3, 6)).at[jnp.argmax(y) // 3].set(y),
    "add at data": lambda y: y.at[jnp.argmax(y)].add(y[0]),
    "permuted reshape": lambda y: lax.reshape(grid(y), (3, 2), (1, 0)),
    "product over an axis": lambda y: grid(y).prod(-1),
}


def jacobian(fun, shape):
    point = normal(7, *shape)
    full = jax.jacfwd(fun)(point)
    return np.abs(np.asarray(full)).reshape(-1, int(np.prod(shape))) > 0


@pytest.mark.parametrize("tail", (MOVES | SCATTERS).values(), ids=MOVES | SCATTERS)
def test_influence_of_an_operator_is_the_pattern_of_its_tail(tail):
    graph = driven(tail)
    assert np.array_equal(claimed(graph, 1), jacobian(tail, (6,)))
    assert not claimed(graph, 0).any()  # the old state is not read
    assert not graph.analysis.influence.cuts


@pytest.mark.parametrize("tail", CHOICES.values(), ids=CHOICES)
def test_influence_of_a_choice_misses_nothing(tail):
    graph = driven(tail)
    assert not (jacobian(tail, (6,)) & ~claimed(graph, 1)).any()
    assert not graph.analysis.influence.cuts


SQUARE = {k: MOVES[k] for k in ("identity", "rev", "roll", "neighbours")}
SQUARE["gather"] = lambda h: h[jnp.asarray([1, 2, 3, 4, 5, 0])]


@pytest.mark.parametrize("move", SQUARE.values(), ids=SQUARE)
def test_influence_of_a_state_is_the_pattern_of_its_transition(move):
    graph = carried(move)
    assert np.array_equal(claimed(graph, 0), jacobian(move, (6,)))
    assert np.array_equal(claimed(graph, 1), np.eye(6, dtype=bool))


MIXES = {
    "cumsum": (jnp.cumsum, "cumsum"),
    "matrix product": (lambda y: y @ normal(3, 6, 4), "matrix product"),
    "mean beside": (lambda y: y * 0 + y.mean(), "adds up units"),
}


@pytest.mark.parametrize("tail, reason", MIXES.values(), ids=MIXES)
def test_mixing_is_cut_and_recorded(tail, reason):
    graph = driven(tail)
    found = graph.analysis.influence
    direct = np.eye(6, dtype=bool) if reason == "adds up units" else False
    assert np.array_equal(claimed(graph, 1), claimed(graph, 1) & direct)
    assert any(reason in c.reason and 1 in c.sources for c in found.cuts)
    assert found.lost[0]  # the state is known to have lost it


@pytest.mark.parametrize("tail", [t for t, _ in MIXES.values()], ids=MIXES)
def test_mixing_beside_a_direct_path_keeps_the_direct_path(tail):
    def both(h):
        return 0.5 * h + jnp.resize(tail(h), (6,))

    graph = carried(both)
    assert claimed(graph, 0).diagonal().all()
    assert graph.analysis.influence.cuts


def test_layer_norm_keeps_its_direct_path_with_frozen_statistics():
    def norm(h):
        return (h - h.mean()) / jnp.sqrt(h.var() + 1e-5)

    graph = carried(norm)
    assert np.array_equal(claimed(graph, 0), np.eye(6, dtype=bool))
    (cut, *_) = graph.analysis.influence.cuts
    assert cut.equation.name == "reduce_sum" and "test_influence.py" in cut.equation.where()


def test_stop_gradient_is_no_influence_and_no_loss():
    graph = carried(lambda h: lax.stop_gradient(h) * 2)
    assert not claimed(graph, 0).any()
    assert not graph.analysis.influence.cuts


def test_comparison_and_integer_paths_carry_no_influence():
    graph = carried(lambda h: jnp.where(h > 0, 1.0, 0.0) + jnp.floor(h).astype(int))
    assert not claimed(graph, 0).any()


def test_indices_from_an_argument_are_not_known():
    class Indexed(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(normal(0, 2, 6))
            self.h = brainstate.HiddenState(jnp.zeros(3))

        def update(self, x, start):
            y = braintrace.matmul(x, self.w.value)
            self.h.value = 0.5 * self.h.value + lax.dynamic_slice(y, (start,), (3,))

    graph = braintrace.compile_etrace_graph(Indexed(), jnp.zeros(2), jnp.asarray(1))
    wrong = jacobian(lambda y: y[1:4], (6,)) & ~claimed(graph, 1)
    assert not wrong.any() or graph.analysis.influence.cuts  # all places, or none and recorded
