"""Learning rules: records of pure functions, without knowledge of operators or programs."""

from ._factored import factored as factored
from ._linear import mix as mix
from ._per_weight import per_weight as per_weight
from ._rule import Forward as Forward
from ._rule import Rule as Rule
from ._rule import Signals as Signals
from ._rule import Steps as Steps
