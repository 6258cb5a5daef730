"""ETP operators: what a weight goes through to take part in online learning."""

from ._contraction import plain_dot as plain_dot
from ._conv import conv as conv
from ._element_wise import element_wise as element_wise
from ._element_wise import etp_elemwise as etp_elemwise
from ._embedding import embedding as embedding
from ._lora import lora_matmul as lora_matmul
from ._operator import ETPPrimitive as ETPPrimitive
from ._operator import Operator as Operator
from ._operator import Rules as Rules
from ._operator import register_primitive as register_primitive
from ._plain import conv_static as conv_static
from ._plain import dot_operator as dot_operator
from ._plain import gather_operator as gather_operator
from ._plain import plain_conv as plain_conv
from ._plain import with_bias as with_bias
from ._products import einsum as einsum
from ._products import grouped_matmul as grouped_matmul
from ._products import matmul as matmul
from ._sparse import etp_sp_mm as etp_sp_mm
from ._sparse import etp_sp_mv as etp_sp_mv
from ._sparse import sparse_matmul as sparse_matmul
from ._structure import Structure as Structure
from ._structure import compiled as compiled
from ._ties import tied_axes as tied_axes
from ._twin import on_mesh as on_mesh
from ._zeros import zeros_in as zeros_in
