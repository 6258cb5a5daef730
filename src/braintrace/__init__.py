"""Online learning of recurrent and spiking networks in JAX."""

import typing as _typing
from importlib import import_module as _import_module

from ._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from ._public import *  # noqa: F403

__version_info__ = tuple(int(part) for part in __version__.split("."))


def __getattr__(name: str) -> _typing.Any:
    """Import the public names, all at once: the command line answers before JAX is imported."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_module("._precision", __name__)  # before anything that imports brainstate
    public = _import_module("._public", __name__)
    if names := getattr(public, "_NAMES", None):  # none while it is being imported
        globals().update({key: getattr(public, key) for key in names})
        globals()["__all__"] = ["__version__", "__version_info__", *names]
    if name in globals():
        return globals()[name]
    from ._legacy import deprecated

    return deprecated(name)  # names of version 0.1


def __dir__() -> list[str]:
    from ._legacy import INSTEAD

    return sorted({*__getattr__("__all__"), *INSTEAD})
