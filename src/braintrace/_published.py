"""What the published packages had, looked up in `compat` when somebody asks for it.

This is the one way there: no file imports `compat`, and nothing is computed that nobody reads.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any


def published(record: Any, name: str) -> Any:
    """For `__getattr__` of a record: an attribute of its class, by the name of it, in `compat`."""
    if not name.startswith("__"):
        views = import_module("braintrace.compat._views")
        for kind in type(record).__mro__:
            found = inspect.getattr_static(getattr(views, kind.__name__, None), name, None)
            if found is not None and kind is not object:
                return found.__get__(record, type(record))
    return object.__getattribute__(record, name)  # raises what was raised before


def part(module: str, name: str) -> Any:
    """Something of a module of `compat`: what `compile` takes besides rules."""
    return getattr(import_module(f"braintrace.compat.{module}"), name)


def published_layer(name: str) -> Any:
    """For `__getattr__` of `braintrace.nn`: a layer that another package owns now."""
    return import_module("braintrace.compat._forwards").forward(name)
