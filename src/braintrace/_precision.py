"""brainstate, imported without a change of JAX's precision: it sets its own default.

The packages that use brainstate import this file first, whichever of them a program names first.
"""

from importlib import import_module
from typing import Any

import jax


def _imported() -> Any:
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    module = import_module("brainstate")
    if jax.config.jax_enable_x64 != x64:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_x64", x64)
    return module


brainstate = _imported()
