"""Cells are compiled once and run for a few tiny steps: compile fast, not well."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import registry`; tests are no package


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
