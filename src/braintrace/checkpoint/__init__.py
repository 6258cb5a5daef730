"""A learner in a file or a pytree, and back."""

from ._checkpoint import STATES as STATES
from ._checkpoint import WEIGHTS as WEIGHTS
from ._checkpoint import Checkpoint as Checkpoint
from ._checkpoint import CheckpointMixin as CheckpointMixin
from ._checkpoint import Saved as Saved
from ._checkpoint import save_values as save_values
from ._names import SEPARATOR as SEPARATOR
from ._names import Named as Named
from ._names import named as named
from ._names import renewed as renewed
from ._optimizer import OPTIMIZER as OPTIMIZER
from ._swap import swap as swap
from ._swap import swap_states as swap_states
