"""What a learner's gradient is compared with: BPTT and finite differences."""

from .._precision import brainstate as _loaded  # noqa: F401
from ._bptt import bptt_grad as bptt_grad
from ._compare import Comparison as Comparison
from ._compare import compare as compare
from ._finite import finite_difference_grad as finite_difference_grad

# Public names live here, whatever file defines them: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = __name__
