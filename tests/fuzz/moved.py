"""Programs whose parameters move between two calls, as plain functions.

A case is `('moved', program)`. What RTRL has after a move is the truth: its trace is in the
coordinates of the parameters. A parameter that another rule calls exact, without a word about
constant weights, has the same gradient in the second call.
"""

from __future__ import annotations

import random
from typing import Any

import jax.numpy as jnp
from judge import HUGE, TIGHT, Verdict, describe, errors, is_four_part, largest
from programs import Spec, T, named, numbers, parameters, random_program, sequences, start_of, step

import braintrace as bt

RULES = {"d_rtrl": {}, "snap 2": {"n": 2}}
CONDITION = "weights are constant"


def random_case(seed: int) -> Spec:
    draw = random.Random(f"moved {seed}")
    return "moved", random_program(draw.randrange(2**32))


def judge_moved(spec: Spec, rule: str) -> Verdict:
    """Whether what a rule calls exact is, when parameters changed between calls."""
    program = spec[1]
    start = (start_of(program), jnp.zeros((), jnp.int32))

    def one(params: Any, state: Any, x: Any) -> Any:
        weight = lambda name, shape: params[named(name, shape)]
        hidden, out = step(program, weight, state[0], state[1], x)
        return (hidden, state[1] + 1), out

    params = {k: numbers(k, *s) for k, s in parameters(program).items()}
    moved = {k: p + 0.3 * numbers(f"to {k}", *p.shape) for k, p in params.items()}
    loss = lambda out, y: 0.5 * jnp.sum((out - y) ** 2)
    xs, ys = sequences()

    def second(name: str, options: dict) -> tuple[Any, Any]:
        net = bt.online(one, name, **options)
        gradient = net.grad(loss)
        carry = net.init(params, start, xs[0])
        carry = gradient(params, carry, xs[: T // 2], ys[: T // 2])[1][0]
        return net, gradient(moved, carry, xs[T // 2 :], ys[T // 2 :])[0]

    if not params:
        return Verdict("no truth")
    try:
        net, grads = second(rule.split()[0], RULES[rule])
        truth = second("rtrl", {})[1]
    except Exception as error:
        if is_four_part(error):
            return Verdict("refused", str(error).splitlines()[0])
        return Verdict("crashed", f"moved {rule}: {describe(error)}")
    if not largest(truth) < HUGE:
        return Verdict("no truth")
    wrong = errors(grads, truth)
    for (path,), entry in ((tuple(p), e) for p, e in net.report.parameters.items()):
        if entry.exact and CONDITION not in str(entry) and not wrong[path] <= TIGHT:
            return Verdict("wrong", f"moved {rule}: {path} is called exact, off {wrong[path]:.1e}")
    return Verdict("right")
