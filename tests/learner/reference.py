"""What the learner tests compare with: BPTT by reverse mode through a Python loop, and helpers."""

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class Leaky(brainstate.nn.Module):
    """h <- 0.9 tanh(h) + x W + b, out = h V: element-wise recurrence, plain read-out."""

    def __init__(self, n_in: int = 2, n: int = 3, n_out: int = 2):
        super().__init__()
        self.n = n
        self.w = brainstate.ParamState(normal(1, n_in, n))
        self.b = brainstate.ParamState(normal(2, n))
        self.v = brainstate.ParamState(normal(3, n, n_out))

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        shape = (self.n,) if batch_size is None else (batch_size, self.n)
        self.h = brainstate.HiddenState(jnp.zeros(shape))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        shape = (self.n,) if batch_size is None else (batch_size, self.n)
        self.h.value = jnp.zeros(shape)

    def update(self, x):
        h = 0.9 * jnp.tanh(self.h.value)
        self.h.value = h + braintrace.matmul(x, self.w.value, self.b.value)
        return self.h.value @ self.v.value


def leaky(batch_size: int | None = None, **sizes: int) -> Leaky:
    model = Leaky(**sizes)
    brainstate.nn.init_all_states(model, batch_size=batch_size)
    return model


def learner_of(model: brainstate.nn.Module, x: Any, **options: Any) -> braintrace.D_RTRL:
    learner = braintrace.D_RTRL(model, **options)
    learner.compile_graph(x)
    return learner


def squares(out: Any) -> jax.Array:
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(out))


def values(module: brainstate.nn.Module) -> dict:
    return {k: s.value for k, s in module.states().items()}


def restore(module: brainstate.nn.Module, saved: dict) -> None:
    for k, s in module.states().items():
        s.value = saved[k]


def bptt(model: brainstate.nn.Module, xs: Any, loss: Callable = squares) -> dict:
    """Gradient of the summed losses through the whole unrolled sequence; states are put back."""
    saved = values(model)
    params = model.states(brainstate.ParamState)
    grads = brainstate.transform.grad(lambda: sum(loss(model(x)) for x in xs), params)()
    restore(model, saved)
    return grads


def online(learner: Any, xs: Any, loss: Callable = squares) -> dict:
    """Sum of the gradients of single learner calls."""
    step = brainstate.transform.grad(lambda x: loss(learner(x)), learner.param_states)
    total = None
    for x in xs:
        g = step(x)
        total = g if total is None else jax.tree.map(jnp.add, total, g)
    return total


def assert_close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    """Relative error of every leaf, by the largest entry; paths must agree."""
    got_leaves, want_leaves = (jax.tree_util.tree_leaves_with_path(t) for t in (got, want))
    assert [k for k, _ in got_leaves] == [k for k, _ in want_leaves]
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, (path, a.shape, b.shape)
        error = np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-12)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.3g}"


def assert_alive(grads: Any) -> None:
    """Every leaf has a non-zero entry: a comparison of zeros proves nothing."""
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(np.asarray(g)).max() > 1e-6, jax.tree_util.keystr(path)


XS = normal(7, 5, 2)
H = ("model4compile", "h")


class Recurrent(Leaky):
    """A recurrent operator besides the leak, so that online and BPTT gradients differ."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.r = brainstate.ParamState(0.5 * normal(4, self.n, self.n))

    def update(self, x):
        h = self.h.value
        y = braintrace.matmul(x, self.w.value, self.b.value)
        self.h.value = 0.9 * jnp.tanh(h) + y + braintrace.matmul(h, self.r.value)
        return self.h.value @ self.v.value


def recurrent(batch_size=None):
    model = Recurrent()
    brainstate.nn.init_all_states(model, batch_size=batch_size)
    return model


def compiles(action):
    """Programs XLA compiled during the action."""
    seen = []

    def listen(event, *args, **kwargs):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    action()
    return len(seen)  # older JAX cannot take a listener back; this one only counts


def traces_of(algo):
    return {k: t.value for k, t in algo.etraces.items()}
