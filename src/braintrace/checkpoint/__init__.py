"""A learner in a file, and back."""

from ._checkpoint import Checkpoint as Checkpoint
from ._checkpoint import CheckpointMixin as CheckpointMixin
