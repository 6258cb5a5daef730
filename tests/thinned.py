"""Sweeps over many cases: some of them in the quick suite, all of them by `make test-all`."""

import os

import jax

# Options of XLA for programs that run once or twice: quicker to compile. Newer versions have none.
_CAN = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)
QUICK = {"xla_cpu_use_fusion_emitters": False} if _CAN else {}


def some(cases, every: int) -> list:
    """One in so many of them, all if the environment says so."""
    return list(cases)[:: 1 if os.environ.get("BRAINTRACE_ALL") else every]
