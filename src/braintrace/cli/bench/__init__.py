"""Time and memory of gradients against the length of the sequence."""

from ._command import run as run
