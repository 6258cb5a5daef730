"""Online learning of recurrent and spiking networks in JAX."""

import ast as _ast
import functools as _functools
import pkgutil as _pkgutil
from importlib import import_module as _import_module
from typing import Any as _Any

from ._version import __version__ as __version__

__version_info__ = tuple(int(part) for part in __version__.split("."))
_OLD = ".compat._v01"  # names of version 0.1, with a warning at every use


@_functools.cache
def _homes() -> dict[str, str]:
    """The module of every public name, as `__init__.pyi` has it for type checkers."""
    nodes = _ast.parse(_pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    imports = [node for node in nodes if isinstance(node, _ast.ImportFrom)]
    return {name.name: f".{node.module or ''}" for node in imports for name in node.names}


def __getattr__(name: str) -> _Any:
    """Import a public name on its first use: what is not used costs nothing."""
    if name == "__all__":
        return [*(key for key, home in _homes().items() if home != _OLD), "__version_info__"]
    home = None if name.startswith("__") else _homes().get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home == ".":
        return _import_module(f".{name}", __name__)
    module = _import_module(home, __name__)
    if home == _OLD:
        return module.deprecated(name)
    # Public names live in `braintrace`, whatever file defines them: help, pickles, tracebacks.
    for key in (key for key, other in _homes().items() if other == home):
        value = globals()[key] = getattr(module, key)
        value.__module__ = __name__
    return globals()[name]


def __dir__() -> list[str]:
    shown = [key for key, home in _homes().items() if not home.startswith(".compat")]
    return sorted([*shown, "__version_info__"])
