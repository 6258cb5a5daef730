"""Sequences of different lengths as arrays (T, B, C) with masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..._errors import value_error


def pad(
    sequences: Sequence[np.ndarray], length: int | None = None, *, front: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Put sequences into one array, with zeros where one is shorter.

    Args:
        sequences: arrays (T, C), whose lengths may differ.
        length: steps of the result, default those of the longest. Of a longer sequence the first
            steps are taken, with `front` the last.
        front: put the zeros before a sequence, so that all end at the last step.

    Returns:
        Values (T, B, C), and the mask (T, B): 1 where a sequence has a step, else 0.

    Example:
        >>> import numpy as np
        >>> from braintrace.data import pad
        >>> xs, mask = pad([np.ones((1, 2)), np.ones((3, 2))])
        >>> xs.shape, mask.T.tolist()
        ((3, 2, 2), [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    """
    shapes = [np.shape(x) for x in sequences]
    if not shapes or any(len(s) != 2 or s[1] != shapes[0][-1] for s in shapes):
        raise value_error(
            f"sequences of the shapes {sorted(set(shapes))} do not fit into one array.",
            why="all are (T, C) with the same number of channels C, and there is at least one",
            do="reshape them; a sequence of single numbers is x[:, None]",
        )
    steps = max(s[0] for s in shapes) if length is None else length
    dtype = np.result_type(*sequences)
    values = np.zeros((steps, len(sequences), shapes[0][1]), dtype)
    mask = np.zeros((steps, len(sequences)), np.float32)
    for b, x in enumerate(sequences):
        kept = min(steps, len(x))
        place = slice(steps - kept, steps) if front else slice(kept)
        values[place, b] = x[len(x) - kept :] if front else x[:kept]
        mask[place, b] = 1
    return values, mask


def batches(
    sequences: Sequence[np.ndarray],
    labels: Sequence[int] | np.ndarray,
    size: int,
    *,
    seed: int | None = None,
    length: int | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All sequences once, in batches.

    Args:
        sequences: arrays (T, C), whose lengths may differ.
        labels: one per sequence.
        size: sequences of a batch; the last may have fewer.
        seed: of a random order; without one the order stays.
        length: steps of all batches, default those of the longest sequence of all, so that
            compiled programs see one shape.

    Returns:
        An iterator of values (T, B, C), labels (B,) and masks (T, B), see `pad`.
    """
    if len(sequences) != len(labels) or size < 1:
        raise value_error(
            f"{len(sequences)} sequences with {len(labels)} labels make no batches of {size}.",
            why="every sequence has one label, and a batch at least one sequence",
            do="pass as many labels as sequences, and a positive size",
        )
    order = np.arange(len(labels))
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    labels = np.asarray(labels)
    steps = max(map(len, sequences), default=0) if length is None else length
    parts = (order[i : i + size] for i in range(0, len(order), size))
    return (
        (values, labels[part], mask)
        for part in parts
        for values, mask in (pad([sequences[i] for i in part], steps),)
    )
