"""Who may be connected, and how, while a network learns: optax transformations (extra `tasks`)."""

from ._constraints import keep_mask as keep_mask
from ._constraints import keep_signs as keep_signs
from ._deep_r import RewiringState as RewiringState
from ._deep_r import deep_r as deep_r

# Public names live in `braintrace.wiring`: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = "braintrace.wiring"
