"""Layers whose weights go through ETP operators."""

from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._embedding import Embedding as Embedding
from ._forwards import forward as __getattr__  # noqa: F401
from ._grouped import GroupedLinear as GroupedLinear
from ._linear import Linear as Linear
from ._lora import LoRA as LoRA
from ._readout import LeakyRateReadout as LeakyRateReadout
from ._rnn import GRUCell as GRUCell
from ._rnn import LSTMCell as LSTMCell
from ._rnn import ValinaRNNCell as ValinaRNNCell
from ._scaled import ScaledWSLinear as ScaledWSLinear
from ._signed import SignedWLinear as SignedWLinear
from ._sparse import SparseLinear as SparseLinear
