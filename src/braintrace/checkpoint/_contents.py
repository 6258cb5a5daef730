"""The contents of a checkpoint: the states of a learner, and its identity."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from typing import Any, TypeAlias

import brainstate
import jax
import numpy as np

from ..program import PyTree
from ._archive import Json
from ._leaves import encoded

Name = tuple[str, ...]
Learner: TypeAlias = Any  # learners import this package
# Of the constructor, these change neither the traces nor the gradient, or follow from shapes.
_IDLE = {"self", "model", "name", "rule", "config", "vjp_method", "memory_limit", "kwargs",
         "fast_solve", "chunked_trace", "control_flow", "snap_max_jacobian_elements",
         "options", "synthesizer", "trace_dtype"}  # fmt: skip


def states_in(learner: Learner) -> dict[Name, brainstate.State]:
    """All states but the optimizer's, by name: of the model, the learner, random numbers."""
    states: dict[Name, brainstate.State] = {}
    for path, state in learner.states().items():
        if path == ("optimizer_state",):
            continue
        inside = path[0] == "model4compile"
        states["model" if inside else "learner", *map(str, path[inside:])] = state
    synthesizer = getattr(learner, "synthesizer", None)
    if synthesizer is not None:
        states |= {("synthesizer", k): s for k, s in synthesizer.states_dict().items()}
    if not any(s is brainstate.random.DEFAULT for s in states.values()):
        states["random", "default"] = brainstate.random.DEFAULT
    return states


def identity(learner: Learner, samples: int | None) -> Json:
    """What shapes traces and gradients, in words of JSON; `samples` the learner is mapped over."""
    out = {"rule": type(learner).__name__, "vjp_method": learner.vjp_method, "vmap": samples}
    out |= of_rule(learner.rule, learner.config)
    for base in type(learner).__mro__:
        if "__init__" in vars(base) and issubclass(base, brainstate.nn.Module):
            for name in inspect.signature(vars(base)["__init__"]).parameters:
                value = getattr(learner, name, None)
                if name not in _IDLE and value is not None and not callable(value):
                    out.setdefault(name, _word(value))
    return out


def of_rule(rule: Any, config: Any) -> Json:
    """The same of a rule alone: its coordinates and constants."""
    out = {} if config is None else dataclasses.asdict(config)
    out |= rule.constants
    if rule.feedback is not None:
        out |= {f"feedback {k}": getattr(rule.feedback, k) for k in ("key", "scale")}
    return {k: _word(v) for k, v in out.items()}


def _word(value: PyTree) -> Any:
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
    array = encoded(value)[1]
    assert array is not None
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
    return f"{array.dtype.name}{list(array.shape)} {digest}"
