"""The gradients that most tests compare; no program is compiled for them but in `make test-all`."""

from typing import Any

from braintrace import verify
from braintrace.verify import _compare
from interpret import computed


def bptt_grad(*args: Any, **options: Any) -> dict:
    """`braintrace.verify.bptt_grad`."""
    return computed(lambda: verify.bptt_grad(*args, **options))


def online_grad(*args: Any, **options: Any) -> dict:
    """The learner's summed gradient from zero traces; learner and model are left as they were."""
    return computed(lambda: _compare.online_grad(*args, **options))
