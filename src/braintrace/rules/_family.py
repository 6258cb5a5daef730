"""Rules whose signal is the loss's: each function checks its options and returns the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array

from .._errors import value_error
from ..graph import RateLoss
from ._config import ETraceConfig
from ._full_influence import full_influence
from ._learning_rule import LearningRule, learning_rule, stated
from ._options import (
    TraceDtype,
    check_axis,
    check_choice,
    check_count,
    check_fraction,
    check_limit,
    decay_of,
    key_of,
)
from ._random_paths import random_paths
from ._rates import with_rates
from ._replay import replayed

MEMORY_LIMIT = 4 << 30
MOST_FOLLOWED = 1 << 24
TWICE = "the filter stands for paths through a read-out's state, which a window has as well"
OWN_STATES = "the firing rates that it regularises are states of single steps"
_FILTERED = {
    "trace": "the trace of every weight",
    "eligibility": "the derivative of the unit's output times the trace",
    "layers": "the same, where a layer with states reads it",
}
_FEEDBACK = {
    "symmetric": "the loss's own derivative",
    "random": "a random projection of it",
    "adaptive": "the same, with random numbers added to the weights",
}
NO_PAIRING = "the pairing of a sensitivity with later inputs is no derivative of the loss"


@stated
def d_rtrl(*, trace_dtype: TraceDtype = None, couple_axis: int | None = None) -> LearningRule:
    """Diagonal real-time recurrent learning: a trace per weight, element-wise Jacobian.

    Args:
        trace_dtype: storage type of the traces, e.g. `jnp.bfloat16`.
        couple_axis: an axis of the states (of those with several) along which elements are the
            compartments of one unit, e.g. -1 for dendrites of shape (neurons, compartments): the
            Jacobian has a block per unit. It may have up to 64 elements K, and traces of the units
            whose elements meet are K times as large.
    """
    check_axis(couple_axis)
    return learning_rule(ETraceConfig(), how={"trace_dtype": trace_dtype}, couple_axis=couple_axis)


@stated
def pp_prop(decay_or_rank: float, *, trace_dtype: TraceDtype = None) -> LearningRule:
    """Two low-pass factors per operator: memory O(inputs + outputs), not O(weights).

    Args:
        decay_or_rank: a float in [0, 1) is the decay, an integer r >= 1 stands for the decay
            (r - 1) / (r + 1); a pair gives the input's and the tail's separately.
        trace_dtype: storage type of the traces.
    """
    pair = decay_or_rank if isinstance(decay_or_rank, (tuple, list)) else (decay_or_rank,) * 2
    if len(pair) != 2:
        raise value_error(
            f"decay_or_rank has {len(pair)} entries.",
            why="there is one decay for the input and one for the tail",
            do="pass one number, or a pair of numbers",
        )
    config = ETraceConfig("io_factorized", decay=tuple(map(decay_of, pair)))
    return learning_rule(config, how={"trace_dtype": trace_dtype})


@stated
def eprop(
    feedback: str = "symmetric",
    kappa_filter_decay: float | str | Sequence[float] = 0.0,
    random_feedback_key: int | Array = 0,
    *,
    filtered: str = "trace",
    c_reg: float = 0.0,
    f_target: float = 0.01,
    kappa_reg: float = 0.97,
    feedback_scale: float = 1.0,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Traces per weight, filtered once more, with symmetric, random or adaptive feedback.

    With `filtered='eligibility'` this is e-prop as its paper defines it: the filter is on the
    derivative of the unit's output by its states times their trace, and the read-out's own weights
    have none. With `filtered='trace'`, the form that was published under this name, it is on the
    trace of every weight. With `filtered='layers'` it is that of the eligibility where another
    layer reads a unit, and not before read-outs: a stand-in for what that layer remembers of the
    unit, which D-RTRL drops, at twice its traces.

    Args:
        feedback: 'symmetric', the loss's own derivative; 'random', with fixed random operands in
            the reverse pass through read-outs and from layer to layer; or 'adaptive', the same with
            random numbers added to the weights, which is what random feedback becomes that gets
            the updates of the weights.
        kappa_filter_decay: decay in [0, 1) of the filter; 0 is none, and D-RTRL. Of the eligibility
            also 'readout', the decay of the leaky read-out in the step, or several numbers, a chain
            of filters.
        random_feedback_key: seed or key of the random operands.
        filtered: 'trace', 'eligibility' or 'layers'.
        c_reg: weight of a loss of firing rates, c_reg / 2 (f - f_target)^2 per unit and step, whose
            gradient is added at every step; with 'eligibility', and 0 is none.
        f_target: the rate that it asks for, in spikes per step: 0.01 is 10 Hz in steps of 1 ms.
        kappa_reg: decay in [0, 1) of the rate, f = kappa_reg f + (1 - kappa_reg) z, where z is what
            read-outs and later layers read of a unit.
        feedback_scale: of the random operands' entries, relative to 1 / sqrt(outputs).
        trace_dtype: storage type of the traces.
    """
    check_choice("filtered", filtered, _FILTERED)
    check_choice("feedback", feedback, _FEEDBACK)
    rate = _rate_loss(filtered, c_reg, f_target, kappa_reg)
    signal = "symmetric" if feedback == "symmetric" else "random_feedback"
    if filtered == "trace":
        kappa: Any = check_fraction("kappa_filter_decay", kappa_filter_decay)
        config = ETraceConfig(learning_signal=signal, trace_filter="kappa", kappa=kappa)
    else:
        kappa = _decays(kappa_filter_decay)
        config = ETraceConfig(learning_signal=signal, trace_filter=filtered, kappa=kappa)
    how = {
        "key": random_feedback_key,
        "scale": feedback_scale,
        "adaptive": feedback == "adaptive",
        "trace_dtype": trace_dtype,
    }
    if rate is not None:
        rule = learning_rule(config, how=how, no_windows=OWN_STATES, rate=rate)
        return replace(rule, record=with_rates(rule.record, rate))
    return learning_rule(config, how=how, no_windows=None if config.filters is None else TWICE)


def _rate_loss(filtered: str, c_reg: float, f_target: float, kappa_reg: float) -> RateLoss | None:
    """The regularisation of firing rates, None for none."""
    if not (np.isfinite(c_reg) and c_reg >= 0):
        raise value_error(
            f"c_reg={c_reg}.",
            why="it weighs a loss of firing rates",
            do="pass a positive number, or 0 for none",
        )
    if c_reg and filtered != "eligibility":
        raise value_error(
            f"c_reg={c_reg} with filtered={filtered!r}.",
            why="the derivative of a firing rate is a filtered eligibility, before whatever reads "
            "the units, and that form does not have it everywhere",
            do="pass filtered='eligibility', which is e-prop as its paper has it",
        )
    decay = check_fraction("kappa_reg", kappa_reg)
    return RateLoss(float(c_reg), float(f_target), decay) if c_reg else None


def _decays(kappa: Any) -> Any:
    """The decay of a filter, those of a chain, or 'readout'."""
    name = "kappa_filter_decay"
    if isinstance(kappa, str):
        check_choice(name, kappa, {"readout": "the decay of the leaky read-out in the step"})
        return kappa
    if isinstance(kappa, tuple | list):
        return tuple(check_fraction(name, k) for k in kappa)
    return check_fraction(name, kappa)


@stated
def rflo(
    leak: float | None = None,
    random_feedback_key: int | Array = 0,
    *,
    feedback_scale: float = 1.0,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Random feedback, local and online: a trace per weight, random feedback from the read-out.

    Args:
        leak: decay of the traces in [0, 1); None takes what the step itself keeps of its states,
            which is 1 - 1/tau for a leaky unit.
        random_feedback_key: seed or key of the random operands; None for symmetric feedback.
        feedback_scale: of the random operands' entries, relative to 1 / sqrt(outputs).
        trace_dtype: storage type of the traces.
    """
    config = ETraceConfig(
        temporal_recursion="jacobian" if leak is None else "scalar_leak",
        decay=None if leak is None else check_fraction("leak", leak),
        learning_signal="symmetric" if random_feedback_key is None else "random_feedback",
    )
    how = {"key": random_feedback_key, "scale": feedback_scale, "trace_dtype": trace_dtype}
    return learning_rule(config, how=how)


@stated
def rolling(window: int = 8) -> LearningRule:
    """The last inputs again with the weights of now: truncated BPTT that ends at the present.

    Made for streams, in which weights change at every step: outputs are what the present weights
    make of the last inputs. While weights do not change it takes windows, each with the steps
    before it.

    Args:
        window: steps that the gradient of a loss goes back at least; so many inputs and states are
            stored.
    """
    steps = check_count("window", window, "the steps that a gradient goes back")
    config = ETraceConfig("none")
    return LearningRule("rolling", config, replayed(steps), window=steps)


@stated
def snap(
    n: int = 2,
    *,
    trace_dtype: TraceDtype = None,
    memory_limit: int | None = MEMORY_LIMIT,
    most_entries: int = MOST_FOLLOWED,
) -> LearningRule:
    """Sparse n-step approximation: traces are followed through up to n - 1 crossings.

    Args:
        n: the order; memory and time grow with the number of units reached in n - 1 crossings.
        trace_dtype: storage type of the traces.
        memory_limit: bytes that the traces may need, None for no limit.
        most_entries: entries that the Jacobian of one operator's trace may have.
    """
    order = check_count("n", n, "the crossings of a path, and one")
    config = ETraceConfig(recurrence_scope="sparse_n", sparse_n=order)
    return learning_rule(
        config,
        how={"trace_dtype": trace_dtype},
        memory_limit=check_limit(memory_limit),
        most_entries=most_entries,
    )


@stated
def ostl_recurrent(
    *,
    trace_dtype: TraceDtype = None,
    memory_limit: int | None = MEMORY_LIMIT,
    most_entries: int = MOST_FOLLOWED,
) -> LearningRule:
    """Online spatio-temporal learning with recurrent connections: `snap` of order one.

    Args:
        trace_dtype: storage type of the traces.
        memory_limit: bytes that the traces may need, None for no limit.
        most_entries: entries that the Jacobian of one operator's trace may have.
    """
    return snap(1, trace_dtype=trace_dtype, memory_limit=memory_limit, most_entries=most_entries)


@stated
def ostl_feedforward(
    decay_or_rank: float = 1e-6, *, trace_dtype: TraceDtype = None
) -> LearningRule:
    """Online spatio-temporal learning without recurrent connections: `pp_prop`, little memory.

    Args:
        decay_or_rank: as for `pp_prop`.
        trace_dtype: storage type of the traces.
    """
    return pp_prop(decay_or_rank, trace_dtype=trace_dtype)


@stated
def ottt(mode: str = "A", *, leak: float, trace_dtype: TraceDtype = None) -> LearningRule:
    """Online training through time: filtered inputs meet the derivative within the step.

    Args:
        mode: 'A' filters the inputs, 'O' takes those of the step.
        leak: decay of the filter in (0, 1), that of the membranes.
        trace_dtype: storage type of the traces.
    """
    check_choice("mode", mode, {"A": "filtered inputs", "O": "the step's own inputs"})
    leak = check_fraction("leak", leak, zero=False)
    config = ETraceConfig("io_factorized", decay=(leak if mode == "A" else 0.0, 0.0))
    return learning_rule(config, how={"trace_dtype": trace_dtype})


@stated
def otpe(
    mode: str = "full",
    *,
    leak: float,
    trace_clip_abs: float | None = None,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Online training with postsynaptic estimates: traces that all decay alike.

    Args:
        mode: 'full', a trace per weight; or 'approx', two filtered factors.
        leak: decay of the traces in (0, 1), that of the membranes.
        trace_clip_abs: largest absolute value of a trace, mode 'full' only; steps are then taken
            one after another.
        trace_dtype: storage type of the traces.
    """
    check_choice("mode", mode, {"full": "a trace per weight", "approx": "two factors"})
    leak = check_fraction("leak", leak, zero=False)
    if trace_clip_abs is not None and (mode == "approx" or not trace_clip_abs > 0):
        raise value_error(
            f"trace_clip_abs={trace_clip_abs} in mode {mode!r}.",
            why="it bounds the traces of weights, from above and below",
            do="pass a positive number, and mode='full'",
        )
    if mode == "full":
        config = ETraceConfig(temporal_recursion="scalar_leak", decay=leak)
    else:
        config = ETraceConfig("io_factorized", "scalar_leak", decay=leak, normalized=False)
    return learning_rule(config, how={"trace_dtype": trace_dtype, "most": trace_clip_abs})


@stated
def stllr(
    leak_pre: float = 0.5,
    leak_post: float = 0.2,
    alpha_pre: float = 1.0,
    alpha_post: float = -0.2,
    *,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Traces of spike timing: inputs before the unit was sensitive, and inputs after it.

    Args:
        leak_pre: decay of the inputs' trace in [0, 1).
        leak_post: decay of the trace of the units' sensitivities in [0, 1).
        alpha_pre: weight of inputs that came before.
        alpha_post: weight of inputs that come after; usually negative or small.
        trace_dtype: storage type of the traces.
    """
    config = ETraceConfig(
        "paired",
        "scalar_leak",
        decay=(check_fraction("leak_pre", leak_pre), check_fraction("leak_post", leak_post)),
        alphas=(float(alpha_pre), float(alpha_post)),
    )
    return learning_rule(config, how={"trace_dtype": trace_dtype}, no_windows=NO_PAIRING)


@stated
def rtrl(
    *,
    memory_limit: int | None = MEMORY_LIMIT,
    at_once: int = 4096,
    paths: int | None = None,
    path_key: int | Array = 0,
) -> LearningRule:
    """Real-time recurrent learning: the whole influence of every parameter on every state.

    Args:
        memory_limit: bytes that the traces may need, None for no limit.
        at_once: how many parameter elements are pushed through the step at once.
        paths: None follows every path; a number k follows, to every state, those within its unit
            and k others that are drawn at random once. The gradient is then an approximation, a
            step much cheaper for many units, and the memory the same.
        path_key: seed or key of that draw.
    """
    config = ETraceConfig("everything", recurrence_scope="coupled")
    record = full_influence(check_count("at_once", at_once, "parameter elements"))
    if paths is not None:
        count = check_count("paths", paths, "random paths to a state")
        record = random_paths(count, key_of("path_key", path_key))
    return LearningRule("rtrl", config, record, memory_limit=check_limit(memory_limit))


@stated
def uoro(projection_key: int | Array = 42, *, projection_eps: float = 1e-12) -> LearningRule:
    """The influence of all parameters on all states, as one random outer product.

    Args:
        projection_key: seed or key of the random signs.
        projection_eps: positive number that is added to norms.
    """
    config = ETraceConfig("random_projection", recurrence_scope="coupled")
    eps = _eps("projection_eps", projection_eps)
    return learning_rule(config, how={"key": projection_key, "eps": eps})


@stated
def kf_rtrl(key: int | Array = 42, *, eps: float = 1e-12) -> LearningRule:
    """Kronecker-factored RTRL: per operator one random product of inputs and outputs.

    Args:
        key: seed or key of the random signs.
        eps: positive number that is added to norms.
    """
    config = ETraceConfig("kronecker", recurrence_scope="coupled")
    return learning_rule(config, how={"key": key, "eps": _eps("eps", eps)})


@stated
def no_trace() -> LearningRule:
    """The baseline: the gradient within each step, and no memory; in windows, truncated BPTT."""
    return learning_rule(ETraceConfig("none"), how={})


def _eps(name: str, value: float) -> float:
    if not np.float32(value) > 0:
        raise value_error(
            f"{name}={value}.",
            why="it keeps the norms that are divided by from being zero, in float32 too",
            do="pass a positive number such as 1e-12",
        )
    return float(value)
