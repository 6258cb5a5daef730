"""`braintrace.lab.show` under its public name."""

from .lab.show import *  # noqa: F403
