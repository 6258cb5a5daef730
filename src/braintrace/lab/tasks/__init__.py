"""Tasks that rules are compared on: what a task is, and the built-in ones by name."""

from collections.abc import Callable as _Callable

from ._adapt import AdaptLorenz as AdaptLorenz
from ._adapt import AdaptSine as AdaptSine
from ._adapt import Delayed as Delayed
from ._adding import Adding as Adding
from ._archive import BasicMotions as BasicMotions
from ._archive import Electricity as Electricity
from ._archive import JapaneseVowels as JapaneseVowels
from ._digits import Digits as Digits
from ._digits import Pixels as Pixels
from ._mackey_glass import MackeyGlass as MackeyGlass
from ._rewards import Bandit as Bandit
from ._rewards import Judged as Judged
from ._rewards import TMaze as TMaze
from ._shd import SHD as SHD
from ._spikes import Evidence as Evidence
from ._spikes import Match as Match
from ._symbols import Copy as Copy
from ._symbols import Recall as Recall
from ._task import Measure as Measure
from ._task import SequenceTask as SequenceTask
from ._task import Task as Task
from ._text import Text as Text

_TASKS: tuple[type[SequenceTask], ...] = (
    *(Copy, Adding, Match, Evidence, MackeyGlass, Digits, Text),
    *(Pixels, JapaneseVowels, BasicMotions, SHD),
    *(AdaptSine, AdaptLorenz, Delayed, Electricity, Bandit, TMaze),
)
MAKE: dict[str, _Callable[..., SequenceTask]] = {task.name: task for task in _TASKS}

# Public names live in `braintrace.tasks`: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = "braintrace.tasks"
