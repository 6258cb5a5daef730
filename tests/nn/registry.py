r"""One example of every layer and cell of `braintrace.nn`: the rows of docs/cells.md.

    @entry(r"$h = \phi(W [x, h])$")
    def MyCell():
        return nn.MyCell(3, 4), X

The function has the name of the class and returns a module and an example of its input, with a
leading batch axis; `entry(equation, "option")` makes a row of its own for an option. Inputs of a
run are random numbers times the example; of an example of integers, random integers up to its
largest. The time step is 1 ms. Layers without a state are put into leaky units. Equations are
LaTeX without a vertical bar, since they are cells of a table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from braintrace import nn

BATCH = 2
DELAYS = jnp.array([0.3, 1.4, 2.6])
X = jnp.ones((BATCH, 3))


@dataclass(frozen=True, slots=True)
class Entry:
    """The equation of a layer, and a function that returns (module, input)."""

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


@entry(r"$y = W x + b$")
def Linear():
    return nn.Linear(3, 4), X


@entry(r"$y = (\mathrm{sign} \odot \lvert W \rvert) x$")
def SignedWLinear():
    return nn.SignedWLinear(3, 4), X


@entry(r"$y = \mathrm{gain} \cdot \mathrm{standardise}(W) x + b$")
def ScaledWSLinear():
    return nn.ScaledWSLinear(3, 4), X


@entry(r"$y = S x$ with trained nonzero entries of $S$")
def SparseLinear():
    pattern = scipy.sparse.csr_array(np.array([[1.0, 0, 2, 0], [0, 3, 0, 4], [5, 0, 0, 6]]) / 3)
    return nn.SparseLinear(pattern), X


@entry(r"$y = A B x / \mathrm{rank}$")
def LoRA():
    return nn.LoRA(3, 2, 4), X


@entry(r"$y = W x + b$ per group")
def GroupedLinear():
    return nn.GroupedLinear(2, 3, 2), jnp.ones((BATCH, 2, 3))


@entry(r"$y = \mathrm{table}[x]$")
def Embedding():
    return nn.Embedding(5, 4), jnp.full(BATCH, 4)


@entry(r"$y = K \ast x$")
def Conv1d():
    return nn.Conv1d((4, 2), 3, 2), jnp.ones((BATCH, 4, 2))


@entry(r"$y = K \ast x$")
def Conv2d():
    return nn.Conv2d((3, 3, 1), 2, 2), jnp.ones((BATCH, 3, 3, 1))


@entry(r"$y = K \ast x$")
def Conv3d():
    return nn.Conv3d((2, 2, 2, 1), 2, 2), jnp.ones((BATCH, 2, 2, 2, 1))


@entry(r"$r = e^{-dt / \tau} r + W x$")
def LeakyRateReadout():
    return nn.LeakyRateReadout(3, 4), X


@entry(r"$r = e^{-dt / \tau} r + x$, returns $W r$; $x$ is that of a `Linear` layer")
def FilteredReadout():
    return brainstate.nn.Sequential(nn.Linear(3, 3), nn.FilteredReadout(3, 4)), X


@entry(r"$s_j = \sum_k \mathrm{max}(0, 1 - \lvert k - d_j \rvert) x_j^{(k)}$, $x^{(k)}$ from $k$ "
       r"steps ago; $y = W s$, into a `FilteredReadout`")  # fmt: skip
def DelayedLinear():
    layer = nn.DelayedLinear(3, 4, delay=DELAYS, max_delay=3.0)
    return brainstate.nn.Sequential(layer, nn.FilteredReadout(4, 2)), X


# ----------------------------------------------------------------------- the state passes weights


@entry(r"$h = \phi(W [x, h])$")
def ValinaRNNCell():
    return nn.ValinaRNNCell(3, 4, activation="tanh"), X


@entry(r"$z = \phi(x)$; $f = \sigma(W_u [z, h])$; $h = f h + (1 - f) z$")
def MinimalRNNCell():
    return nn.MinimalRNNCell(3, 4), X


@entry(r"$z, r = \sigma(W_z, W_r [x, h])$; $h = (1 - z) h + z \phi(W_h [x, r h])$")
def GRUCell():
    return nn.GRUCell(3, 4), X


@entry(r"$z, r = \sigma(W_z, W_r [x, h])$; $h = (1 - z) h + z \phi(W_x x + r W_h h)$")
def GRUResetAfterCell():
    return nn.GRUResetAfterCell(3, 4), X


@entry(r"$f = \sigma(W_f [x, h])$; $h = (1 - f) h + f \phi(W_h [x, f h])$")
def MGUCell():
    return nn.MGUCell(3, 4), X


@entry(r"$f, i = \sigma(W_f, W_i [x, h])$; $h = f \phi(h) + i \phi(W_h x)$")
def CFNCell():
    return nn.CFNCell(3, 4), X


@entry(
    r"$i, g, f, o = W_i, W_g, W_f, W_o [x, h]$; $c = \sigma(f + 1) c + \sigma(i) \phi(g)$; "
    r"$h = \sigma(o) \phi(c)$"
)
def LSTMCell():
    return nn.LSTMCell(3, 4), X


@entry(
    r"$u, f, r, o = W_u, W_f, W_r, W_o [x, h]$; $\hat f = \sigma(f + b)$; "
    r"$\hat r = \sigma(r - b)$; $g = 2 \hat r \hat f + (1 - 2 \hat r) \hat f^2$; "
    r"$c = g c + (1 - g) \phi(u)$; $h = \sigma(o) \phi(c)$"
)
def URLSTMCell():
    return nn.URLSTMCell(3, 4), X


@entry(r"$z = \sigma(W_z [x, h])$; $h = (1 - z) h + z W_x x$")
def MiniGRU():
    return nn.MiniGRU(3, 4), X


@entry(r"$f, i = \sigma(W_f, W_i [x, h])$; $h = f h + i W_x x$")
def MiniLSTM():
    return nn.MiniLSTM(3, 4), X


# ------------------------------------------------------------------- element-wise in the state


@entry(r"$z = \sigma(W_z x)$; $h = (1 - z) h + z g(W_h x)$")
def MinGRUCell():
    return nn.MinGRUCell(3, 4, activation="positive"), X


@entry(r"$f, i = \sigma(W_f, W_i x)$; $h = \frac{f}{f + i} h + \frac{i}{f + i} g(W_h x)$")
def MinLSTMCell():
    return nn.MinLSTMCell(3, 4), X


@entry(
    r"$\lambda = \exp(-e^\nu + i e^\theta)$; $h = \lambda h + e^\gamma B x$; "
    r"$y = \mathrm{Re}(C h) + D x$"
)
def LRUCell():
    return nn.LRUCell(3, 4), X


@entry(
    r"$\lambda = \exp(-e^\nu + i e^\theta)$; "
    r"$h = \lambda h + \sqrt{1 - \lvert \lambda \rvert^2} B x$; "
    r"$y = \phi([\mathrm{Re} h, \mathrm{Im} h])$"
)
def RTUCell():
    return nn.RTUCell(3, 4), X


@entry(
    r"$r, i = \sigma(W_r, W_i x)$; $a = \exp(-c \cdot \mathrm{softplus}(\Lambda) r)$; "
    r"$h = a h + \sqrt{1 - a^2} i W_u x$"
)
def RGLRUCell():
    return nn.RGLRUCell(3, 4), X


@entry(
    r"$\bar\Lambda = \exp(\Lambda \Delta)$; "
    r"$h = \bar\Lambda h + \frac{\bar\Lambda - 1}{\Lambda} B x$; "
    r"$y = 2 \mathrm{Re}(C h) + D x$"
)
def S5Cell():
    return nn.S5Cell(3, 4), X


@entry(
    r"$\bar\Lambda = \frac{1 + \Lambda \Delta / 2}{1 - \Lambda \Delta / 2}$; "
    r"$h = \bar\Lambda h + \frac{\Delta}{1 - \Lambda \Delta / 2} B x$; $y$ as above",
    "bilinear",
)
def S5Cell():  # noqa: F811
    return nn.S5Cell(3, 4, discretization="bilinear"), X


# ----------------------------------------------------- spiking: z the last spikes, y the new ones


@entry(r"$V = \alpha R(V) + W x + U z$; $y = \Theta(V - V_\mathrm{th})$")
def LIFCell():
    return nn.LIFCell(3, 4), X


@entry(r"$V = \alpha R(V) + W x$; $y = \Theta(V - V_\mathrm{th})$", "recurrent=False")
def LIFCell():  # noqa: F811
    return nn.LIFCell(3, 4, recurrent=False), X


@entry(
    r"$V = \alpha R(V) + W x + U z$; $a = \rho a + z$; "
    r"$y = \Theta(V - V_\mathrm{th} - \beta a)$"
)
def ALIFCell():
    return nn.ALIFCell(3, 4), X


@entry(
    r"$V = \alpha R(V) + W x + U z - (1 - \alpha) w$; $y = \Theta(V - V_\mathrm{th})$; "
    r"$w = \rho w + (1 - \rho) (a R(V) + b y)$ with the new $V$"
)
def AdLIFCell():
    return nn.AdLIFCell(3, 4), X


@entry(
    r"$I_k = \rho_k I_k + A_k z$; $V = \alpha R(V) + W x + U z + I_1 + I_2$; "
    r"$y = \Theta(V - V_\mathrm{th})$"
)
def GIFCell():
    return nn.GIFCell(3, 4), X


@entry(r"$V = \alpha R(V) + W x$; $y = \Theta(V - V_\mathrm{th})$")
def LeakySpikeReadout():
    return nn.LeakySpikeReadout(3, 4), X


@entry(r"$V = \alpha R(V) + W s + U s'$ with late inputs $s$ and spikes $s'$; "
       r"$y = \Theta(V - V_\mathrm{th})$")  # fmt: skip
def DelayedLIFCell():
    options = {"u_delay": jnp.array([0.2, 0.9, 1.7, 2.5]), "max_delay": 3.0}
    return nn.DelayedLIFCell(3, 4, delay=DELAYS, **options), X


@entry(r"$V = \alpha R(V) + W s$; $y = \Theta(V - V_\mathrm{th})$", "recurrent=False")
def DelayedLIFCell():  # noqa: F811
    return nn.DelayedLIFCell(3, 4, delay=DELAYS, max_delay=3.0, recurrent=False), X


# ------------------------------------------------------------------ in continuous time, of changes


@entry(r"$f = \sigma(W [x, h])$; $h = (h + f A) / (1 + dt / \tau + f)$")
def LTCCell():
    return nn.LTCCell(3, 4), X


@entry(r"$s = \sigma(W_s [x, h])$; $h = (1 - s) \phi(W_g [x, h]) + s \phi(W_k [x, h])$")
def CfCCell():
    return nn.CfCCell(3, 4), X


@entry(
    r"$I = \alpha (\cos \omega I - \sin \omega R(V)) + W x + U z$; "
    r"$V = \alpha (\sin \omega I + \cos \omega R(V))$ with the last states; "
    r"$y = \Theta(V - V_\mathrm{th})$"
)
def ResonateCell():
    return nn.ResonateCell(3, 4, period=8.0), X


@entry(
    r"$s = s + W x$; $d = \phi(s) - r$; $y = d \Theta(\lvert d \rvert / \theta - 1)$; $r = r + y$"
)
def SigmaDeltaCell():
    return nn.SigmaDeltaCell(3, 4, 0.3), X
