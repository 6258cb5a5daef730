"""Sweeps over many cases: some of them in the quick suite, all of them by `make test-all`."""

import os


def some(cases, every: int) -> list:
    """One in so many of them, all if the environment says so."""
    return list(cases)[:: 1 if os.environ.get("BRAINTRACE_ALL") else every]
