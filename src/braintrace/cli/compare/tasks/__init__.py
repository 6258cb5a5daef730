"""The tasks of the comparison."""

from __future__ import annotations

from collections.abc import Callable

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

MAKE: dict[str, Callable[[int], Task]] = {
    "copy": Copy,
    "adding": Adding,
    "match": Match,
    "evidence": Evidence,
    "mackey_glass": MackeyGlass,
    "digits": Digits,
    "text": Text,
}
