"""Where arrays lie in the scratch: nothing overlaps, and little is wasted."""

import numpy as np
import pytest
from cells import Cell

from braintrace.export._memory import laid_out
from braintrace.export._nodes import Node


def arrays(*about):
    """Arrays of some sizes with the times at which they are there."""
    single = np.dtype("float32")
    nodes = [Node("map", (size,), single, number=k) for k, (size, _) in enumerate(about)]
    return {n: sum(1 << t for t in times) for n, (_, times) in zip(nodes, about, strict=True)}


def drawn(seed):
    rng = np.random.default_rng(seed)
    number = int(rng.integers(5, 60))
    starts, lengths = rng.integers(number, size=number), 1 + rng.exponential(4, number).astype(int)
    sizes = rng.choice([1, 2, 3, 4, 6, 8, 16, 32, 64], number)
    times = [range(a, a + b) for a, b in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return arrays(*zip(sizes.tolist(), times, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_arrays_that_are_there_together_lie_apart(seed):
    times = drawn(seed)
    layout = laid_out(times)
    for a in times:
        for b in times:
            if a is not b and times[a] & times[b]:
                ends = layout.starts[a] + a.size, layout.starts[b] + b.size
                assert ends[0] <= layout.starts[b] or ends[1] <= layout.starts[a]
    assert layout.live <= layout.nbytes <= 1.25 * layout.live


def test_what_reaches_highest_chooses_first_in_another_round():
    layout = laid_out(arrays((1, [3]), (1, [1]), (1, [2, 3]), (1, [1, 2])))
    assert layout.nbytes == layout.live == 4 * 2
    assert list(layout.starts.values()) == [0, 0, 1, 1], "d, a, b, c"


def test_types_have_blocks_of_their_own():
    flag, number = (Node("map", (4,), np.dtype(t), number=k) for k, t in enumerate(("?", "f8")))
    layout = laid_out({flag: 1, number: 2})
    assert layout.starts == {flag: 0, number: 0} and layout.nbytes == 4 + 32


def test_a_learner_is_the_same_text_every_time(tmp_path):
    texts = [
        Cell("DelayedLinear", "no_trace", tmp_path / str(k), 2, np.float64).done.path.joinpath(
            "learner.c"
        )
        for k in range(3)
    ]
    assert len({text.read_text("utf-8") for text in texts}) == 1
