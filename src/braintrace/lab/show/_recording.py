"""Names of what a recording has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from ..._errors import dotted, value_error
from ..._online import Name as Name
from ..._online import Path as Path
from ..._online import Recording as Recording
from ..._online import TraceRecord as TraceRecord

PyTree: TypeAlias = Any  # of arrays
T = TypeVar("T")


def path_of(name: Name) -> Path:
    """A path as users write it: a tuple of keys, or one name with dots."""
    return tuple(name.split(".")) if isinstance(name, str) else tuple(name)


def lookup(items: Mapping[Path, T], name: Name, kind: str, where: str = "the recording") -> T:
    """The item at a path."""
    named = {dotted(path): value for path, value in items.items()}
    keyed = {dotted(tuple(path)): value for path, value in items.items()}
    wanted = dotted(path_of(name))
    if wanted not in named and wanted not in keyed:
        raise value_error(
            f"{where} has no {kind} {wanted!r}.",
            why=f"there are {', '.join(named)}" if named else "there are none",
            do="name one of these" if named else "see braintrace.show.record for what is recorded",
        )
    return named[wanted] if wanted in named else keyed[wanted]
