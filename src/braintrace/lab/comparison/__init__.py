"""Rules side by side on a task: scores, gradients against BPTT, memory and time."""

from ..._precision import brainstate as _loaded  # noqa: F401
from ._compare import compare as compare
from ._result import CompareResult as CompareResult
