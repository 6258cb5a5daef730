"""Layers whose weights go through ETP operators."""

from ._linear import Linear as Linear
from ._readout import LeakyRateReadout as LeakyRateReadout
from ._rnn import GRUCell as GRUCell
from ._rnn import LSTMCell as LSTMCell
from ._rnn import ValinaRNNCell as ValinaRNNCell
