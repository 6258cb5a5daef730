"""Recordings from local files: readers, binning of events, padding, batches as (T, B, C).

Everything here is numpy, and nothing is downloaded.
"""

from ._batches import batches as batches
from ._batches import pad as pad
from ._dvs import read_dvs_gesture as read_dvs_gesture
from ._dvs import read_nmnist as read_nmnist
from ._edges import edge_matrix as edge_matrix
from ._edges import read_edges as read_edges
from ._events import Events as Events
from ._events import bin_events as bin_events
from ._shd import read_shd as read_shd
from ._tables import read_csv as read_csv
from ._tables import read_ts as read_ts

# Public names live in `braintrace.data`: help, pickles and tracebacks say so.
for _name, _value in list(globals().items()):
    if getattr(_value, "__module__", "").startswith(__name__ + "."):
        _value.__module__ = "braintrace.data"
