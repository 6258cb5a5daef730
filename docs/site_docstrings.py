"""How the site reads docstrings: what stands under `Example:` is code."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestExamples(griffe.Extension):
    """Take `Example:` as the section `Examples:`, the only one whose prompts become code blocks."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
