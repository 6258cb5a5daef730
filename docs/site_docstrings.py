"""How the site reads docstrings: what stands under `Example:` is code, arguments may be added."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

# Files whose classes get the arguments of their rule, and the text on them, when they are imported.
FROM_TABLE = ("braintrace.compat._presets", "braintrace.compat._dni")


class DoctestExamples(griffe.Extension):
    """Take `Example:` as the section `Examples:`, the only one whose prompts become code blocks."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Complete the docstring of one object, and rename the section."""
        if obj.docstring is None:
            return
        home, _, name = obj.path.rpartition(".")
        if obj.is_class and home in FROM_TABLE:
            made = getattr(importlib.import_module(home), name)
            obj.docstring.value = inspect.cleandoc(made.__doc__)
        obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
