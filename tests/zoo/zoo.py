"""What every model of the zoo must do: train as its rule says, or as BPTT where nothing mixes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace as bt
import thinned
from braintrace.verify import bptt_grad
from braintrace.verify._compare import comparison, online_grad
from interpret import computed
from oracle import dense, rule_on
from small import Draw as Draw
from small import net as net
from small import small as small
from small import spike as spike

T = 4
TIGHT = 1e-9
DECAY = 0.9
matmul, element_wise, sigmoid = bt.matmul, bt.element_wise, jax.nn.sigmoid

# name: (learner, decay, steps per window)
RULES = {
    "d_rtrl": (bt.D_RTRL, None, None),
    "d_rtrl, windows of 2": (bt.D_RTRL, None, 2),
    "d_rtrl, one window": (bt.D_RTRL, None, T),
    "pp_prop": (bt.pp_prop, DECAY, None),
    "pp_prop, windows of 2": (bt.pp_prop, DECAY, 2),
}
SINGLE = ("d_rtrl", "pp_prop")


def squares(net: Any, x: Any, y: Any) -> jax.Array:
    """The loss of a step unless a test has its own."""
    return 0.5 * jnp.sum((net(x) - y) ** 2)


def targets(model: Any, x: Any) -> jax.Array:
    """T targets of the shape of the output."""
    stateful = brainstate.transform.StatefulFunction(lambda x: model(x))
    shape = stateful.make_jaxpr(x).get_out_shapes(x)[0].shape
    return 0.5 * jnp.cos(jnp.arange(T * int(np.prod(shape)), dtype=float)).reshape(T, *shape)


def check(
    model: Any,
    x_seq: Any,
    y_seq: Any = None,
    exact: bool = True,
    step_fn: Callable = squares,
    *,
    rules: tuple[str, ...] | int = 3,
    remembers: bool = True,
    tolerance: float = TIGHT,
    folds: bool = True,
) -> dict[str, Any]:
    """Compare the learners of a model with BPTT and with the definitions of their rules.

    `exact`: D-RTRL drops nothing and is BPTT; else it is its definition, and not BPTT. One window
    is BPTT always. A number of `rules` is d_rtrl and others, different ones from model to model;
    so many in `make test-all`, else one other or none. `remembers`: the past matters to the
    gradient. `folds`: whether weights with a factor that varies have a trace. Returns the gradients
    by rule.
    """
    if isinstance(rules, int):
        turn = zlib.crc32(np.asarray(jax.tree.leaves(x_seq)[0]).tobytes())
        others, more = list(RULES)[1:], rules - 1 if thinned.ALL else turn // 4 % 2
        rules = ("d_rtrl", *(others[(turn + k) % 4] for k in range(more)))
    x0 = jax.tree.map(lambda a: a[0], x_seq)
    sequences = (x_seq, targets(model, x0) if y_seq is None else y_seq)
    learners = {}
    for name in rules:
        kind, decay, window = RULES[name]
        options = {"vjp_method": "single-step" if window is None else "multi-step"}
        learners[name] = kind(model, **options, **({"decay_or_rank": decay} if decay else {}))
        learners[name].compile_graph(x0)

    def run():
        found = {
            name: online_grad(learner, step_fn, *sequences, chunk_size=RULES[name][2])
            for name, learner in learners.items()
        }
        return found, bptt_grad(model, step_fn, *sequences)

    found, bptt = computed(run)
    seen = dense(model, step_fn, *sequences, folds=folds)
    wrong = []

    def expect(label, got, want, equal=True):
        error = comparison(got, want).max_error
        if not (error <= tolerance if equal else error > 1e-4):
            wrong.append(f"{label}: error {error:.1e}")

    for name, got in found.items():
        kind, decay, window = RULES[name]
        rule, options = ("pp_prop", {"decays": (decay, decay)}) if decay else ("d_rtrl", {})
        expect(f"{name} is its definition", got, rule_on(seen, rule, window, **options))
        if rule == "d_rtrl" and (exact or window == T):
            expect(f"{name} is BPTT", got, bptt)
        if name == "d_rtrl" and not exact:
            expect("d_rtrl differs from BPTT", got, bptt, equal=False)
    if remembers:
        within = seen.by_path(sum(s.g for s in seen.steps))
        expect("the gradient within the steps differs from BPTT", within, bptt, equal=False)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, bptt)))
    assert not wrong, "\n" + "\n".join(wrong)
    return found
