"""Every test runs in float64."""

import brainstate
import jax

brainstate.environ.set(precision=64)
jax.config.update("jax_enable_x64", True)
