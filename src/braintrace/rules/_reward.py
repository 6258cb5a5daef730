"""Coincidences of spikes, eligible for a reward that comes later.

Per weight from unit i to unit j, with x the input of the operator and s_j a function of the states
of unit j, its spikes say:

    X_i = a X_i + x_i                                   before the pairing
    E_ji = d E_ji + A_pre s_j X_i - A_post x_i Y_j       the eligibility
    Y_j = b Y_j + s_j                                   after it
    gradient = -sum_t M_j E_ji                          descending it strengthens where M > 0

A bias has the input 1, not filtered. A block of steps never touches E in between: with
q_t = M_t + d q_{t+1}, the sum over its steps is <d q_1, E_0> + sum_t q_t (A_pre s X - A_post x Y).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import not_supported, type_error, value_error
from ..engine import Block, Fresh, Grads, Rule, Signals, Steps, at_slots, states_after
from ..graph import Graph, HiddenGroup
from ..graph import HiddenParamOpRelation as Relation
from ._block import contract, dtypes_of, pull, scan, seen_input, storage, taken, with_deposits
from ._config import ETraceConfig
from ._learning_rule import LearningRule, learning_rule, stated
from ._linear import at_output
from ._modulated import NO_DERIVATIVE, check_modulator, modulator_of
from ._options import TraceDtype, check_fraction, trace_type
from ._relation_rule import Blocks, RelationBlock, RelationFunctions, relation_rule
from ._signal import by_group, with_signal

Post = Callable[[Array], Array]


def _modulated(rule: str) -> dict[str, Any]:
    """What a rule says whose signal is a modulator."""
    check = lambda groups, extra: check_modulator(groups, extra, rule)
    return {"takes": ("modulator",), "no_windows": NO_DERIVATIVE, "check_call": check}


@stated
def r_stdp(
    post: Post | tuple[int, float],
    *,
    decay: float = 0.95,
    decay_pre: float = 0.9,
    decay_post: float = 0.9,
    a_pre: float = 1.0,
    a_post: float = 1.0,
    trace_dtype: TraceDtype = None,
) -> LearningRule:
    """Spike-timing-dependent plasticity that waits for a reward: pre × post, times a modulator.

    An input before an output of the unit makes the weight eligible, an input after it the opposite;
    what is eligible decays, and changes the weight when a modulator comes: descending the gradient
    strengthens it where the modulator is positive. The modulator is passed with the call, and has
    the shapes of that of `three_factor`. Parameters without a trace have the gradient of the loss.

    Args:
        post: the output of the units, a function of their states (*varshape, num_state), such as
            `lambda state: state[..., 0] > 1.0` for spikes of a voltage; or a surrogate of it. A
            pair is a state variable and its threshold, (0, 1.0) for the same.
        decay: of the eligibility, in [0, 1).
        decay_pre: of the filtered inputs that an output is paired with.
        decay_post: of the filtered outputs that an input is paired with.
        a_pre: what an input before an output counts.
        a_post: what an input after it counts against the weight; 0 for coincidences alone.
        trace_dtype: storage type of the traces.
    """
    if isinstance(post, tuple | list) and len(post) == 2:
        post = partial(_above, int(post[0]), float(post[1]))
    if not callable(post):
        raise type_error(
            f"post has type {type(post).__name__}.",
            why="it says which output of the units their inputs are paired with",
            do="pass a function of their states, e.g. lambda state: state[..., 0] > 1.0, or a "
            "state variable and its threshold, (0, 1.0)",
        )
    fractions = {"decay": decay, "decay_pre": decay_pre, "decay_post": decay_post}
    decays = [check_fraction(k, v) for k, v in fractions.items()]
    pairing = Pairing(decays[0], decays[1], decays[2], float(a_pre), float(a_post))
    config = ETraceConfig(
        temporal_recursion="scalar_leak", decay=decays[0], learning_signal="modulatory"
    )
    record = with_signal(eligible(post, pairing, trace_type(trace_dtype)), by_group(at_units))
    return LearningRule("r_stdp", config, record, signal=at_units, **_modulated("r_stdp"))


@stated
def reward_eprop(decay: float = 0.95, *, trace_dtype: TraceDtype = None) -> LearningRule:
    """Eligibility traces of e-prop that wait for a reward.

    The eligibility is that of `eprop(filtered='eligibility')`, the derivative of the unit's output
    times its trace, filtered with `decay`; it meets a modulator in place of the loss's signal:
    descending the gradient moves the units' outputs up where the modulator is positive. The
    modulator is passed with the call, and has the shapes of that of `three_factor`. Parameters
    without a trace, and read-outs, have the gradient of the loss.

    Args:
        decay: of the filter, in (0, 1).
        trace_dtype: storage type of the traces.
    """
    kappa = check_fraction("decay", decay, zero=False)
    config = ETraceConfig(learning_signal="modulatory", trace_filter="eligibility", kappa=kappa)
    return learning_rule(
        config, at_filters, how={"trace_dtype": trace_dtype}, **_modulated("reward_eprop")
    )


def _above(variable: int, threshold: float, state: Array) -> Array:
    """Whether a state variable of the units is above a threshold."""
    if variable >= state.shape[-1]:
        raise value_error(
            f"post=({variable}, {threshold}) for units with {state.shape[-1]} state variables.",
            why="they are counted from 0, in the order of the states' names in a report",
            do="pass the number of the one that spikes, or a function of all",
        )
    return state[..., variable] > threshold


@dataclass(frozen=True, slots=True)
class Pairing:
    """Decays of the eligibility and of the two filters, and what the two orders of time count."""

    eligibility: float
    pre: float
    post: float
    a_pre: float
    a_post: float


def at_units(group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
    """Minus the modulator, the same at every variable of a unit."""
    return -modulator_of(group, cotangent, state, extra)


def at_filters(group: HiddenGroup, cotangent: Array, state: Array, extra: Any) -> Array:
    """Minus the modulator at the filters of the eligibility, zero at the states themselves."""
    step = group.followed.step
    widths = [1 if parts is None else parts[1] for parts in group.parts]
    own = [k >= len(step.stored) for k in group.leaves]
    mask = jnp.repeat(jnp.array(own), jnp.array(widths), total_repeat_length=sum(widths))
    return jnp.where(mask, -modulator_of(group, cotangent, state, extra), 0)


def eligible(post: Post, pairing: Pairing, trace_dtype: TraceDtype = None) -> Rule:
    """The rule without its signal: `post` is a function of the states (*varshape, num_state)."""
    rule = relation_rule(
        _functions(pairing, storage(trace_dtype)),
        approximates="the trace of every weight: coincidences of inputs and outputs",
    )
    observe = rule.observe

    def observed(graph: Graph, block: Block, traces: Sequence[Any]) -> list[Steps]:
        states = states_after(graph, block.path, block.axes)
        values = at_slots(graph, _post_of(graph, post, states))
        steps = observe(graph, block, traces)
        pairs = zip(steps, values, strict=True)
        return [s._replace(prepared=_first_slot(v)) for s, v in pairs]

    return replace(rule, observe=observed)


def _first_slot(values: Array) -> Array:
    """The slots of one unit have the same value."""
    return values[..., :1]


def _post_of(graph: Graph, post: Post, states: Sequence[Array]) -> list[Array]:
    """The post-synaptic values per hidden leaf, with an axis of steps."""
    out = [jnp.zeros_like(h) for h in states]
    for g in graph.groups:
        state = g.concat_hidden([states[i] for i in g.leaves])
        values = jnp.asarray(jax.vmap(post)(state))
        if values.shape != state.shape[:-1]:
            raise value_error(
                f"post returns the shape {values.shape[1:]} for the group {g.name}.",
                why=f"its units have the shape {g.varshape}, with {g.num_state} variables each",
                do="return one number per unit, such as state[..., 0] > threshold",
            )
        full = jnp.broadcast_to(values[..., None], state.shape).astype(state.dtype)
        for i, array in zip(g.leaves, g.split_hidden(full), strict=True):
            out[i] = array
    return out


def _functions(p: Pairing, stored: Callable[[Array], Array]) -> RelationFunctions:
    def init(r: Relation, weights: Grads) -> dict[str, Any]:
        _check(r)
        dtypes = dtypes_of(r, weights)
        shape = lambda k: (*r.slots.lanes, *r.operator.trace_shape(k), 1)
        seen = jax.eval_shape(lambda x: seen_input(r, x), r.operator.x)
        return {
            "pre": stored(jnp.zeros(seen.shape, seen.dtype)),
            "post": stored(jnp.zeros((*r.slots.shape, 1), r.slots.dtype)),
            "pairs": {k: stored(jnp.zeros(shape(k), dtypes[k])) for k in r.keys},
        }

    def advance(blocks: Blocks, fresh: Fresh) -> list[dict]:
        out = []
        for b in blocks:
            X, Y, (x, v) = _pairs(p, b)
            length = len(X)
            left = p.eligibility ** jnp.arange(length - 1, -1, -1, dtype=v.dtype)
            # Both orders of time are steps of one sum: inputs (X_1..X_L, x_1..x_L) with outputs
            # (A_pre s_1..s_L, -A_post Y_1..Y_L), each left d^(L-t) of it when the block ends.
            late = v * jnp.tile(left, 2).reshape((-1, *(1,) * (v.ndim - 1)))
            new = with_deposits(b, x, late, b.trace["pairs"], None, lambda a: a)
            total = {k: p.eligibility**length * a + new[k] for k, a in b.trace["pairs"].items()}
            after = {"pre": X[-1], "post": Y, "pairs": total}
            out.append(jax.tree.map(lambda a, like: a.astype(like.dtype), after, b.trace))
        return out

    def credit(blocks: Blocks, signals: Sequence[Signals], fresh: Fresh) -> list[Grads]:
        deposits, at_entry = [], []
        for b, got in zip(blocks, signals, strict=True):
            assert got.exits is not None
            M = _first_slot(got.exits)
            back = lambda q, m: ((m + p.eligibility * q).astype(q.dtype),) * 2
            first, q = scan(back, jnp.zeros_like(M[0]), M, len(M), reverse=True)
            _, _, (x, v) = _pairs(p, b)
            c = at_output(b, v, jnp.concatenate([q, q]).astype(v.dtype), got.masked)
            deposits.append(pull(b.relation, taken(b.relation, x, got.masked, c), c, b.weights))
            at_entry.append(p.eligibility * first)
        past = contract(blocks, [b.trace["pairs"] for b in blocks], at_entry)
        return [
            {k: g[k].astype(b.weights[k].dtype) + old[k] for k in b.relation.keys}
            for b, g, old in zip(blocks, deposits, past, strict=True)
        ]

    return RelationFunctions(init, advance, credit)


def _pairs(p: Pairing, b: RelationBlock) -> tuple[Array, Array, tuple[Array, Array]]:
    """X of every step, Y at the end, and the pairs (input, output) of both orders of time."""
    r, s = b.relation, b.steps
    x = jax.vmap(lambda v: seen_input(r, v))(s.x)
    pre = lambda old, now: ((p.pre * old + now).astype(old.dtype),) * 2
    _, X = scan(pre, b.trace["pre"].astype(x.dtype), x, len(x))
    post = lambda old, now: ((p.post * old + now).astype(old.dtype), old)
    last, Y = scan(post, b.trace["post"].astype(s.prepared.dtype), s.prepared, len(x))
    outputs = jnp.concatenate([p.a_pre * s.prepared, -p.a_post * Y])
    return X, last, (jnp.concatenate([X, x]), outputs)


def _check(r: Relation) -> None:
    if r.operator.x is not None and r.operator.is_linear and r.site.iterations is None:
        return
    raise not_supported(
        f"pairs of inputs and outputs of {r.primitive.name}.",
        where=r.site.equation.where(),
        why="they belong to an operator that is linear in its input and runs once a step",
        do="leave this weight untrained, or use reward_eprop",
    )
