"""A diagonal state-space model."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp
import numpy as np
from brainstate.nn import init
from jax import lax

from .._errors import value_error
from ..ops import element_wise
from ._cell import Array, Cell
from ._linear import Linear
from ._shapes import check_size, one_of


class S5Cell(Cell):
    """A diagonal state-space model `dh/dt = Λ h + B x`, `y = 2 Re(C h) + D x`, in steps of Δ.

    Λ = -exp(rate) + i·frequency, Δ = exp(log_step). One step is `h = Λ' h + b (B x)`, with
    `Λ' = exp(Λ Δ)`, `b = (Λ' - 1) / Λ` for "zoh" (input held during a step), or
    `Λ' = (1 + Λ Δ/2) / (1 - Λ Δ/2)`, `b = Δ / (1 - Λ Δ/2)` for "bilinear". The state is complex and
    stands for itself and its conjugate; it is stored as two real states.

    Λ, Δ and B all reach the state element by element, so D_RTRL is exact for them; C and D reach no
    state, and their gradient within the step is exact.

    Args:
        d_model: size of the input and the output.
        d_state: number of complex states. Λ starts at the eigenvalues of the HiPPO matrix.
        dt_min: least Δ at the start, drawn on a logarithmic scale; memory is about 2/Δ steps.
        dt_max: largest Δ at the start.
        discretization: "zoh" or "bilinear".
        name: name of the cell.

    Raises:
        ValueError: if not `0 < dt_min <= dt_max`, or the discretisation is unknown.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.S5Cell(3, 8)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (3,)
    """

    state_names = ("h_re", "h_im")

    def __init__(
        self,
        d_model: int,
        d_state: int,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        discretization: str = "zoh",
        name: str | None = None,
    ):
        super().__init__(d_model, d_model, name=name)
        check_size(self, "d_state", d_state, one=True)
        self.d_model, self.d_state, self.state_size = d_model, d_state, (d_state,)
        self._discrete = one_of("discretization", discretization, _DISCRETE)
        if not 0 < dt_min <= dt_max:
            raise value_error(
                f"S5Cell: dt_min is {dt_min} and dt_max is {dt_max}.",
                why="the logarithm of a step is drawn between those of the two.",
                do="choose 0 < dt_min <= dt_max.",
            )
        steps = brainstate.random.uniform(np.log(dt_min), np.log(dt_max), (d_state,))
        self.log_step = brainstate.ParamState(steps)
        self.log_rate = brainstate.ParamState(jnp.full_like(steps, np.log(0.5)))
        self.frequency = brainstate.ParamState(jnp.asarray(frequencies(d_state), steps.dtype))
        # Real B and C seen in the basis of complex eigenvectors: half of the variance each.
        b, c = init.Normal((0.5 / d_model) ** 0.5), init.Normal(0.5 / d_state**0.5)
        self.B_re, self.B_im = (Linear(d_model, d_state, b, None) for _ in range(2))
        self.C_re, self.C_im = (Linear(d_state, d_model, c, None) for _ in range(2))
        self.D = brainstate.ParamState(brainstate.random.normal(size=(d_model,)))

    def update(self, x: Array) -> Array:
        """Advance one step; returns y."""
        rate = element_wise(self.log_rate.value, jnp.exp)
        step = element_wise(self.log_step.value, jnp.exp)
        decay, gain = self._discrete(_complex(-rate, element_wise(self.frequency.value)), step)
        h = decay * _complex(self.h_re.value, self.h_im.value)
        h += gain * _complex(self.B_re(x), self.B_im(x))
        dtype = jnp.result_type(self.h_re.value, x)
        self.h_re.value, self.h_im.value = h.real.astype(dtype), h.imag.astype(dtype)
        y = self.C_re(self.h_re.value) - self.C_im(self.h_im.value)
        return 2 * y + element_wise(self.D.value) * x


def _complex(re: Array, im: Array) -> Array:
    wide = jnp.promote_types(re.dtype, jnp.float32)  # there are no narrower complex numbers
    return lax.complex(re.astype(wide), im.astype(wide))


def _hold(rate: Array, step: Array) -> tuple[Array, Array]:
    growth = jnp.expm1(rate * step)
    return growth + 1, growth / rate


def _bilinear(rate: Array, step: Array) -> tuple[Array, Array]:
    half = rate * step / 2
    return (1 + half) / (1 - half), step / (1 - half)


_DISCRETE = {"zoh": _hold, "bilinear": _bilinear}


def frequencies(n: int) -> np.ndarray:
    """The n positive imaginary parts of the eigenvalues of the normal part of HiPPO, in order."""
    # HiPPO-LegS is -1/2 + S minus a rank-one term, S antisymmetric with the entries below.
    root = np.sqrt(2 * np.arange(2 * n) + 1)
    below = -np.tril(np.outer(root, root), -1) / 2
    return np.linalg.eigvalsh(1j * (below - below.T))[n:]
