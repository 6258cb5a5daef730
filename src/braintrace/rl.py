"""`braintrace.lab.rl` under its public name."""

from .lab.rl import *  # noqa: F403
