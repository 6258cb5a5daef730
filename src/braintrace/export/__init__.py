"""Learners that leave Python: as C, and as programs that JAX alone runs."""

from ._export import ExportedC as ExportedC
from ._export import Leaf as Leaf
from ._export import OneUpdate as OneUpdate
from ._export import write_c as write_c
from ._learner import Role as Role
from ._learner import Sizes as Sizes
from ._program import ExportedProgram as ExportedProgram
from ._program import write_program as write_program
