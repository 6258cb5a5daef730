"""`braintrace.lab.tasks` under its public name."""

from .lab.tasks import *  # noqa: F403
