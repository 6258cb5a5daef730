"""`braintrace.lab.data` under its public name."""

from .lab.data import *  # noqa: F403
