"""Rules whose signal comes with the call: a modulator, a projected target, a local loss.

A signal is a function of one hidden group; arrays have a leading axis of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._errors import message, not_supported, type_error, value_error
from ..graph import HiddenGroup, group_name, seed_of
from ._config import ETraceConfig
from ._learning_rule import Groups, LearningRule, learning_rule, stated
from ._options import TraceDtype, check_choice, check_count, check_fraction, key_of

NO_DERIVATIVE = "its signal is not a derivative of the loss"
OWN_LOSS = "each group has a loss of its own"


@stated
def three_factor(*, trace_dtype: TraceDtype = None) -> LearningRule:
    """Traces per weight times a modulator that comes with the call, in place of the loss's signal.

    The modulator is a number, an array of a group's `varshape` or (*varshape, num_state), one
    number per sample (leading axes of `varshape`) or per unit (trailing ones), or a dict of these
    by the index of the group. Parameters without a trace have the gradient of the loss.

    Args:
        trace_dtype: storage type of the traces.
    """
    config = ETraceConfig(learning_signal="modulatory")
    return learning_rule(
        config,
        modulator_of,
        how={"trace_dtype": trace_dtype},
        takes=("modulator",),
        no_windows=NO_DERIVATIVE,
        check_call=check_modulator,
    )


@stated
def osttp(
    B_list: Sequence[Any], target_timing: str = "per-step", *, trace_dtype: TraceDtype = None
) -> LearningRule:
    """Online spatio-temporal learning with targets projected to every layer.

    The signal of a group is `y_target @ B` of its matrix, at each of its state variables; the
    traces are those of `ostl_recurrent`.

    Args:
        B_list: one matrix (targets, units) per hidden group, in their order.
        target_timing: 'per-step', every call has a target; 'sequence-end', calls without one have
            no signal, and the traces go on.
        trace_dtype: storage type of the traces.
    """
    timings = {"per-step": "every call has a target", "sequence-end": "some calls have one"}
    check_choice("target_timing", target_timing, timings)
    matrices = [jnp.asarray(getattr(B, "B", B)) for B in B_list]
    needs = "with target_timing='per-step' every call has one"
    every_step = target_timing == "per-step"
    return learning_rule(
        ETraceConfig(recurrence_scope="coupled", learning_signal="target_projection"),
        projected_target,
        how={"trace_dtype": trace_dtype},
        takes=("y_target",),
        no_windows=NO_DERIVATIVE,
        values={"B_list": matrices},
        check_groups=lambda groups: check_matrices(groups, matrices),
        check_call=lambda groups, extra: (
            check_target_of(extra, "OSTTP", needs) if every_step else None
        ),
    )


@stated
def decolle(
    n_target: int,
    key: int | Array = 0,
    readouts: Sequence[Any] | None = None,
    local_loss: Callable[[Array, Array], Array] | None = None,
    observe: Callable[[Array], Array] | None = None,
    *,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Deep continuous local learning: every group has a loss of its own, of a fixed read-out.

    The signal of a group is the gradient of `local_loss(observe(h) @ R, y_target)` by its states,
    with `R` random and fixed. Parameters without a trace have the gradient of the loss.

    Args:
        n_target: width of the targets.
        key: seed or key of the read-outs; their entries are normal with variance 1 / units.
        readouts: the matrices (units, n_target), one per group, in place of random ones.
        local_loss: `(prediction, target) -> scalar`; default half the squared error, summed over
            targets and samples.
        observe: `state -> values`, from (*varshape, num_state) to (*varshape,); default the first
            state variable.
        trace_dtype: storage type of the traces.
    """
    local = local_loss_of(n_target, key, local_loss, observe)
    config = ETraceConfig(learning_signal="local_loss")
    return _local(config, local, readouts, n_target, "DECOLLE", trace_dtype)


@stated
def tess(
    n_target: int,
    readouts: Sequence[Any] | None = None,
    observe: Callable[[Array], Array] | None = None,
    *,
    leak_pre: float = 0.5,
    leak_post: float = 0.2,
    alpha_pre: float = 1.0,
    alpha_post: float = -0.2,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Temporally and spatially local: the traces of `stllr`, and a local loss of every group.

    The signal of a group is the gradient of the cross-entropy of `softmax(observe(h) @ B)` to
    `y_target`, with fixed square waves B. Parameters without a trace have the gradient of the loss.

    Args:
        n_target: the number of classes; targets are one-hot.
        readouts: the matrices B (units, n_target), one per group, in place of square waves.
        observe: `state -> values`, from (*varshape, num_state) to (*varshape,), such as stored
            spikes; default the first state variable.
        leak_pre: decay of the inputs' trace in [0, 1).
        leak_post: decay of the trace of the units' sensitivities in [0, 1).
        alpha_pre: weight of inputs that came before.
        alpha_post: weight of inputs that come after.
        trace_dtype: storage type of the traces.
    """
    config = ETraceConfig(
        "paired",
        "scalar_leak",
        decay=(check_fraction("leak_pre", leak_pre), check_fraction("leak_post", leak_post)),
        alphas=(float(alpha_pre), float(alpha_post)),
        learning_signal="local_loss",
    )
    local = local_loss_of(n_target, 0, cross_entropies, observe)
    local = replace(local, draw=square_waves)
    return _local(config, local, readouts, n_target, "TESS", trace_dtype)


def _local(
    config: ETraceConfig,
    local: LocalLoss,
    readouts: Sequence[Any] | None,
    n_target: int,
    name: str,
    trace_dtype: TraceDtype,
) -> LearningRule:
    """A rule whose groups have losses of their own."""
    matrices = None if readouts is None else [jnp.asarray(R) for R in readouts]
    needs = "every group learns to predict it"
    return learning_rule(
        config,
        local.signal,
        how={"trace_dtype": trace_dtype},
        takes=("y_target",),
        no_windows=OWN_LOSS,
        values={} if matrices is None else {"readouts": matrices},
        check_groups=lambda groups: check_readouts(groups, matrices, n_target),
        check_call=lambda groups, extra: check_target_of(extra, name, needs),
    )


def check_target_of(extra: Mapping[str, Any], rule: str, why: str) -> None:
    """Refuse a call without a target."""
    if "y_target" not in extra:
        raise value_error(
            f"{rule} is called without y_target.",
            why=why,
            do="pass it with the call by keyword: y_target=y",
        )


# ------------------------------------------------------------------------------------ modulators


def check_modulator(groups: Groups, extra: Mapping[str, Any], rule: str = "three_factor") -> None:
    """Refuse a call without a modulator, or with one for groups that do not exist."""
    modulator = extra.get("modulator")
    if modulator is None:
        raise RuntimeError(
            message(
                f"{rule} is called without a modulator.",
                why="it takes the place of the derivative of the loss",
                do="pass it with the call by keyword, modulator=m; a learner may also have one: "
                "learner.modulator",
            )
        )
    if isinstance(modulator, (list, tuple)):
        raise type_error(
            f"the modulator has type {type(modulator).__name__}.",
            why="one for each group is a dict by the index of the group",
            do="pass a number, an array or such a dict",
        )
    names = {g.index: g.name for g in groups}
    if isinstance(modulator, dict) and not set(modulator) <= set(names):
        raise value_error(
            f"modulators of the groups {list(modulator)}.",
            why="the groups are " + ", ".join(f"{k}: {v}" for k, v in names.items()),
            do="pass a dict by these numbers",
        )


def modulator_of(group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
    """The modulator at the states of a group."""
    m = extra["modulator"]
    if isinstance(m, dict):
        if group.index not in m:
            return jnp.zeros_like(cotangent)
        m = m[group.index]
    m = jnp.asarray(m)
    shape, full, units = m.shape[1:], cotangent.shape[1:], group.varshape
    # Units (16, 64) with S variables, full = (16, 64, S): () and (16, 64) get axes of one
    # behind them, (16,) is per sample and becomes (16, 1, 1), (64,) per unit, (1, 64, 1). Of units
    # (8, 8), (8,) could be either, and is refused.
    per_sample = 0 < len(shape) < len(units) and shape == units[: len(shape)]
    per_unit = 0 < len(shape) < len(units) and shape == units[len(units) - len(shape) :]
    if not shape or shape == units or (per_sample and not per_unit):
        return m.reshape((*m.shape, *(1,) * (len(full) - len(shape))))
    if len(shape) == len(full) and shape[:-1] == units and shape[-1] in (1, full[-1]):
        return m
    if per_unit and not per_sample:
        return m[..., None].reshape((m.shape[0], *(1,) * (len(units) - len(shape)), *shape, 1))
    raise value_error(
        f"a modulator of shape {shape} for the group {group.name}.",
        why=f"its units have the shape {units}, with {group.num_state} variables each"
        + ("; per sample and per unit look the same" if per_sample else ""),
        do="pass a number, an array of that shape, one per sample, or a dict of these by "
        "the index of the group",
    )


# -------------------------------------------------------------------------------------- targets


def check_matrices(groups: Groups, matrices: Sequence[Array]) -> None:
    """Refuse matrices that do not lead to the groups."""
    want = [g.varshape[-1] if g.varshape else 1 for g in groups]
    got = [B.shape[1] if B.ndim == 2 else None for B in matrices]
    if want != got:
        raise value_error(
            f"B_list has matrices to {got} units, the groups have {want}.",
            why="groups: " + ", ".join(g.name for g in groups),
            do="pass one matrix (targets, units) per group, in this order",
        )


def check_target(group: HiddenGroup, target: Array, width: int) -> None:
    """Refuse targets, with a leading axis of steps, that belong to no sample of a group."""
    shape, units = target.shape[1:], group.varshape
    lead = shape[:-1]
    if (
        jnp.issubdtype(target.dtype, jnp.integer)
        or shape[-1:] != (width,)
        or (lead != units[: len(lead)] or len(lead) > max(len(units) - 1, 0))
    ):
        raise value_error(
            f"a target of shape {shape}, {target.dtype}, for the group {group.name}.",
            why=f"its units have the shape {units}; targets have {width} entries",
            do="pass floating targets, one for each sample or one for all; labels as one-hot",
        )


def projected_target(group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
    """The projected target at every state variable of a group."""
    if "y_target" not in extra:
        return jnp.zeros_like(cotangent)
    y, B = extra["y_target"], extra["B_list"][group.index]
    check_target(group, y, B.shape[0])
    projected, between = y @ B, len(group.varshape) - y.ndim + 1  # axes of units beside the last
    if not group.varshape:
        return projected
    return projected.reshape((*y.shape[:-1], *(1,) * between, projected.shape[-1], 1))


# ----------------------------------------------------------------------------------- local losses


def check_readouts(groups: Groups, matrices: Sequence[Array] | None, n_target: int) -> None:
    """Refuse read-outs that do not fit the groups."""
    want = [(g.varshape[-1] if g.varshape else 1, n_target) for g in groups]
    got = None if matrices is None else [R.shape for R in matrices]
    if got is not None and want != got:
        raise value_error(
            f"readouts of shape {got}, the groups need {want}.",
            why="groups: " + ", ".join(g.name for g in groups),
            do="pass one matrix (units, n_target) per group, in this order",
        )


def squares(prediction: Array, target: Array) -> Array:
    """Half the squared error."""
    return 0.5 * ((prediction - target) ** 2).sum()


def cross_entropies(prediction: Array, target: Array) -> Array:
    """The cross-entropy, summed over samples."""
    return -(target * jax.nn.log_softmax(prediction)).sum()


def normal_numbers(key: Array, units: int, n_target: int) -> Array:
    """Normal entries of variance 1 / units."""
    return jax.random.normal(key, (units, n_target)) / np.sqrt(units)


def square_waves(key: Array, units: int, n_target: int) -> Array:
    """Columns of +1 and -1, divided by √units, that change their sign 1, 3, 5 ... times."""
    phase = (np.arange(units)[:, None] + 0.5) / units * (np.arange(n_target) + 1)
    return jnp.asarray(np.where(phase % 1 < 0.5, 1.0, -1.0) / np.sqrt(units), float)


@dataclass(frozen=True, slots=True)
class LocalLoss:
    """The loss of a group's own read-out."""

    n_target: int
    key: Any
    loss: Callable[[Array, Array], Array] = squares
    observe: Callable[[Array], Array] = lambda state: state[..., 0]
    draw: Callable[[Array, int, int], Array] = normal_numbers

    def readout(self, group: HiddenGroup) -> Array:
        """The fixed read-out of a group, (units, n_target)."""
        n = group.varshape[-1] if group.varshape else 1
        key = jax.random.fold_in(self.key, seed_of(group_name(group)))
        return self.draw(key, n, self.n_target)

    def signal(self, group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
        """The gradient of the group's own loss by its states."""
        fixed = extra.get("readouts")
        R = self.readout(group) if fixed is None else fixed[group.index]
        R = jax.lax.stop_gradient(R).astype(state.dtype)
        if jnp.iscomplexobj(state):
            raise not_supported(
                f"a loss of the complex states {group.name}.",
                why="their read-out is complex",
                do="keep real and imaginary parts as states of their own",
            )

        def loss(state: Array, target: Array) -> Array:
            values = self.observe(state)
            return self.loss((values if group.varshape else values[None]) @ R, target)

        target = extra["y_target"]
        if self.loss in (squares, cross_entropies):
            check_target(group, target, R.shape[1])
        return jax.vmap(jax.grad(loss))(state, target)


def local_loss_of(n_target: int, key: Any, loss: Any, observe: Any) -> LocalLoss:
    """A local loss, with defaults for what is None."""
    own = {k: v for k, v in (("loss", loss), ("observe", observe)) if v is not None}
    width = check_count("n_target", n_target, "the entries of a target")
    return LocalLoss(width, key_of("key", key), **own)
