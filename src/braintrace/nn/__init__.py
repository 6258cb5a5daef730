"""Layers whose weights go through ETP operators."""

from .._precision import brainstate as _loaded  # noqa: F401
from .._published import published_layer as __getattr__  # noqa: F401
from ._adaptive import AdLIFCell as AdLIFCell
from ._adaptive import ALIFCell as ALIFCell
from ._adaptive import GIFCell as GIFCell
from ._continuous import CfCCell as CfCCell
from ._continuous import LTCCell as LTCCell
from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._delay import DelayedLIFCell as DelayedLIFCell
from ._delay import DelayedLinear as DelayedLinear
from ._embedding import Embedding as Embedding
from ._gru import CFNCell as CFNCell
from ._gru import GRUCell as GRUCell
from ._gru import GRUResetAfterCell as GRUResetAfterCell
from ._gru import MGUCell as MGUCell
from ._lif import LeakySpikeReadout as LeakySpikeReadout
from ._lif import LIFCell as LIFCell
from ._linear import GroupedLinear as GroupedLinear
from ._linear import Linear as Linear
from ._linear import ScaledWSLinear as ScaledWSLinear
from ._linear import SignedWLinear as SignedWLinear
from ._lora import LoRA as LoRA
from ._lru import LRUCell as LRUCell
from ._lru import RGLRUCell as RGLRUCell
from ._lru import RTUCell as RTUCell
from ._lstm import LSTMCell as LSTMCell
from ._lstm import URLSTMCell as URLSTMCell
from ._minimal import MinGRUCell as MinGRUCell
from ._minimal import MiniGRU as MiniGRU
from ._minimal import MiniLSTM as MiniLSTM
from ._minimal import MinLSTMCell as MinLSTMCell
from ._readout import FilteredReadout as FilteredReadout
from ._readout import LeakyRateReadout as LeakyRateReadout
from ._resonate import ResonateCell as ResonateCell
from ._resonate import SigmaDeltaCell as SigmaDeltaCell
from ._rnn import MinimalRNNCell as MinimalRNNCell
from ._rnn import ValinaRNNCell as ValinaRNNCell
from ._s5 import S5Cell as S5Cell
from ._sparse import SparseLinear as SparseLinear
from ._spiking import SpikingCell as SpikingCell
from ._surrogate import surrogate as surrogate

__all__ = [_name for _name in globals() if not _name.startswith("_")]

# Public names live here, whatever file defines them: help, pickles and tracebacks say so.
for _name in __all__:
    globals()[_name].__module__ = __name__
