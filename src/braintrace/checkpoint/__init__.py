"""A learner in a file or a pytree, and back."""

from ._checkpoint import OPTIMIZER as OPTIMIZER
from ._checkpoint import Checkpoint as Checkpoint
from ._checkpoint import CheckpointMixin as CheckpointMixin
from ._checkpoint import File as File
from ._checkpoint import save_values as save_values
from ._contents import of_rule as of_rule
from ._optimizer import check_passed as check_passed
from ._pytree import STATES as STATES
from ._pytree import WEIGHTS as WEIGHTS
from ._pytree import PytreeMixin as PytreeMixin
from ._pytree import tree_of_values as tree_of_values
from ._pytree import values_of_tree as values_of_tree
