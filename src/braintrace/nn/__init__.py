"""Layers whose weights go through ETP operators."""

from ._adaptive import AdLIFCell as AdLIFCell
from ._adaptive import ALIFCell as ALIFCell
from ._adaptive import GIFCell as GIFCell
from ._lif import LeakySpikeReadout as LeakySpikeReadout
from ._lif import LIFCell as LIFCell
from ._linear import Linear as Linear
from ._readout import LeakyRateReadout as LeakyRateReadout
from ._rnn import GRUCell as GRUCell
from ._rnn import LSTMCell as LSTMCell
from ._rnn import ValinaRNNCell as ValinaRNNCell
from ._spiking import SpikingCell as SpikingCell
from ._surrogate import surrogate as surrogate
