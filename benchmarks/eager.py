"""The time of calls of a learner outside of `jit`, in milliseconds: medians, calls in turns.

A single call by rule; then the gradient of a sequence by `etrace_grad`, beside that of
`braintrace.online` for the same cell, whose step is a function of arrays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

UNITS, BATCH, STEPS = 128, 16, 128
SIZES = ((UNITS, BATCH, STEPS, 60), (16, 4, 8, 300))  # units, batch, steps, calls


def medians(calls: list[Callable[[], Any]], count: int = 50) -> list[float]:
    """Milliseconds of each; the first calls compile."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(count + 5):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            own.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(own[5:]) for own in times]


def gradients(units: int, batch: int, steps: int) -> list[Callable[[], Any]]:
    """The gradient of a sequence: by `online`, and by `etrace_grad`."""
    cell = braintrace.nn.GRUCell(units, units)
    xs = jax.random.normal(jax.random.key(0), (steps, batch, units))
    learner = braintrace.compile(cell, "d_rtrl", xs[0], batch_size=batch)
    stateful = brainstate.transform.StatefulFunction(cell.__call__, return_only_write=False)
    stateful.make_jaxpr(xs[0])
    states = stateful.get_states(xs[0])
    weights = [isinstance(s, brainstate.ParamState) for s in states]

    def step(params: list[Any], state: list[Any], x: jax.Array) -> tuple[list[Any], jax.Array]:
        own, memory = iter(params), iter(state)
        values = [next(own) if trained else next(memory) for trained in weights]
        new, out = stateful.jaxpr_call(values, x)
        return [v for v, trained in zip(new, weights, strict=True) if not trained], out

    pairs = list(zip(states, weights, strict=True))
    params = [s.value for s, trained in pairs if trained]
    net = braintrace.online(step, "d_rtrl", marked_only=True)
    carry = [net.init(params, [s.value for s, trained in pairs if not trained], xs[0])]
    gradient = net.grad(lambda out: jnp.sum(out**2))

    def of_function() -> Any:
        grads, (carry[0], _) = gradient(params, carry[0], xs)
        return grads

    loss = lambda x: jnp.sum(learner(x) ** 2)
    return [of_function, lambda: learner.etrace_grad(xs, step_fn=loss, reduction="sum")]


def main() -> None:
    """Print one line per rule, and one per size."""
    x = jnp.ones((BATCH, UNITS))
    for rule, options in {"d_rtrl": {}, "pp_prop": {"decay_or_rank": 0.9}}.items():
        cell = braintrace.nn.GRUCell(UNITS, UNITS)
        learner = braintrace.compile(cell, rule, x, batch_size=BATCH, **options)
        (call,) = medians([lambda learner=learner: learner(x)])
        print(f"{rule:8} {call:6.2f} ms")
    for *sizes, count in SIZES:
        one, other = medians(gradients(*sizes), count)
        print(f"{sizes}: online {one:.2f} ms, etrace_grad {other:.2f} ms, {other / one:.2f} times")


if __name__ == "__main__":
    main()
