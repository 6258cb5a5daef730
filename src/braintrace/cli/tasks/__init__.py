"""The tasks that networks are trained on."""

from __future__ import annotations

from collections.abc import Callable

from ._adding import Adding
from ._digits import Digits
from ._mackey_glass import MackeyGlass
from ._spikes import Evidence, Match
from ._symbols import Copy
from ._symbols import Recall as Recall
from ._task import Array as Array
from ._task import Batch as Batch
from ._task import Task as Task
from ._text import Text

_TASKS = (Copy, Adding, Match, Evidence, MackeyGlass, Digits, Text)
MAKE: dict[str, Callable[[int], Task]] = {task.name: task for task in _TASKS}
