"""`braintrace.lab.nir` under its public name."""

from .lab.nir import *  # noqa: F403
