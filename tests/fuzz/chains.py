"""Random networks of groups whose traces overlap, under masks, with custom derivatives.

A chain is `('chain', groups, outputs, mask, block_size)`, a group `(leak, drives, reads, after)`:

    h' = after(leak h + Σ drives + Σ reads)

`drives` are numbers of operators on the input, each of which may drive several groups: their traces
share states, not transitively. `reads` are `(group, how)`: an operator on its 'new' or 'old' state,
or its new state 'beside' operators. `after` is a function, maybe with a derivative of its own, one
of them with a backward rule that adds a constant. `outputs` are the groups that the loss reads.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from judge import TIGHT, Run, Verdict, confirmed, describe, errors, overclaimed
from programs import Choose, numbers, pulled, spike

import braintrace as bt
from braintrace.verify import bptt_grad
from braintrace.verify._sequence import restored
from interpret import interpreted
from oracle import definition, dense, rule_on

T, N, N_OPERATORS = 4, 3, 3


@jax.custom_vjp
def penalised(v):
    """The identity; its backward rule adds a penalty on activity."""
    return v


penalised.defvjp(lambda v: (v, v), lambda v, ct: (ct + 0.1 * v**3,))

AFTER = {
    "tanh": jnp.tanh,
    "none": lambda v: v,
    "penalised": lambda v: penalised(jnp.tanh(v)),
    "pulled": pulled,
    "spike": spike,
}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "otpe": ("otpe", {"leak": 0.7}),
    "otpe approx": ("otpe", {"leak": 0.7, "mode": "approx"}),
    "snap": ("snap", {"n": 1}),
    "snap 2": ("snap", {"n": 2}),
    "eprop": ("eprop", {"kappa_filter_decay": 0.6}),
    "stllr": ("stllr", {"leak_pre": 0.7, "leak_post": 0.6, "alpha_post": -0.5}),
    "pp_prop": ("pp_prop", {"decay_or_rank": 0.9}),
    "pp_prop by ranks": ("pp_prop", {"decay_or_rank": (3, 0.8)}),
    "ostl_recurrent": ("ostl_recurrent", {}),
    "ostl_feedforward": ("ostl_feedforward", {}),
    "ottt": ("ottt", {"leak": 0.8}),
    "rtrl": ("rtrl", {}),
    "no_trace": ("no_trace", {}),
}


def chain(choose: Choose) -> tuple:
    """A random chain."""
    groups: list[tuple] = []
    for k in range(choose((3, 3, 4))):
        drives = {choose(range(N_OPERATORS)) for _ in range(choose((1, 2, 2)))}
        reads = {choose(range(k)): choose(("new", "old", "beside")) for _ in range(min(k, 1))}
        after = choose(tuple(AFTER))
        groups.append((choose((0.9, 0.6)), tuple(sorted(drives)), tuple(reads.items()), after))
    outputs = tuple(sorted({len(groups) - 1, choose(range(len(groups)))}))
    mask = tuple(choose((1, 0, 1, 2)) for _ in range(T))
    return ("chain", tuple(groups), outputs, mask, choose((1, 2, 3, T)))


def random_chain(seed: int) -> tuple:
    return chain(random.Random(seed).choice)


def smaller(spec: tuple) -> Iterator[tuple]:
    """Simpler chains."""
    name, groups, outputs, mask, size = spec
    if len(groups) > 1:
        yield name, groups[:-1], (len(groups) - 2,), mask, size
    if any(m != 1 for m in mask):
        yield name, groups, outputs, (1,) * T, size
    if size > 1:
        yield name, groups, outputs, mask, 1
    for k, (leak, drives, reads, after) in enumerate(groups):
        for group in (leak, drives[:1], reads, after), (leak, drives, (), after):
            if group != groups[k]:
                yield name, (*groups[:k], group, *groups[k + 1 :]), outputs, mask, size
        if after != "none":
            group = (leak, drives, reads, "none")
            yield name, (*groups[:k], group, *groups[k + 1 :]), outputs, mask, size


class Chain(brainstate.nn.Module):
    """A chain as a model, in the middle of its life."""

    def __init__(self, spec: tuple):
        super().__init__()
        _, self.groups, self.outputs, *_ = spec
        names = [f"drive{i}" for _, drives, *_ in self.groups for i in drives]
        names += [f"read{k}_{j}" for k, g in enumerate(self.groups) for j, how in g[2]]
        for name in dict.fromkeys(names):
            setattr(self, name, brainstate.ParamState(numbers(name, N, N)))
        self.h = [brainstate.HiddenState(numbers(f"h{k}", N)) for k in range(len(self.groups))]

    def update(self, x: Any) -> Any:
        old, new = [h.value for h in self.h], list[Any]()
        ys = {i: bt.matmul(x, getattr(self, f"drive{i}").value) for g in self.groups for i in g[1]}
        for k, (leak, drives, reads, after) in enumerate(self.groups):
            v = leak * old[k] + sum(ys[i] for i in drives)
            for j, how in reads:
                source = {"new": new, "old": old, "beside": new}[how][j]
                w = getattr(self, f"read{k}_{j}").value
                v = v + (0.3 * jnp.sin(source) if how == "beside" else bt.matmul(source, w))
            new.append(AFTER[after](v))
        for state, v in zip(self.h, new, strict=True):
            state.value = v
        return jnp.stack([new[k] for k in self.outputs])


def weighted(net: Any, x: Any, m: Any) -> Any:
    return jnp.where(m == 0, 0, m * 0.5 * jnp.sum((net(x) - 0.2) ** 2))


def judge_chain(
    spec: tuple,
    rules: tuple[str, ...] | None = None,
    run: Run = interpreted,
    seconds: float = 60,
) -> Verdict:
    """Whether learners are their definitions, and D-RTRL is BPTT where it says so.

    By default one rule is judged, chosen by the chain: the dense definition of each takes a while.
    """
    if rules is None:
        rules = (sorted(RULES)[zlib.crc32(repr(spec).encode()) % len(RULES)],)
    try:
        return confirmed(lambda *runs: _judge(spec, rules, *runs), run, seconds)
    except Exception as error:  # every chain is legal
        return Verdict("crashed", f"chain: {describe(error)}")


def _judge(spec: tuple, rules: tuple[str, ...], run: Run, plain: Run) -> Verdict:
    model, xs, mask = Chain(spec), numbers("chains", T, N, scale=1.0), jnp.asarray(spec[3], float)
    truth = plain(lambda: bptt_grad(model, weighted, xs, mask))
    learner, learn = _learned(spec, model, "d_rtrl", {}, xs, mask)
    if broken := overclaimed(learner.report, errors(run(learn), truth)):
        return Verdict("wrong", f"d_rtrl: {broken}")
    seen = dense(model, weighted, xs, mask) if rules else None
    for rule in rules:
        _, learn = _learned(spec, model, *RULES[rule], xs, mask)
        kind, options = definition(*RULES[rule])
        wrong = errors(run(learn), rule_on(seen, kind, **options))
        if not max(wrong.values()) <= TIGHT:
            return Verdict("wrong", f"{rule}: not its definition, {wrong}")
    return Verdict("right")


def _learned(spec: tuple, model: Chain, rule: str, options: dict, xs: Any, mask: Any) -> Any:
    with restored(model):
        learner = bt.compile(model, rule, xs[0], **options)

    def learn() -> dict:
        with restored(learner, model):
            grads = learner.etrace_grad(
                xs,
                step_fn=lambda x: 0.5 * jnp.sum((learner(x) - 0.2) ** 2),
                mask=mask,
                block_size=spec[4],
                reduction="sum",
            )
        return dict(grads)

    return learner, learn
