"""What is analysed on a few samples is what the whole batch would give, for every cell."""

import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u
from registry import ENTRIES
from table import Leaky

from same_graph import analysed, assert_same, both_ways

BATCH = 5


def model_of(name):
    model, x = ENTRIES[name].make()
    x = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], (BATCH, *a.shape[1:])), x)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    if not model.states(brainstate.HiddenState):
        model = Leaky(model, jax.eval_shape(model.update, x).shape)
        model.init_state()
    return model, x


@pytest.mark.parametrize("name", ENTRIES)
def test_few_samples_give_the_graph_of_all(name, monkeypatch):
    with brainstate.environ.context(dt=1.0 * u.ms):
        few, whole = both_ways(*model_of(name), monkeypatch)
    assert analysed(few) < analysed(whole)
    assert_same(few, whole)
