"""`braintrace.lab.wiring` under its public name."""

from .lab.wiring import *  # noqa: F403
