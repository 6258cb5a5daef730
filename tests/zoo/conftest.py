"""Tiny models that run once: compile fast, not well."""

import brainstate
import jax
import pytest

from .zoo import Draw


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def draw(request):
    brainstate.random.seed(1)
    return Draw(request.node.name)
