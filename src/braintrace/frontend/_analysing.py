"""What goes wrong in the analysis of a step that runs, explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._errors import CompilationError, NotSupportedError, message
from ..program import failing_line
from ._brainstate import ModuleInfo


@contextmanager
def analysing(minfo: ModuleInfo) -> Iterator[None]:
    """Explain what goes wrong in the analysis of a step that runs."""
    try:
        yield
    except (CompilationError, NotSupportedError, TypeError, ValueError):
        raise
    except Exception as error:
        raise CompilationError(_not_analysed(minfo, error)) from error


def _not_analysed(minfo: ModuleInfo, error: Exception) -> str:
    model = type(minfo.model)
    code = getattr(model, "update", model.__call__).__code__
    return message(
        f"the step of {model.__name__} runs, but its derivative could not be analysed.",
        where=failing_line(error) or f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})",
        why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
        do="check custom derivatives at this line; if there are none, this is a fault of the "
        "compiler: please report the model. Until then move the part that fails out of `update`",
    )
