"""Graphs of one step, analysed on a few samples and on the whole batch, side by side."""

import numpy as np

import braintrace
import braintrace.graph._graph as analysis
from braintrace.engine._observe import _everywhere


def both_ways(model, x, monkeypatch):
    """The graph by a few samples, if they are enough, and by all."""
    graph = lambda: braintrace.compile_etrace_graph(model, x).analysis  # one line for both reports
    few = graph()
    with monkeypatch.context() as patch:
        patch.setattr(analysis, "thin", lambda tangent: None)
        return few, graph()


def analysed(graph):
    """How many elements were analysed."""
    return int(graph.influence.offsets[-1])


def assert_same(one, other):
    for a, b in zip(described(one), described(other), strict=True):
        assert same(a, b), (a, b)


def described(graph):
    """Slots, derivatives and certificate, in arrays that do not depend on what is analysed."""
    picks = lambda p: (p.shape, p.component, p.index, p.sizes)
    tangent, slots = graph.tangent, [r.slots for r in graph.relations]
    shapes = [v.shape for v in tangent.entries]

    def colours(array, shapes_of, offsets):
        parts = np.split(array, np.asarray(offsets[1:-1]))
        return [_everywhere(a, s) for a, s in zip(parts, shapes_of, strict=True)]

    def colouring(c, n):
        offsets = graph.influence.offsets[: n + 1]
        sources = colours(c.sources, shapes, offsets) if len(c.sources) == offsets[-1] else None
        return sources, c.n_sources, colours(c.exits, shapes, offsets), c.n_exits, c.backward

    views = [
        (
            colouring(view.pattern.colouring, len(shapes)),
            view.pattern.dropped,
            [(tangent.program.equations.index(c.equation), c.sources, c.reason)
             for c in view.influence.cuts],
            view.influence.lost,
            [
                [(_everywhere(c.sources, v.shape), c.n_sources, c.n_exits, c.backward)
                 for c, v in zip(tap.colourings, parts, strict=True)]
                for tap, parts in zip(view.taps, tangent.taps, strict=True)
            ],
        )
        for view in graph.views
    ]  # fmt: skip
    own = [
        (
            (s.shape, s.width, s.dtype, s.destination),
            [picks(p) for p in s.at],
            [[[(c, picks(p)) for c, p in cell] for cell in row] for row in s.transition],
            [[(part, d, back, picks(p)) for part, d, back, p in row] for row in s.arrival],
            None if s.table is None else s.table.index,
            [[None if t is None else t.index for t in (of.ahead, of.back)] for of in s.tails],
        )
        for s in slots
    ]
    groups = [(g.hidden_paths, g.varshape, g.is_diagonal_recurrence) for g in graph.groups]
    records = [(r.kind, r.message) for r in graph.records]
    return views, own, groups, records, graph.view_of, graph.shares_trace


def same(a, b):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
