"""Online learning for modules of PyTorch: `import braintrace.torch as bt`."""

from .._errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    raise MissingExtra("braintrace.torch", "PyTorch", "torch") from _missing

from ._choose import choose as choose
from ._learner import Learner as Learner
from ._learner import online as online
from ._tracing import register as register
