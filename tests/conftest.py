"""Every test runs in float64. Programs run once or twice, so compiling them must be quick."""

import os
import sys
from pathlib import Path

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"

sys.path.insert(0, str(Path(__file__).parent))  # for thinned.py

import brainstate  # noqa: E402
import jax  # noqa: E402

from thinned import surplus  # noqa: E402

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round float32 products


def pytest_collection_modifyitems(config, items):
    """Leave out of the quick suite what only repeats, unless a test is asked for by name."""
    if config.option.keyword or any("::" in argument for argument in config.args):
        return
    left_out = set(surplus(items))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
