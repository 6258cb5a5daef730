"""Online learning for plain functions of arrays."""

from ._learner import Carry as Carry
from ._learner import Online as Online
from ._learner import online as online
