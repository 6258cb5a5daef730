"""One example of every layer and cell of `braintrace.nn`: the rows of docs/cells.md.

    @entry("h = φ(W[x, h])")
    def MyCell():
        return nn.MyCell(3, 4), X

The function has the name of the class and returns a module and an example of its input, with a
leading batch axis; `entry(equation, "option")` makes a row of its own for an option. Inputs of a
run are random numbers times the example; of an example of integers, random integers up to its
largest. The time step is 1 ms. Layers without a state are put into leaky units. Write equations
without a vertical bar: they stand in a table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.sparse

from braintrace import nn

BATCH = 2
X = jnp.ones((BATCH, 3))


@dataclass(frozen=True, slots=True)
class Entry:
    """The equation of a layer, and a maker of (module, input)."""

    equation: str
    make: Callable[[], tuple[Any, Any]]


ENTRIES: dict[str, Entry] = {}


def entry(equation: str, option: str = ""):
    """Register a maker under its own name, and its option if there is one."""

    def register(make: Callable[[], tuple[Any, Any]]) -> Callable:
        ENTRIES[f"{make.__name__}({option})" if option else make.__name__] = Entry(equation, make)
        return make

    return register


# ----------------------------------------------------------------------------- layers, read-outs


@entry("y = W x + b")
def Linear():
    return nn.Linear(3, 4), X


@entry("y = (abs(W) sign) x")
def SignedWLinear():
    return nn.SignedWLinear(3, 4), X


@entry("y = gain standard(W) x + b")
def ScaledWSLinear():
    return nn.ScaledWSLinear(3, 4), X


@entry("y = S x, trained where S has entries")
def SparseLinear():
    pattern = scipy.sparse.csr_array(np.array([[1.0, 0, 2, 0], [0, 3, 0, 4], [5, 0, 0, 6]]) / 3)
    return nn.SparseLinear(pattern), X


@entry("y = A B x / rank")
def LoRA():
    return nn.LoRA(3, 2, 4), X


@entry("y = W x + b in each group")
def GroupedLinear():
    return nn.GroupedLinear(2, 3, 2), jnp.ones((BATCH, 2, 3))


@entry("y = table[x]")
def Embedding():
    return nn.Embedding(5, 4), jnp.full(BATCH, 4)


@entry("y = K * x")
def Conv1d():
    return nn.Conv1d((4, 2), 3, 2), jnp.ones((BATCH, 4, 2))


@entry("y = K * x")
def Conv2d():
    return nn.Conv2d((3, 3, 1), 2, 2), jnp.ones((BATCH, 3, 3, 1))


@entry("y = K * x")
def Conv3d():
    return nn.Conv3d((2, 2, 2, 1), 2, 2), jnp.ones((BATCH, 2, 2, 2, 1))


@entry("r = exp(-dt/τ) r + W x")
def LeakyRateReadout():
    return nn.LeakyRateReadout(3, 4), X


# ----------------------------------------------------------------------- the state passes weights


@entry("h = φ(W[x, h])")
def ValinaRNNCell():
    return nn.ValinaRNNCell(3, 4, activation="tanh"), X


@entry("z = φ(x); f = σ(W_u[z, h]); h = f h + (1 - f) z")
def MinimalRNNCell():
    return nn.MinimalRNNCell(3, 4), X


@entry("z, r = σ(Wz, Wr [x, h]); h = (1 - z) h + z φ(Wh[x, r h])")
def GRUCell():
    return nn.GRUCell(3, 4), X


@entry("z, r = σ(Wz, Wr [x, h]); h = (1 - z) h + z φ(Wx x + r Wh h)")
def GRUResetAfterCell():
    return nn.GRUResetAfterCell(3, 4), X


@entry("f = σ(Wf[x, h]); h = (1 - f) h + f φ(Wh[x, f h])")
def MGUCell():
    return nn.MGUCell(3, 4), X


@entry("f, i = σ(Wf, Wi [x, h]); h = f φ(h) + i φ(Wh x)")
def CFNCell():
    return nn.CFNCell(3, 4), X


@entry("i, g, f, o = Wi, Wg, Wf, Wo [x, h]; c = σ(f + 1) c + σ(i) φ(g); h = σ(o) φ(c)")
def LSTMCell():
    return nn.LSTMCell(3, 4), X


@entry(
    "u, f, r, o = Wu, Wf, Wr, Wo [x, h]; f' = σ(f + b); r' = σ(r - b); "
    "g = 2 r' f' + (1 - 2 r') f'²; c = g c + (1 - g) φ(u); h = σ(o) φ(c)"
)
def URLSTMCell():
    return nn.URLSTMCell(3, 4), X


@entry("z = σ(W_z[x, h]); h = (1 - z) h + z W_x x")
def MiniGRU():
    return nn.MiniGRU(3, 4), X


@entry("f, i = σ(W_f, W_i [x, h]); h = f h + i W_x x")
def MiniLSTM():
    return nn.MiniLSTM(3, 4), X


# ------------------------------------------------------------------- element-wise in the state


@entry("z = σ(Wz x); h = (1 - z) h + z g(Wh x)")
def MinGRUCell():
    return nn.MinGRUCell(3, 4, activation="positive"), X


@entry("f, i = σ(Wf, Wi x); h = f/(f + i) h + i/(f + i) g(Wh x)")
def MinLSTMCell():
    return nn.MinLSTMCell(3, 4), X


@entry("λ = exp(-exp(ν) + i exp(θ)); h = λ h + exp(γ) B x; y = Re(C h) + D x")
def LRUCell():
    return nn.LRUCell(3, 4), X


@entry("r, i = σ(Wr, Wi x); a = exp(-c softplus(Λ) r); h = a h + sqrt(1 - a²) i Wu x")
def RGLRUCell():
    return nn.RGLRUCell(3, 4), X


@entry("Λ' = exp(Λ Δ); h = Λ' h + (Λ' - 1)/Λ B x; y = 2 Re(C h) + D x")
def S5Cell():
    return nn.S5Cell(3, 4), X


@entry("Λ' = (1 + Λ Δ/2)/(1 - Λ Δ/2); h = Λ' h + Δ/(1 - Λ Δ/2) B x; y as above", "bilinear")
def S5Cell():  # noqa: F811
    return nn.S5Cell(3, 4, discretization="bilinear"), X


# ----------------------------------------------------- spiking: z the last spikes, y the new ones


@entry("V = α reset(V) + W x + U z; y = V > V_th")
def LIFCell():
    return nn.LIFCell(3, 4), X


@entry("V = α reset(V) + W x; y = V > V_th", "recurrent=False")
def LIFCell():  # noqa: F811
    return nn.LIFCell(3, 4, recurrent=False), X


@entry("V = α reset(V) + W x + U z; a = ρ a + z; y = V > V_th + β a")
def ALIFCell():
    return nn.ALIFCell(3, 4), X


@entry(
    "V = α reset(V) + W x + U z - (1 - α) w; y = V > V_th; "
    "w = ρ w + (1 - ρ) (a reset(V) + b y) of the new V"
)
def AdLIFCell():
    return nn.AdLIFCell(3, 4), X


@entry("Ik = ρk Ik + Ak z; V = α reset(V) + W x + U z + I1 + I2; y = V > V_th")
def GIFCell():
    return nn.GIFCell(3, 4), X


@entry("V = α reset(V) + W x; y = V > V_th")
def LeakySpikeReadout():
    return nn.LeakySpikeReadout(3, 4), X
