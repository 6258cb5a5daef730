"""Loops over time as kernels: a tile of units per program, the steps inside.

Where units do not meet in a step, every program of one kernel takes its units through all steps
alone. It takes the body of a `lax.scan`, or refuses it, and knows nothing of learning.
"""

from ._steps import loop_kernel as loop_kernel
from ._tiles import Refused as Refused
