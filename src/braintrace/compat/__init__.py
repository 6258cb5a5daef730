"""What users of the published packages know: names, classes and views. Nothing else imports it.

`braintrace.NAME` finds these names on their first use; `dir(braintrace)` shows what to use instead.
"""

from .._precision import brainstate as _loaded  # noqa: F401
