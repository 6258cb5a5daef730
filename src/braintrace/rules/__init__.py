"""Learning rules: records of pure functions, without knowledge of operators or programs."""

from ._factored import factored as factored
from ._immediate import paired as paired
from ._immediate import untraced as untraced
from ._kept import leak as leak
from ._linear import mix as mix
from ._per_weight import per_weight as per_weight
from ._rule import Feedback as Feedback
from ._rule import Forward as Forward
from ._rule import Heard as Heard
from ._rule import Kronecker as Kronecker
from ._rule import RankOne as RankOne
from ._rule import Rule as Rule
from ._rule import Signals as Signals
from ._rule import Steps as Steps
from ._rule import Whole as Whole
from ._signal import by_group as by_group
from ._signal import square as square
from ._signal import with_signal as with_signal
from ._stretch import seen_input as seen_input
