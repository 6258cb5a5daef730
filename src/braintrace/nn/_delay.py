"""Axonal delays that are trained: a dense layer whose senders have one each, and neurons with it.

With d_j the delay of sender j and k the interpolation, what arrives from it at a step t is
s_j = Σ_τ k(τ - d_j) x_j(t - τ), and y = s W. A delay acts on all receivers through W, so D-RTRL
would cut it from their states, as it cuts whatever passes a weight. The same function, with the
delay at every synapse of its sender, is

    y = s W + s' (W ⊙ (d - d0))      s' = ∂s/∂d, d0 = d without a derivative

The second product is zero, and its derivative by d_j is s'_j W_ji: that of y_i. It is an operator
like the first, with one number of trace per synapse, and nothing is cut between it and the states
of the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

import brainstate
import jax
import jax.numpy as jnp
import saiunit as u
from brainstate.nn import init

from .._errors import value_error
from ..ops import matmul
from ._cell import Cell
from ._lif import LIFCell
from ._shapes import KAIMING, ZERO, Init, Size, UnitArray, initial, one_of, over_leading
from ._spiking import Options
from ._time import in_ms, in_steps, refuted, time_step

Kernel = Callable[[jax.Array, jax.Array], jax.Array]

# Of positions minus delays, and a width, both in steps; over the positions the sum is one.
KERNELS: dict[str, Kernel] = {
    "linear": lambda a, width: jnp.maximum(0, 1 - jnp.abs(a)),
    "gaussian": lambda a, width: jax.nn.softmax(-((a / width) ** 2) / 2, axis=0),
}


class DelayedLinear(Cell):
    """A dense layer with a trained delay per sender (axonal delays), `y = s @ W + b`.

    `s_j = Σ_τ k(τ - d_j) x_j(t - τ)`: between two steps the input is interpolated linearly, or
    smoothed by a gaussian, which also feels spikes further away. A delay is a parameter in steps,
    kept between 0 and the longest by clipping. D_RTRL is exact for weights and delays, while they
    are constant; a layer below has a trace entry per step of the longest delay.

    Args:
        in_size: size of the input; of a tuple, the last number counts.
        out_size: size of the output; of a tuple, the last number counts.
        delay: the first delays, a time per sender or an initialiser; default uniformly drawn.
        max_delay: the longest delay, which sets the length of the memory.
        interpolation: 'linear' or 'gaussian'.
        width: standard deviation of the gaussian, a time.
        train_delay: whether delays are trained.
        w_init: initialiser of the weight, or its value.
        b_init: initialiser of the bias, or its value; None for no bias.
        name: name of the layer.

    Attributes:
        weight: the parameter state, a dictionary with `weight` and perhaps `bias`.
        delay: the parameter state of the delays, in steps; an array if they are not trained.
        past: the state, the last inputs, the newest first.

    Raises:
        ValueError: if dt is not set, a time is none, or a delay is beyond the longest.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     layer = braintrace.nn.DelayedLinear(1, 1, delay=1.5 * u.ms, w_init=1.0)
        >>> layer.init_state()
        >>> [float(layer(x)[0]) for x in jnp.eye(4)[:, :1]]
        [0.0, 0.5, 0.5, 0.0]
    """

    state_names = ("past",)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        delay: Init | None = None,
        *,
        max_delay: UnitArray = 20.0 * u.ms,
        interpolation: str = "linear",
        width: UnitArray = 1.0 * u.ms,
        train_delay: bool = True,
        w_init: Init = KAIMING,
        b_init: Init | None = None,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, name=name)
        kernel = one_of("interpolation", interpolation, KERNELS)
        self.dt = time_step(self._kind, "delays are kept as numbers of steps.")
        longest = float(in_steps(self._kind, "max_delay", max_delay))
        self.steps = max(1, math.ceil(longest))  # positions of the memory, beside the present
        self.width = in_steps(self._kind, "width", width)
        self.longest, self._kernel = longest, kernel
        n_in, n_out = self.in_size[-1], self.out_size[-1]
        self.state_size = (*self.in_size[:-1], self.steps, n_in)
        first = in_steps(self._kind, "delay", self._delays(delay, max_delay, n_in))
        if refuted(first <= longest):
            raise value_error(
                f"{self._kind}: a delay is {float(first.max()):.3g} steps.",
                why=f"the longest is {longest:.3g} steps, max_delay={max_delay}.",
                do="choose shorter delays, or a longer max_delay.",
            )
        self.delay = brainstate.ParamState(first) if train_delay else first
        params = {"weight": initial(w_init, (n_in, n_out), f"{self._kind}: w_init")}
        if b_init is not None:
            params["bias"] = initial(b_init, (n_out,), f"{self._kind}: b_init")
        self.weight = brainstate.ParamState(params)

    def _delays(self, delay: Init | None, longest: UnitArray, n: int) -> UnitArray:
        if delay is None:
            delay = init.Uniform(0.0, 1.0)((n,)) * longest
        return initial(delay, (n,), f"{self._kind}: delay")

    def delays(self) -> UnitArray:
        """The delay of every sender, in ms if dt has a unit, else in that of dt."""
        value = self.delay.value if isinstance(self.delay, brainstate.State) else self.delay
        return in_ms(jnp.clip(value, 0, self.longest), self.dt)

    def update(self, x: UnitArray) -> UnitArray:
        """Advance one step; returns what arrives."""
        past = self.past.value
        new = jnp.asarray(x, past.dtype)
        self.past.value = jnp.concatenate([new[..., None, :], past[..., :-1, :]], axis=-2)
        weighted = lambda k: k[0] * new + jnp.sum(k[1:] * past, axis=-2)
        weight, bias = self.weight.value["weight"], self.weight.value.get("bias")
        if not isinstance(self.delay, brainstate.State):
            arriving = weighted(self._weights(self.delay))
            return over_leading(lambda s: matmul(s, weight, bias), arriving, axes=1)
        delay = jnp.clip(self.delay.value, 0, self.longest)
        now = jax.lax.stop_gradient(delay)
        kernel, slope = jax.jvp(self._weights, (now,), (jnp.ones_like(now),))
        arriving, change = weighted(kernel), jax.lax.stop_gradient(weighted(slope))
        moved = jax.lax.stop_gradient(weight) * (delay - now)[:, None]
        product = over_leading(lambda s: matmul(s, weight, bias), arriving, axes=1)
        return product + over_leading(lambda s: matmul(s, moved), change, axes=1)

    def _weights(self, delay: jax.Array) -> jax.Array:
        """What each position counts: (positions, senders)."""
        at = jnp.arange(self.steps + 1, dtype=delay.dtype)[:, None]
        return self._kernel(at - delay, self.width)


class DelayedLIFCell(LIFCell):
    """Leaky integrate-and-fire neurons that spikes reach late, by a trained delay per axon.

    The neurons of `LIFCell` with `DelayedLinear` layers in place of `W` and `U`: every input has a
    delay, and with `recurrent` every neuron, besides the step that its spikes take anyway.
    Without `recurrent` D_RTRL is exact for weights and delays, while they are constant; with it,
    paths through `U` are left out, and a trace has one more entry per step of the longest delay,
    unless `through` is False. `train_tau` and the other options are those of `LIFCell`.

    Args:
        delay: the first delays of the inputs; default uniformly drawn.
        u_delay: the first delays of the neurons' own axons; default uniformly drawn.
        max_delay: the longest delay of both.
        interpolation: 'linear' or 'gaussian'.
        width: standard deviation of the gaussian, a time.
        train_delay: whether delays are trained.
        through: whether the neurons' own spikes have a derivative on their way back. SnAp, RTRL and
            BPTT follow it; the gradient of D_RTRL is the same without.

    Raises:
        ValueError: as `LIFCell` and `DelayedLinear`.

    Example:
        >>> import brainstate, jax.numpy as jnp, saiunit as u, braintrace
        >>> with brainstate.environ.context(dt=1.0 * u.ms):
        ...     cell = braintrace.nn.DelayedLIFCell(3, 4, delay=2.0 * u.ms, recurrent=False)
        >>> cell.init_state(batch_size=2)
        >>> cell(jnp.ones((2, 3))).shape, cell.W.delays().to_decimal(u.ms).tolist()
        ((2, 4), [2.0, 2.0, 2.0])
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        tau: Init = 20.0 * u.ms,
        train_tau: bool = False,
        delay: Init | None = None,
        u_delay: Init | None = None,
        max_delay: UnitArray = 20.0 * u.ms,
        interpolation: str = "linear",
        width: UnitArray = 1.0 * u.ms,
        train_delay: bool = True,
        through: bool = True,
        **options: Unpack[Options],
    ):
        super().__init__(in_size, out_size, tau=tau, train_tau=train_tau, **options)
        self.through = through
        layer = lambda n, delay, w_init, b_init: DelayedLinear(
            n,
            out_size,
            delay,
            max_delay=max_delay,
            interpolation=interpolation,
            width=width,
            train_delay=train_delay,
            w_init=w_init,
            b_init=b_init,
        )
        bias = options.get("b_init", ZERO)
        self.W = layer(in_size, delay, self.W.weight.value["weight"], bias)
        if self.U is not None:
            self.U = layer(out_size, u_delay, self.U.weight.value["weight"], None)

    def current(self, x: UnitArray, z: jax.Array) -> UnitArray:
        """What arrives: late inputs through `W`, and late spikes through `U` if recurrent."""
        return super().current(x, z if self.through else jax.lax.stop_gradient(z))

    def init_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Create the membrane, and the memories of both layers, all at zero."""
        super().init_state(batch_size)
        for layer in (self.W, self.U):
            if layer is not None:
                layer.init_state(batch_size)

    def reset_state(self, batch_size: int | None = None, **kwargs: object) -> None:
        """Set all of these to zero."""
        super().reset_state(batch_size)
        for layer in (self.W, self.U):
            if layer is not None:
                layer.reset_state(batch_size)
