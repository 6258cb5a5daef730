"""The kept Jacobian: which edges, and colours that separate them."""

import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.graph._pattern import Places, _repeated, colour, kept_edges, mixing_probes
from braintrace.graph._step import Component

from .step_models import carried, compiled, normal

pytestmark = pytest.mark.usefixtures("whole_batch")


def kept(graph):
    size = int(graph.analysis.influence.offsets[len(graph.analysis.tangent.components)])
    out = np.zeros((size, size), bool)
    edges = graph.analysis.pattern.kept
    out[edges[:, 0], edges[:, 1]] = True
    return out


EYE = np.eye(6, dtype=bool)
KEPT = {
    "own position": (lambda h: 0.5 * jnp.tanh(h), EYE, False),
    "a move": (lambda h: jnp.roll(h, 1), np.roll(EYE, 1, 0), False),
    "a reversal": (lambda h: h[::-1], EYE[::-1], False),
    "own and neighbour": (lambda h: h + jnp.roll(h, 1), EYE, True),
    "two neighbours": (lambda h: jnp.roll(h, 1) + jnp.roll(h, -1), np.zeros((6, 6), bool), True),
    "nothing": (lambda h: jnp.zeros(6), np.zeros((6, 6), bool), False),
    "a shift": (
        lambda h: jnp.concatenate([jnp.zeros(1), h[:-1]]),
        np.eye(6, k=-1, dtype=bool),
        False,
    ),
}


@pytest.mark.parametrize("move, edges, drops", KEPT.values(), ids=KEPT)
def test_pattern_keeps_the_own_position_and_pure_moves(move, edges, drops):
    graph = carried(move)
    assert np.array_equal(kept(graph), edges)
    assert bool(graph.analysis.pattern.dropped) == drops


def test_pattern_couples_the_states_of_one_unit():
    def update(m, x):
        i = 0.5 * m.i.value + x @ m.w.value
        m.v.value = 0.9 * m.v.value + i
        m.i.value = i

    states = {"i": jnp.zeros(3), "v": jnp.zeros(3)}
    graph = compiled(update, {"w": normal(0, 2, 3)}, states, jnp.zeros(2))
    one = np.eye(3, dtype=bool)
    assert np.array_equal(kept(graph), np.block([[one, 0 * one], [one, one]]).astype(bool))
    (group,) = graph.hidden_groups
    assert (group.varshape, group.num_state) == ((3,), 2)


def test_states_of_different_shapes_are_different_groups():
    def update(m, x):
        m.a.value = 0.5 * m.a.value + x.sum()
        m.b.value = 0.5 * m.b.value + m.a.value[:2]

    states = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    graph = compiled(update, {"w": normal(0, 2, 3)}, states, jnp.zeros(2))
    assert [g.hidden_paths for g in graph.hidden_groups] == [(("a",),), (("b",),)]


def read_back(matrix, colouring, exit_block, source_block):
    """A matrix from its products with the tangents and cotangents of a colouring."""
    c = colouring
    ahead = [matrix @ (c.sources == k) for k in range(c.n_sources)]
    back = [(c.exits == k) @ matrix for k in range(c.n_exits)]
    out = np.zeros_like(matrix)
    for e, s in np.argwhere(matrix):
        if (exit_block[e], source_block[s]) in c.backward:
            out[e, s] = back[c.exits[e]][s]
        else:
            out[e, s] = ahead[c.sources[s]][e]
    return out


@pytest.mark.parametrize("seed", range(20))
def test_a_colouring_gives_every_entry(seed):
    rng = np.random.default_rng(seed)
    n = 12
    matrix = rng.normal(size=(n, n)) * (rng.random((n, n)) < rng.uniform(0.05, 0.5))
    block = np.arange(n) // 4
    found = colour(np.argwhere(matrix), block, block)
    assert np.array_equal(read_back(matrix, found, block, block), matrix)
    assert found.n_sources + found.n_exits <= n


def test_a_diagonal_takes_one_tangent():
    one = np.zeros(5, int)
    found = colour(np.stack([np.arange(5)] * 2, 1), one, one)
    assert (found.n_sources, found.n_exits) == (1, 0)


def test_several_states_take_one_tangent_each():
    edges = np.array([[0, 0], [0, 3], [1, 1], [1, 4], [2, 2], [2, 5]])
    block = np.repeat([0, 1], 3)
    assert (colour(edges, block, block).n_sources, colour(edges, block, block).n_exits) == (2, 0)


def test_a_sum_takes_one_cotangent():
    everything = np.stack([np.zeros(50, int), np.arange(50)], 1)
    found = colour(everything, np.zeros(1, int), np.zeros(50, int))
    assert (found.n_sources, found.n_exits) == (0, 1)


def test_a_tree_is_kept_and_a_shared_source_is_not():
    def synapses(m, x):
        m.s.value = 0.5 * m.s.value + x @ m.w.value
        m.v.value = 0.9 * m.v.value + m.s.value.sum(0)

    def averaged(m, x):
        m.s.value = 0.5 * m.s.value + x @ m.w.value + m.v.value
        m.v.value = 0.9 * m.v.value + m.s.value.sum(0)

    states = {"s": jnp.zeros((2, 3)), "v": jnp.zeros(3)}
    tree = compiled(synapses, {"w": normal(0, 2, 3)}, states, jnp.zeros(2))
    assert kept(tree)[6:, :6].sum() == 6 and not tree.analysis.influence.cuts
    # What v adds up comes back to every s: the sum would spread over units, so it is cut.
    loop = compiled(averaged, {"w": normal(0, 2, 3)}, states, jnp.zeros(2))
    assert not kept(loop)[6:, :6].any() and loop.analysis.influence.cuts


def test_group_stacks_and_splits_its_states():
    def update(m, x):
        m.i.value = 0.5 * m.i.value + x @ m.w.value
        m.v.value = 0.9 * m.v.value + m.i.value

    states = {"i": jnp.zeros(3), "v": jnp.zeros(3)}
    (group,) = compiled(update, {"w": normal(0, 2, 3)}, states, jnp.zeros(2)).hidden_groups
    parts = [normal(1, 3), normal(2, 3)]
    whole = group.concat_hidden(parts)
    assert whole.shape == (3, 2)
    assert all(np.array_equal(a, b) for a, b in zip(group.split_hidden(whole), parts, strict=True))
    with pytest.raises(ValueError, match="2 states, got 1"):
        group.concat_hidden(parts[:1])
    with pytest.raises(ValueError, match="width 3"):
        group.split_hidden(jnp.zeros((3, 3)))


def slow_kept_edges(places, exits, sources):
    """Of the edges of each exit element, those that are kept, by sets."""
    unit, kind = places.unit, places.kind
    edges = list(zip(exits.tolist(), sources.tolist(), strict=True))
    read, readers = {}, {}
    for e, s in edges:
        read.setdefault((e, kind[s]), set()).add(unit[s])
        readers.setdefault((unit[s], kind[e]), set()).add(unit[e])
    keep = []
    for e, s in edges:
        mine = read[e, kind[s]]
        tree = all(len(readers[u, kind[e]]) == 1 for u in mine)
        keep.append(unit[s] == unit[e] if unit[e] in mine else len(mine) == 1 or tree)
    return np.array(keep, bool)


@pytest.mark.parametrize("seed", range(4))
def test_edges_and_probes_are_those_of_a_slow_reference(seed):
    rng = np.random.default_rng(seed)
    shapes = [(4,), (3,), (4,), (2, 2)][: 2 + seed % 3]
    components = [Component(i, None, False, s) for i, s in enumerate(shapes)]
    offsets = np.cumsum([0, *(int(np.prod(s)) for s in shapes)])
    places, n, last = Places(components, offsets), int(offsets[-1]), int(offsets[-1]) + 6
    rows = [
        np.sort(np.where(rng.random((int(np.prod(s)), 3)) < 0.5, -1, rng.integers(0, last, 3)), 1)
        for s in shapes
    ]
    exits, sources = np.nonzero(rng.random((n, n)) < 0.2)
    assert np.array_equal(
        kept_edges(places, exits, sources), slow_kept_edges(places, exits, sources)
    )
    keys = rng.integers(0, 20, 15)
    for end in (20, 10**4):
        assert _repeated(keys, end).tolist() == [(keys == k).sum() > 1 for k in keys]

    bad = mixing_probes(components, rows, offsets, last)
    element = np.concatenate([np.full(len(r), o) + np.arange(len(r)) for r, o in
                              zip(rows, offsets, strict=False)])  # fmt: skip
    pairs = [(e, s) for e, row in zip(element, np.concatenate(rows), strict=True) for s in row]
    e, s = (np.array(a, int) for a in zip(*(p for p in pairs if 0 <= p[1] < n), strict=True))
    kept_now = [
        p for p, k in zip(zip(e, s, strict=True), slow_kept_edges(places, e, s), strict=True) if k
    ]
    for probe in range(n, last):
        reached = {e for e, s in pairs if s == probe}
        while more := {e for e, s in kept_now if s in reached} - reached:
            reached |= more
        ends = [(places.kind[e], places.position[e]) for e in reached]
        assert bad[probe] == (len({k for k, _ in ends}) < len(set(ends)))
