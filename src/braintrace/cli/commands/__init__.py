"""The commands and their options; what they do is imported when they run, for JAX takes time."""

from . import _bench, _compare, _demo, _explain, _train
from ._parser import Parser as Parser

COMMANDS = tuple(c.add for c in (_demo, _train, _compare, _explain, _bench))
