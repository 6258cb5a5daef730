"""Unmodified cells of libraries and papers as steps: (step, params, state, inputs of all steps)."""

from importlib.metadata import version

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paper_cells import CELLS as PAPERS

T, I, N = 8, 3, 3
FLOAT = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def double(tree):
    convert = lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a
    return jax.tree.map(convert, tree)


def inputs(*shape):
    return jnp.asarray(1.5 * np.random.default_rng(0).normal(size=(T, *shape)))


def symbols(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, I, size=(T, *shape)))


def zeros(*shape):
    return jnp.zeros(shape)


def leaky(call):
    """A layer without a state, in front of one."""

    def step(layer, v, x):
        v = 0.8 * v + jnp.tanh(call(layer, x))
        return v, v

    return step


# ----------------------------------------------------------------------------------- equinox


def of_equinox(make, step, state, xs):
    """A module for one sample: mapped over a batch of two; without a batch for one."""

    def case(batch):
        net = double(make(jax.random.key(1)))
        if batch == 1:
            return step, net, state, xs()
        mapped = jax.vmap(step, (None, 0, 0))
        return mapped, net, jax.tree.map(lambda a: jnp.stack([a] * batch), state), xs(batch)

    return case


def equinox_cell(kind):
    def step(cell, state, x):
        state = cell(x, state)
        return state, jax.tree.leaves(state)[0]

    state = (zeros(N), zeros(N)) if kind is eqx.nn.LSTMCell else zeros(N)
    return of_equinox(lambda key: kind(I, N, key=key), step, state, lambda *b: inputs(*b, I))


class Stack(eqx.Module):
    """Three recurrent cells with layer norms and dropout between, and a read-out."""

    cells: list
    norms: list
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.cells = [
            eqx.nn.GRUCell(I, N, key=keys[0]),
            eqx.nn.LSTMCell(N, N, key=keys[1]),
            eqx.nn.GRUCell(N, N, key=keys[2]),
        ]
        self.norms = [eqx.nn.LayerNorm(N) for _ in range(2)]
        self.dropout = eqx.nn.Dropout(0.3)
        self.out = eqx.nn.Linear(N, 2, key=keys[3])

    def __call__(self, states, inputs):
        x, key = inputs
        new = []
        for i, (cell, h) in enumerate(zip(self.cells, states, strict=True)):
            new.append(cell(x, h))
            x = jax.tree.leaves(new[-1])[0]
            if i < 2:
                x = self.dropout(self.norms[i](x), key=jax.random.fold_in(key, i))
        return new, self.out(x)


def with_keys(*batch):
    keys = jax.random.split(jax.random.key(3), (T, *batch))
    return {"0": inputs(*batch, I), "1": keys}


STACK = of_equinox(
    Stack,
    lambda net, states, x: net(states, (x["0"], x["1"])),
    [zeros(N), (zeros(N), zeros(N)), zeros(N)],
    with_keys,
)
EQUINOX = {
    "GRU": equinox_cell(eqx.nn.GRUCell),
    "LSTM": equinox_cell(eqx.nn.LSTMCell),
    "Linear": of_equinox(
        lambda key: eqx.nn.Linear(I, N, key=key),
        leaky(lambda layer, x: layer(x)),
        zeros(N),
        lambda *b: inputs(*b, I),
    ),
    "Conv": of_equinox(
        lambda key: eqx.nn.Conv1d(2, N, 3, padding=1, key=key),
        leaky(lambda layer, x: layer(x)),
        zeros(N, 4),
        lambda *b: inputs(*b, 2, 4),
    ),
    "Embedding": of_equinox(
        lambda key: eqx.nn.Embedding(I, N, key=key),
        leaky(lambda layer, x: layer(x)),
        zeros(N),
        symbols,
    ),
}


# --------------------------------------------------------------------------------------- nnx


def of_nnx(make, call, state, xs):
    """A module by `split` and `merge`; `call(module, state, x)` returns (state, out)."""

    def case(batch):
        module = make(nnx.Rngs(0))
        structure, params = nnx.split(module)
        step = lambda params, state, x: call(nnx.merge(structure, params), state, x)
        return step, double(params), double(state(module, batch)), xs(batch)

    return case


def nnx_cell(kind):
    return of_nnx(
        lambda rngs: kind(I, N, rngs=rngs, **FLOAT),
        lambda cell, carry, x: cell(carry, x),
        lambda cell, batch: cell.initialize_carry((batch, I), nnx.Rngs(1)),
        lambda batch: inputs(batch, I),
    )


def nnx_layer(make, state, xs):
    call = leaky(lambda layer, x: layer(x))
    return of_nnx(make, call, lambda layer, batch: state(batch), xs)


NNX = {
    "GRU": nnx_cell(nnx.GRUCell),
    "LSTM": nnx_cell(nnx.LSTMCell),
    "optimized LSTM": nnx_cell(nnx.OptimizedLSTMCell),
    "simple": nnx_cell(nnx.SimpleCell),
    "Linear": nnx_layer(
        lambda rngs: nnx.Linear(I, N, rngs=rngs, **FLOAT),
        lambda batch: zeros(batch, N),
        lambda batch: inputs(batch, I),
    ),
    "Conv": nnx_layer(
        lambda rngs: nnx.Conv(2, N, (3,), rngs=rngs, **FLOAT),
        lambda batch: zeros(batch, 4, N),
        lambda batch: inputs(batch, 4, 2),
    ),
    "Embed": nnx_layer(
        lambda rngs: nnx.Embed(I, N, rngs=rngs, **FLOAT),
        lambda batch: zeros(batch, N),
        symbols,
    ),
}


# ------------------------------------------------------------------------------------- Spyx


def of_spyx(*layers):
    """A network of layers, each made of the library and random keys."""

    def call(net, state, x):
        out, state = net(x, state)
        return state, out

    def make(rngs):
        if version("spyx").startswith("0."):
            pytest.skip("Spyx 1 needs a newer JAX")
        import spyx.nn

        return spyx.nn.Sequential(*(make(spyx.nn, rngs) for make in layers))

    return of_nnx(
        make,
        call,
        lambda net, batch: net.initial_state(batch),
        lambda batch: inputs(batch, I),
    )


def linear(n_in, n_out):
    init = nnx.initializers.normal(1.5)  # large enough for spikes
    return lambda library, rngs: nnx.Linear(n_in, n_out, kernel_init=init, rngs=rngs)


def neuron(kind, n=N):
    return lambda library, rngs: getattr(library, kind)((n,), rngs=rngs)


SPYX = {
    **{k: of_spyx(linear(I, N), neuron(k)) for k in ("LIF", "ALIF", "CuBaLIF", "RLIF", "LI")},
    "network": of_spyx(linear(I, N), neuron("LIF"), linear(N, 2), neuron("LI", 2)),
    "adaptive network": of_spyx(
        *(linear(I, N), neuron("ALIF"), linear(N, N), neuron("RLIF")),
        *(linear(N, 2), neuron("LI", 2)),
    ),
}


# ------------------------------------------------------------------------------------- linen


def linen_cell(kind):
    def case(batch):
        cell = kind(N, **FLOAT)
        carry = double(cell.initialize_carry(jax.random.key(0), (batch, I)))
        xs = inputs(batch, I)
        params = cell.init(jax.random.key(1), carry, xs[0])["params"]
        step = lambda params, carry, x: cell.apply({"params": params}, carry, x)
        return step, params, carry, xs

    return case


class Memory(linen.Module):
    """A layer that keeps its state in a mutable collection."""

    @linen.compact
    def __call__(self, x):
        v = self.variable("memory", "v", zeros, len(x), N)
        gain = self.param("gain", linen.initializers.normal(1.0), (N,), jnp.float64)
        v.value = jnp.tanh(gain * v.value + linen.Dense(N, **FLOAT)(x))
        return linen.Dense(2, **FLOAT)(v.value)


def mutable(batch):
    net, xs = Memory(), inputs(batch, I)
    variables = net.init(jax.random.key(1), xs[0])

    def step(params, memory, x):
        out, changed = net.apply({"params": params, **memory}, x, mutable=["memory"])
        return changed, out

    return step, variables["params"], {"memory": variables["memory"]}, xs


LINEN = {
    "GRU": linen_cell(linen.GRUCell),
    "LSTM": linen_cell(linen.LSTMCell),
    "mutable": mutable,
}


CASES = {
    f"{library} {name}": case
    for library, cases in {
        "equinox": EQUINOX,
        "nnx": NNX,
        "linen": LINEN,
        "spyx": SPYX,
        "plain": PAPERS,
    }.items()
    for name, case in cases.items()
}
CASES["equinox stack"] = STACK  # last, for it takes longest
