"""What is wrong with a file, in the four-part message."""

from __future__ import annotations

from pathlib import Path

from ..._errors import error, value_error

Name = str | Path


class LayoutError(ValueError):
    """A file is not what its reader expects."""


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


def within(path: Path, what: str, count: int, limit: int, argument: str) -> None:
    """Refuse a file that says, or is long enough for, more than a limit, before it is read."""
    if count > limit:
        raise value_error(
            f"the file has {count} {what}.",
            where=str(path),
            why=f"the limit is {limit}; a small file may declare any size",
            do=f"if you trust the file, pass {argument}={count}",
        )


def regular(path: Path) -> int:
    """The bytes of a file; refuse what is none, such as a pipe."""
    if not path.is_file():
        raise layout_error(path, "this is a folder, a pipe or a device.", "a recording is a file")
    return path.stat().st_size


def layout_error(path: Name, what: str, why: str) -> ValueError:
    """A file that is not what its reader expects: `what` it has instead, `why` that is wrong."""
    return error(LayoutError)(
        what, where=str(path), why=why, do="check that the file is complete and of this format"
    )
