"""What to say when an extra is not installed."""

from __future__ import annotations


class MissingExtra(Exception):
    """A package is not installed; the message says what to install."""

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(f"{what} needs {package}: pip install 'braintrace[{extra}]'")
