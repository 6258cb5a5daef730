"""Rules side by side: the same weights, the same batches, what they learn and what they cost."""

from ._command import run as run
