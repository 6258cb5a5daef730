"""What a learning rule says of itself, for a checkpoint to compare."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..engine import Rule
from ._learning_rule import LearningRule


def rule_identity(rule: LearningRule, record: Rule) -> dict[str, Any]:
    """The name, the coordinates and the constants of a rule, as they are after JSON.

    Args:
        rule: the rule.
        record: its functions, or others that a learner runs in their place.
    """
    if rule.shares:
        pairs = zip(rule.shares, record.parts, strict=True)
        parts = {str(s.patterns): (rule_identity(s.rule, p.rule), s.window) for s, p in pairs}
        each = {
            f"{k} of {name}": v
            for name, (of, size) in parts.items()
            for k, v in {**of, "window": size}.items()
        }
        return {"rule": rule.name, **each}
    out = {"rule": rule.name, **dataclasses.asdict(rule.config), **record.constants, **rule.values}
    if record.feedback is not None:
        out |= {f"feedback {k}": getattr(record.feedback, k) for k in ("key", "scale")}
        if record.feedback.adaptive:
            out["feedback adaptive"] = True
    return {k: _word(v) for k, v in out.items()}


def _word(value: Any) -> Any:
    """A value that can be compared after it was written; an array by its checksum."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_word(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _word(v) for k, v in value.items()}
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return type(value).__name__
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(jnp.asarray(value)) if is_key else value)
    return (
        f"{array.dtype.name}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:12]}"
    )
