"""Operators whose sums stay within a channel, and may be followed where D-RTRL cuts them.

The places of a short convolution that are added up and fan out over the state of their channel, or
the key axis of a matrix memory that is read and corrected column by column: behind such a sum a
single output element meets no other one, so following it costs a bounded number of slots per output
element. A mean over a layer lets all of them meet, and stays cut.

With two channels v of an operator and two keys, the state S is (key, channel), elements 0 to 3, and
`S' = S - k ⊗ (k @ S) + k ⊗ v` sums over the keys within a channel. State elements, a row each, by
those that they read and by the elements of v that they are reached from:

    reads     0 2    1 3    0 2    1 3
    reached   v0     v1     v0     v1       one per row: v0 and v1 stay apart, each has two slots

`S' = S - mean(S) + v` reads 0 1 2 3 in every row: v0 and v1 meet after one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from ._influence import MOST_SLOTS, Cut
from ._sets import NONE
from ._sites import Site


def meet(cuts: Iterable[Cut], reached: sparse.csr_matrix, first: int) -> bool:
    """Whether results of what is cut would read several output elements of an operator.

    `reached` is (state element, output element), what is reached while it is cut; `first` is the
    source index of the first output element.
    """
    count = np.diff(reached.indptr)
    if count.max(initial=0) > 1:
        return True
    n, n_y = reached.shape
    of = np.full(first + n_y + 1, NONE)  # the output element behind each source; the last is none
    of[:n][count == 1] = reached.indices
    of[first : first + n_y] = np.arange(n_y)
    for cut in cuts:
        if cut.rows is not None and cut.rows.shape[-1]:
            is_source = (cut.rows != NONE) & (cut.rows < first + n_y)
            reads = of[np.where(is_source, cut.rows, first + n_y)]
            low = np.where(reads == NONE, n_y, reads).min(-1)
            if (reads.max(-1) > low).any():
                return True
    return False


def stays_apart(
    step: sparse.csr_matrix, direct: sparse.csr_matrix, site: Site, traced: bool, copies: int
) -> sparse.csr_matrix | None:
    """The state elements that each output element reaches in any number of steps, if few.

    They may be followed if no two output elements ever meet in one; or, for an operator that is
    not `traced` otherwise, if those that meet are a channel, one of several. `step` are all edges
    between state elements, `direct` those from the output, of one of so many `copies`.
    """
    reached = direct
    while True:
        if np.diff(reached.tocsc().indptr).max(initial=0) > MOST_SLOTS:
            return None
        more = ((step @ reached) + reached).astype(bool)
        if more.nnz == reached.nnz:
            break
        reached = more
    if np.diff(reached.indptr).max(initial=0) <= 1:
        return reached
    used = np.flatnonzero(np.diff(reached.tocsc().indptr))
    meeting, _ = csgraph.connected_components(reached[:, used].T.astype(int) @ reached[:, used])
    op = site.operator
    alike = max(prod(op.free_shape(key)) for key in op.shapes)
    return reached if not traced and meeting * copies > alike else None
