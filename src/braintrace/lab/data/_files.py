"""What is wrong with a file, in the four-part message."""

from __future__ import annotations

from pathlib import Path

from ..._errors import error, value_error

Name = str | Path


def existing(path: Name, what: str) -> Path:
    """The path, if there is a file or folder."""
    if not (path := Path(path).expanduser()).exists():
        raise error(FileNotFoundError)(
            f"{path} does not exist.",
            why=f"{what} is read from a local file, nothing is downloaded",
            do="name a file that is there; a relative path starts at the working directory, "
            f"{Path.cwd()}",
        )
    return path


def layout_error(path: Name, what: str, why: str) -> ValueError:
    """A file that is not what its reader expects: `what` it has instead, `why` that is wrong."""
    return value_error(
        what, where=str(path), why=why, do="check that the file is complete and of this format"
    )
