"""Online learning for plain functions of arrays."""

from ._blocks import step_bytes as step_bytes
from ._blocks import varying_bytes as varying_bytes
from ._checks import Wording as Wording
from ._checks import check_exact as check_exact
from ._checks import check_mask as check_mask
from ._checks import check_memory as check_memory
from ._checks import check_relations as check_relations
from ._learner import Carry as Carry
from ._learner import Online as Online
from ._learner import online as online
from ._learner import sized_options as sized_options
from ._loop import Bodies as Bodies
from ._loop import Body as Body
from ._loop import Mode as Mode
from ._loop import Options as Options
from ._loop import Position as Position
from ._loop import Stream as Stream
from ._loop import Updates as Updates
from ._loop import Weights as Weights
from ._loop import run_gradient as run_gradient
from ._loop import run_outputs as run_outputs
from ._loop import run_updates as run_updates
from ._loop import window_sizes as window_sizes
from ._plan import traces_of as traces_of
from ._progress import ticking as ticking
