"""Networks from and to the Neuromorphic Intermediate Representation, NIR."""

from ..._precision import brainstate as _loaded  # noqa: F401
from ._export import to_nir as to_nir
from ._network import Network as Network
from ._network import from_nir as from_nir
from ._neurons import Neurons as Neurons

__all__ = ["Network", "Neurons", "from_nir", "to_nir"]

# Public names live in `braintrace.nir`: help, pickles and tracebacks say so.
for _name in __all__:
    globals()[_name].__module__ = "braintrace.nir"
