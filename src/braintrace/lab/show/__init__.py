"""Pictures of networks that run and learn. They need matplotlib; recording does not."""

from ..._precision import brainstate as _loaded  # noqa: F401
from ._lines import signals as signals
from ._lines import states as states
from ._lines import traces as traces
from ._raster import raster as raster
from ._raster import rates as rates
from ._record import record as record
from ._recording import Recording as Recording
from ._recording import TraceRecord as TraceRecord

# Public names live in `braintrace.show`: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = "braintrace.show"
for _kept in (Recording, TraceRecord):  # training makes them, too
    _kept.__module__ = "braintrace.show"
