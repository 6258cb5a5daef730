"""Linear recurrences with trained eigenvalues, one per unit."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init

from .._errors import value_error
from ..ops import element_wise
from ._cell import Activation, Array, Cell, join, radii
from ._linear import Linear
from ._shapes import XAVIER, ZERO, Init, Size, check_size

_FLOOR = 1e-6  # of 1 - a²: the slope of its root stays below 500


class _Rotation(Cell):
    """`h = λ h + scale B x` with `λ = exp(-exp(ν) + i exp(θ))`, as two real states."""

    state_names = ("h_re", "h_im")

    def _set_eigenvalues(self, n: int, r_min: float, r_max: float, max_phase: float) -> Array:
        """Draw λ; returns the moduli."""
        check_size(self, "d_hidden", n, one=True)
        what = type(self).__name__
        radius = radii(what, n, r_min, r_max)
        if max_phase <= 0:
            raise value_error(
                f"{what}: max_phase is {max_phase}.",
                why="angles are drawn between 0 and max_phase, and stored as their logarithm.",
                do="choose a positive number.",
            )
        phase = max_phase * brainstate.random.uniform(1e-4, 1.0, (n,))
        self.d_hidden, self.state_size = n, (n,)
        self.nu_log = brainstate.ParamState(jnp.log(-jnp.log(radius)))
        self.theta_log = brainstate.ParamState(jnp.log(phase))
        return radius

    def _polar(self) -> tuple[Array, Array]:
        radius = element_wise(self.nu_log.value, lambda nu: jnp.exp(-jnp.exp(nu)))
        return radius, element_wise(self.theta_log.value, jnp.exp)

    def _advance(self, radius: Array, phase: Array, scale: Array, x: Array) -> None:
        re, im = radius * jnp.cos(phase), radius * jnp.sin(phase)
        h_re, h_im = self.h_re.value, self.h_im.value
        self.h_re.value = re * h_re - im * h_im + scale * self.B_re(x)
        self.h_im.value = im * h_re + re * h_im + scale * self.B_im(x)


class LRUCell(_Rotation):
    """The linear recurrent unit, with complex eigenvalues as two real states.

    `λ = exp(-exp(ν) + i exp(θ))`, `h = λ h + exp(γ) B x`, `y = Re(C h) + D x`.

    λ, γ and B reach the state element by element, so D_RTRL is exact for them; C and D reach no
    state, and their gradient within the step is exact.

    Args:
        d_model: size of the input and the output.
        d_hidden: number of complex eigenvalues.
        r_min: least modulus of an eigenvalue at the start.
        r_max: largest modulus; memory at the start is up to `1 / (1 - r_max)` steps.
        max_phase: largest angle of an eigenvalue at the start.
        name: name of the cell.

    Raises:
        ValueError: if not `0 <= r_min < r_max <= 1`, or max_phase is not positive.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.LRUCell(3, 8, r_min=0.9, r_max=0.999)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (3,)
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        name: str | None = None,
    ):
        super().__init__(d_model, d_model, name=name)
        self.d_model = d_model
        radius = self._set_eigenvalues(d_hidden, r_min, r_max, max_phase)
        self.gamma_log = brainstate.ParamState(0.5 * jnp.log(1 - radius**2))
        self.B_re, self.B_im = (_mix(d_model, d_hidden) for _ in range(2))
        self.C_re, self.C_im = (_mix(d_hidden, d_model) for _ in range(2))
        self.D = brainstate.ParamState(brainstate.random.normal(size=(d_model,)))

    def update(self, x: Array) -> Array:
        """Advance one step; returns y."""
        self._advance(*self._polar(), element_wise(self.gamma_log.value, jnp.exp), x)
        y = self.C_re(self.h_re.value) - self.C_im(self.h_im.value)
        return y + element_wise(self.D.value) * x


class RTUCell(_Rotation):
    """Recurrent trace units: a complex linear recurrence with a nonlinearity on its output.

    `λ = exp(-exp(ν) + i exp(θ))`, `h = λ h + sqrt(1 - |λ|²) B x`, `y = φ([Re h, Im h])`.

    All weights reach the state element by element, so D_RTRL is exact for them, with traces of
    twice the size of the weights. Arguments not named here are those of `LRUCell`.

    Args:
        d_model: size of the input.
        d_hidden: number of complex eigenvalues; the output has two values for each.
        activation: φ, a function or its name.

    Raises:
        ValueError: as for `LRUCell`, or if there is no activation of this name.

    Example:
        >>> import jax.numpy as jnp, braintrace
        >>> cell = braintrace.nn.RTUCell(3, 8, r_min=0.9, r_max=0.999)
        >>> cell.init_state()
        >>> cell(jnp.ones(3)).shape
        (16,)
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        activation: Activation = "tanh",
        name: str | None = None,
    ):
        super().__init__(d_model, 2 * d_hidden, activation=activation, name=name)
        self._set_eigenvalues(d_hidden, r_min, r_max, max_phase)
        self.B_re, self.B_im = (_mix(d_model, d_hidden) for _ in range(2))

    def update(self, x: Array) -> Array:
        """Advance one step; returns y."""
        radius, phase = self._polar()
        self._advance(radius, phase, jnp.sqrt(jnp.maximum(1 - radius**2, _FLOOR)), x)
        return self.activation(join(self.h_re.value, self.h_im.value))


class RGLRUCell(Cell):
    """The real-gated linear recurrent unit, whose eigenvalues depend on the input.

    `r = σ(Wr x)`, `i = σ(Wi x)`, `a = exp(-c softplus(Λ) r)`, `h = a h + sqrt(1 - a²) i u`, with
    `u = x`, or `u = Wu x` where the sizes of input and state differ or `project` is set.

    All layers read the input, none reads another or the state, so D_RTRL is exact for all weights.
    Other arguments are those of `GRUCell`; `b_init` is for the gates.

    Args:
        r_min: least `a` at the start where the gate r is open.
        r_max: largest such `a`; the default remembers up to a thousand steps.
        c: how much faster an open gate forgets than a shut one.
        project: whether there is a layer Wu; by default only if the sizes differ.

    Raises:
        ValueError: if not `0 <= r_min < r_max <= 1`, or the sizes differ and project is False.
    """

    _reads = (("Wr", "x"), ("Wi", "x"))

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        r_min: float = 0.9,
        r_max: float = 0.999,
        c: float = 8.0,
        project: bool | None = None,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name=name)
        differ = self.in_size != self.out_size
        if differ and project is False:
            raise value_error(
                f"RGLRUCell: in_size is {self.in_size} and out_size is {self.out_size}.",
                why="without a projection the input itself enters the state.",
                do="make the sizes equal, or leave out project=False.",
            )
        self.c = c
        radius = radii("RGLRUCell", self.out_size[-1], r_min, r_max)
        # softplus(Λ) = -log(a) / c at r = 1
        self.Lambda = brainstate.ParamState(jnp.log(jnp.expm1(-jnp.log(radius) / c)))
        self._add_layers(w_init, b_init)
        self.Wu = self._layer("x", w_init, None) if project or differ else None

    def _next(self, x: Array, h: Array) -> Array:
        r, i = jax.nn.sigmoid(self.Wr(x)), jax.nn.sigmoid(self.Wi(x))
        log_a = -self.c * r * element_wise(self.Lambda.value, jax.nn.softplus)
        scale = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_a), _FLOOR))
        u = x if self.Wu is None else self.Wu(x)
        return jnp.exp(log_a) * h + scale * i * u


def _mix(n_in: int, n_out: int) -> Linear:
    return Linear(n_in, n_out, init.Normal(1 / n_in**0.5), None)
