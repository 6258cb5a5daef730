"""The ways to compute a gradient that are compared, each one compiled function.

    ours:d_rtrl   [:block=K | :step] [:drop]     peer:d_rtrl
    ours:window=W [:block=K | :step] [:drop]     peer:window=W
    ours:pp_prop  [:block=K | :step] [:drop]     peer:pp_prop
    ours:online [:bf16], ours:step               peer:step
    bptt          [:checkpoint]
    forward                                      states and losses of a GRU, no gradient

`window=W` is D-RTRL in windows of W steps. As an option, `step` advances the traces at every step;
`drop` does not keep them, `bf16` stores them in half the bytes. As modes, `online` and `step`
update the core's weights at every step, by `etrace_train` and by a loop of single gradients; their
result is how far the weights moved.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from _models import Net, Size, loss

import braintrace as bt

RATE = 0.1
DECAY = 0.9


class Unavailable(Exception):
    """This version of the package has no such option."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled function of a sequence, and the object that owns its states."""

    label: str
    run: Callable[[Any, Any], tuple[Any, Any]]
    owner: brainstate.nn.Module


def variants(mode: str, net: Net, size: Size, x: Any) -> Iterator[Variant]:
    """The functions that a mode stands for: one, or options of which the best one counts."""
    side, *words = mode.split(":")
    options = dict(word.partition("=")[::2] for word in words)
    if side == "forward":
        brainstate.nn.init_all_states(net, batch_size=size.b)
        yield Variant("", brainstate.transform.jit(forward(net, size)), net)
        return
    if side == "bptt":
        brainstate.nn.init_all_states(net, batch_size=size.b)
        run = bptt(net, size, block=divisor(size.t) if "checkpoint" in options else None)
        yield Variant("", brainstate.transform.jit(run), net)
        return
    training = {"online": trained, "step": descended}.get(words[0])
    rule = "pp_prop" if "pp_prop" in options else "d_rtrl"
    make: dict[str, Any] = {"decay_or_rank": DECAY} if rule == "pp_prop" else {}
    if "bf16" in options:
        make["trace_dtype"] = jnp.bfloat16
    tried: list[dict[str, bool]] = [{}]
    if "window" in options:
        make["vjp_method"] = "multi-step"
        if side == "peer":
            both = itertools.product((True, False), repeat=2)
            tried = [{"chunked_trace": c, "fast_solve": f} for c, f in both]
    for extra in tried:
        learner = bt.compile(net.core, rule, x, batch_size=size.b, **make, **extra)
        run = moved(training(learner, net), net) if training else sequence(learner, net, options)
        label = ", ".join(f"{k}={v}" for k, v in extra.items())
        yield Variant(label, brainstate.transform.jit(fresh(run, learner, net, size)), learner)


def params_of(net: brainstate.nn.Module) -> dict:
    return dict(net.states(brainstate.ParamState).items())


def divisor(t: int) -> int:
    """The largest divisor of t that is at most its square root."""
    return max(k for k in range(1, math.isqrt(t) + 1) if t % k == 0)


def fresh(run: Callable, learner: Any, net: Net, size: Size) -> Callable:
    """`run` from zero states and traces."""

    def restarted(xs, ys):
        brainstate.nn.reset_all_states(net.core, batch_size=size.b)
        learner.reset_state(batch_size=size.b)
        return run(xs, ys)

    return restarted


def sequence(learner: Any, net: Net, options: dict[str, str]) -> Callable:
    """Gradients of a sequence by `etrace_grad`."""
    known = inspect.signature(learner.etrace_grad).parameters
    asked: dict[str, Any] = {}
    if "step" in options or "block" in options:
        asked["block_size"] = int(options.get("block", 1))
    if "drop" in options:
        asked["keep_traces"] = False
    if missing := sorted(asked.keys() - known.keys()):
        raise Unavailable(f"etrace_grad has no {', '.join(missing)}")
    if "window" in options:
        asked["chunk_size"] = int(options["window"])
    wrap = bt.MultiStepData if "window" in options else lambda x: x

    def run(xs, ys):
        step = lambda x, y: loss(net.read(learner(wrap(x))), y)
        weights = params_of(net)
        return learner.etrace_grad(
            xs, ys, step_fn=step, weights=weights, return_value=True, **asked
        )

    return run


def trained(learner: Any, net: Net) -> Callable:
    """The core's weights updated at every step by `etrace_train`."""
    if not hasattr(learner, "etrace_train"):
        raise Unavailable("there is no etrace_train")
    import optax

    step = lambda x, y: loss(net.read(learner(x)), y)
    return lambda xs, ys: learner.etrace_train(
        xs, ys, step_fn=step, optimizer=optax.sgd(RATE), update_every=1
    )


def descended(learner: Any, net: Net) -> Callable:
    """The same by a loop over the gradients of single steps."""
    params = params_of(net.core)
    step = lambda x, y: loss(net.read(learner(x)), y)
    grad = brainstate.transform.grad(step, params, return_value=True)

    def advance(x, y):
        grads, value = grad(x, y)
        for path, state in params.items():
            state.value = jax.tree.map(lambda w, g: w - RATE * g, state.value, grads[path])
        return value

    return lambda xs, ys: brainstate.transform.for_loop(advance, xs, ys)


def moved(run: Callable, net: Net) -> Callable:
    """How far a function that trains the core moves its weights, and its losses."""
    params = params_of(net.core)

    def measured(xs, ys):
        start = {path: state.value for path, state in params.items()}
        losses = run(xs, ys)
        end = {path: state.value for path, state in params.items()}
        return jax.tree.map(lambda a, b: a - b, end, start), losses

    return measured


def forward(net: Net, size: Size) -> Callable:
    """States and losses of a GRU, its input projections computed for all steps at once."""
    gates, inputs = [net.core.Wz, net.core.Wr, net.core.Wh], size.inputs

    def run(xs, ys):
        of_x, of_h, of_both = zip(*(_parts(g.weight.value, inputs) for g in gates), strict=True)
        projected = xs @ jnp.concatenate(of_x, 1) + jnp.concatenate(of_both)

        def step(h, u):
            uz, ur, uh = jnp.split(u, 3, -1)
            z, r = jax.nn.sigmoid(uz + h @ of_h[0]), jax.nn.sigmoid(ur + h @ of_h[1])
            h = (1 - z) * h + z * jnp.tanh(uh + (r * h) @ of_h[2])
            return h, h

        states = jax.lax.scan(step, jnp.zeros((size.b, size.n)), projected)[1]
        return {}, loss(net.read(states), ys)

    return run


def _parts(value: dict[str, Any], inputs: int) -> tuple[Any, Any, Any]:
    weight = value["weight"]
    return weight[:inputs], weight[inputs:], value["bias"]


def bptt(net: Net, size: Size, block: int | None) -> Callable:
    """Reverse mode over one scan, or over a scan of `block` steps inside a checkpointed scan."""
    step = lambda x, y: loss(net(x), y)
    scan = lambda xs, ys: brainstate.transform.for_loop(step, xs, ys)

    def losses(xs, ys):
        if block is None:
            return scan(xs, ys)
        fold = lambda a: a.reshape(-1, block, *a.shape[1:])
        inner = brainstate.transform.checkpoint(scan)
        return brainstate.transform.for_loop(inner, fold(xs), fold(ys)).ravel()

    def total(xs, ys):
        values = losses(xs, ys)
        return values.mean(), values

    grad = brainstate.transform.grad(total, params_of(net), has_aux=True)

    def run(xs, ys):
        brainstate.nn.reset_all_states(net, batch_size=size.b)
        return grad(xs, ys)

    return run
