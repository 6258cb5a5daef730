"""The tasks of the comparison, and the settings in which they are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._adding import Adding
from ._copy import Copy
from ._digits import Digits
from ._evidence import Evidence
from ._mackey_glass import MackeyGlass
from ._match import Match
from ._task import Array as Array
from ._task import Batch as Batch
from ._task import Measure as Measure
from ._task import Task as Task
from ._text import Text


@dataclass(frozen=True, slots=True)
class Entry:
    """A task by name: how to make it for a length, and what to train it with by default."""

    make: Callable[[int], Task]
    about: str
    cell: str
    length: int
    quick: int  # length of a quick run
    units: int
    batch: int
    updates: int
    rate: float


# Lengths are multiples of a block: a rest would need working memory of its own. Sizes are chosen so
# that the traces of D_RTRL take less than BPTT's past, and truncated BPTT of equal memory sees less
# than the task needs (except `digits`, whose sequences are as short as they are).
TASKS: dict[str, Entry] = {
    "copy": Entry(Copy, "repeat symbols after a pause", "gru", 40, 16, 32, 32, 3000, 1e-2),
    "adding": Entry(Adding, "sum of two marked numbers", "mingru", 96, 16, 32, 32, 1500, 1e-2),
    "match": Entry(Match, "delayed match to sample, spikes", "alif", 144, 24, 32, 32, 1000, 3e-3),
    "evidence": Entry(Evidence, "majority of cues, spikes", "alif", 160, 24, 32, 32, 800, 5e-3),
    "mackey_glass": Entry(MackeyGlass, "chaotic time series", "gru", 200, 16, 32, 32, 800, 3e-3),
    "digits": Entry(Digits, "real handwritten digits by rows", "gru", 8, 8, 32, 32, 2000, 3e-3),
    "text": Entry(Text, "next character of English text", "gru", 96, 16, 64, 32, 1500, 5e-3),
}
