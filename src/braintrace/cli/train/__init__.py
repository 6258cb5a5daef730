"""Training of one network on one task, with checkpoints."""

from ._command import run as run
