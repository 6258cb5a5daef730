"""From the coordinates of a rule to the rule."""

from __future__ import annotations

from typing import Any

from ..engine import ExitCotangents, Rule
from ._config import ETraceConfig
from ._factored import factored
from ._full_influence import full_influence
from ._immediate import paired, untraced
from ._kept import leak
from ._kronecker import kronecker
from ._options import key_of
from ._per_weight import per_weight
from ._rank_one import rank_one
from ._signal import random_feedback


def rule_of(
    config: ETraceConfig,
    *,
    key: Any = None,
    scale: float = 1.0,
    eps: float = 1e-12,
    trace_dtype: Any = None,
    most: float | None = None,
) -> Rule:
    """The rule with these coordinates.

    Args:
        config: the coordinates.
        key: of random operands or random signs.
        scale: of random operands.
        eps: added to the norms of random products.
        trace_dtype: storage type of traces.
        most: largest absolute value of traces.
    """
    kind = config.trace_factorization
    if kind == "random_projection":
        return rank_one(key_of("projection_key", key), eps)
    if kind == "kronecker":
        return kronecker(key_of("key", key), eps)
    if kind == "everything":
        return full_influence()
    if kind == "none":
        return untraced()
    if kind == "paired":
        assert config.alphas is not None
        return paired(config.decay_x, config.decay_f, *config.alphas, trace_dtype)
    how: dict[str, Any] = {}
    if config.learning_signal == "random_feedback":
        how["feedback"] = random_feedback(key_of("random_feedback_key", key), scale)
    if config.include_recurrent_mixing:
        how["exit_cotangents"] = ExitCotangents.UNCUT
    if config.is_factorized:
        return _factored(config, how, trace_dtype)
    if config.temporal_recursion != "jacobian":
        how |= {"kept": leak(config.decay), "exit_cotangents": ExitCotangents.DETACHED}
    return per_weight(trace_dtype, kappa=config.kappa or 0.0, most=most, **how)


def _factored(config: ETraceConfig, how: dict[str, Any], trace_dtype: Any) -> Rule:
    x, f = config.decay
    if not config.normalized:  # leaky sums: the leak of the tails is their Jacobian
        return factored(
            x,
            1.0,
            trace_dtype,
            plain=True,
            kept=leak(f),
            **{**how, "exit_cotangents": ExitCotangents.DETACHED},
        )
    if config.recursion_f == "scalar_leak":
        return factored(
            x, f, trace_dtype, kept=leak(1.0), **{**how, "exit_cotangents": ExitCotangents.DETACHED}
        )
    return factored(x, f, trace_dtype, **how)


def crossings_of(config: ETraceConfig) -> int | None:
    """How many crossings the traces are followed through; None keeps to paths without any."""
    if config.trace_factorization not in ("per_param", "io_factorized"):
        return None
    return {"diagonal": None, "coupled": 0}.get(config.recurrence_scope, (config.sparse_n or 1) - 1)
