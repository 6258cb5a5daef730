"""Online learning for plain functions of arrays."""

from ._blocks import calls_per_block as calls_per_block
from ._blocks import scan_blocks as scan_blocks
from ._blocks import step_bytes as step_bytes
from ._blocks import varying_bytes as varying_bytes
from ._checks import check_mask as check_mask
from ._learner import Carry as Carry
from ._learner import Online as Online
from ._learner import online as online
from ._progress import ticking as ticking
from ._sequence import masked_gradient as masked_gradient
