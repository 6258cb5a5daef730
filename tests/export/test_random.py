"""What is drawn in C is what JAX draws, from the same key."""

# ruff: noqa: E501

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import COMPILERS, build, difference, needs, run
from jax import random

import braintrace
from braintrace.export import Leaf, OneUpdate, Role, write_c

DRAWS = {
    "uniform": lambda k: random.uniform(k, (3, 5), jnp.float64, -2, 3),
    "uniform in float": lambda k: random.uniform(k, (3, 5), jnp.float32),
    "normal": lambda k: random.normal(k, (40,), jnp.float64),
    "normal in float": lambda k: random.normal(k, (40,), jnp.float32),
    "bernoulli": lambda k: 1.0 * random.bernoulli(k, 0.3, (20,)),
    "signs": lambda k: random.rademacher(k, (20,), jnp.float64),
    "integers": lambda k: random.randint(k, (20,), -5, 100),
    "small integers": lambda k: random.randint(k, (20,), 0, 7, jnp.uint8),
    "bits of one byte": lambda k: random.bits(k, (7,), jnp.uint8),
    "bits of two bytes": lambda k: random.bits(k, (7,), jnp.uint16),
    "bits of eight bytes": lambda k: random.bits(k, (7,), jnp.uint64),
    "one number": lambda k: random.uniform(k, (), jnp.float64),
    "exponential": lambda k: random.exponential(k, (9,)) + random.laplace(k, (9,)) + random.gumbel(k, (9,)),
    "truncated": lambda k: random.truncated_normal(k, -1.0, 2.0, (9,)),
    "choice": lambda k: random.choice(k, jnp.arange(5.0), (9,)),
    "keys": lambda k: random.key_data(random.split(k, (2, 3))),
    "a key of a number": lambda k: random.key_data(random.key(random.randint(k, (), -9, 9))),
    "a key of a key": lambda k: random.key_data(random.fold_in(random.fold_in(k, 7), 1 << 20)),
    "mapped": lambda k: jax.vmap(lambda k, n: random.normal(random.fold_in(k, n), (4,)))(random.split(k, 3), jnp.arange(3)),
    "in a loop": lambda k: jax.lax.scan(lambda k, _: (lambda a, b: (a, random.uniform(b, (2,))))(*random.split(k)), k, length=4)[1],
    "one of two keys": lambda k: random.uniform(jax.lax.cond(random.bernoulli(k), lambda k: k, lambda k: random.fold_in(k, 1), k), (3,)),
    "a key by its number": lambda k: random.uniform(random.split(k, 4)[random.randint(k, (), 0, 4)], (3,)),
    "words as a key": lambda k: random.normal(jnp.array([1, 2], jnp.uint32) + random.key_data(k), (3,)),
}  # fmt: skip


@pytest.fixture(scope="module", params=COMPILERS)
def results(request, tmp_path_factory):
    """What C draws from two keys, and what JAX does."""
    needs(request.param)

    def update(words):
        outs = [jnp.asarray(draw(random.wrap_key_data(words))) for draw in DRAWS.values()]
        return [*outs, outs[0].sum()]

    keys = np.stack([random.key_data(random.key(seed)) for seed in (0, 123456789)])
    leaf = Leaf("key", Role.INPUT, keys[0])
    one = OneUpdate(update, (leaf,), tuple(f"out[{i}]" for i in range(len(DRAWS))), "draws")
    done = write_c(one, tmp_path_factory.mktemp("c"), "draws")
    found = run(done, build(done, request.param), {"key": keys})
    assert done.sizes.scratch <= 1.5 * done.sizes.live
    call = jax.jit(update)
    return [
        dict(zip(DRAWS, zip(f, call(key)[:-1], strict=True), strict=True))
        for f, key in zip(found.outputs, keys, strict=True)
    ]


@pytest.mark.parametrize("name", DRAWS)
def test_draw_is_that_of_jax(name, results):
    for of_key in results:
        found, truth = of_key[name]
        if truth.dtype.kind == "f":
            assert difference(found, truth) < (1e-6 if truth.dtype == np.float32 else 1e-13)
        else:
            assert (np.asarray(found) == np.asarray(truth)).all()


def test_keys_have_numbers_of_their_own(results):
    for name in DRAWS:
        first, second = (np.asarray(of_key[name][0]) for of_key in results)
        assert name == "a key of a number" or not np.array_equal(first, second)


class Dropping(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.drop = braintrace.nn.MiniGRU(3, 4), brainstate.nn.Dropout(0.6)

    def update(self, x):
        return self.drop(self.cell(x))


def test_dropout_of_brainstate_is_that_of_its_generator(tmp_path):
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(50, 2, 3)), rng.normal(size=(50, 2, 4))
    loss, optimizer = lambda out, y: jnp.mean((out - y) ** 2), optax.sgd(0.1)
    with brainstate.environ.context(fit=True), brainstate.random.seed_context(0):
        learner = braintrace.compile(Dropping(), "d_rtrl", xs[0], batch_size=2)
        done = learner.export_c(xs[0], ys[0], loss=loss, optimizer=optimizer, path=tmp_path)
        found = run(done, build(done), {"x": xs, "target": ys})
        losses = learner.train(loss, optimizer)(xs, ys)
    assert difference(found.losses, losses) < 1e-12
    assert "random_key" in {slot.name for slot in done.code.kept}
