"""The one writer of files: a file is replaced whole or not at all, and a folder has one run.

A writer makes a file of a random name beside the target, holds a lock on it, and renames it when
its bytes are on the disk. Whoever reads the target sees the old file or the new one. A file beside
it that nobody has locked was left by a writer that was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ._errors import error, value_error

try:
    import fcntl
except ImportError:  # Windows: no locks of this kind, so nothing is tidied up and no run refused
    fcntl = None  # type: ignore[assignment]

LONGEST = 255  # bytes of a name, on all common file systems
_SUFFIX = re.compile(r"\.[0-9a-f]{16}\.tmp")
_NEW = os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_LOOK = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def replace_file(path: str | os.PathLike, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file in place of an older one, whose mode it takes over.

    A symbolic link of that name is replaced, not followed. The folder is created if there is none.

    Args:
        path: the file.
        parts: its bytes.

    Raises:
        IsADirectoryError: it is a folder.
        OSError: it is a pipe or a device, its name is too long, or it cannot be written.
    """
    target = Path(os.path.abspath(path))
    mode = _mode_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _tidy(target)
    file, beside = _locked_file(target, 0o666 if mode is None else mode)
    try:
        try:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file, mode)  # the umask has taken bits off it
            for part in parts:
                _write_all(file, memoryview(part))
            os.fsync(file)
            if fcntl is None:  # an open file cannot be renamed there
                os.close(file)
            os.replace(beside, target)
        finally:  # only now: without its lock the file is anybody's to tidy up
            if fcntl is not None:
                os.close(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    if fcntl is not None:
        _sync_folder(target.parent)


@contextlib.contextmanager
def only_run(folder: str | os.PathLike) -> Iterator[None]:
    """Refuse a second run in a folder while this one is there.

    Raises:
        ValueError: there is one; the message has its process and the time of its start.
    """
    path = Path(folder) / ".running"
    made = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    while True:
        file = os.open(path, flags, 0o644)
        if _lock(file) is not False:
            if os.fstat(file).st_nlink:
                break
        elif os.fstat(file).st_nlink:
            words = os.read(file, 200).decode("utf-8", "replace").split("\n")[0]
            os.close(file)
            raise value_error(
                f"there is a run in {os.fspath(folder)} already: {words or 'it has just started'}.",
                why="two runs would write the same files in turn",
                do="wait for it or stop it, or name another folder",
            )
        os.close(file)  # another run has ended since it was opened
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()}, since {time.strftime('%F %T')}\n".encode())
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(file)
        if made:
            with contextlib.suppress(OSError):  # the run has left something in it
                path.parent.rmdir()


def _mode_of(target: Path) -> int | None:
    """The mode of the file that will be replaced, if there is one; refuse what is no file."""
    if len(os.fsencode(target.name)) > LONGEST:
        raise error(OSError)(
            f"{target.name[:40]}… has {len(os.fsencode(target.name))} bytes.",
            why=f"names of files have up to {LONGEST}",
            do="choose a shorter name",
        )
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        raise error(IsADirectoryError)(
            f"{os.fspath(target)!r} is a folder.",
            why="what is written is one file",
            do="name a file in it",
        )
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise error(OSError)(
            f"{os.fspath(target)!r} is a pipe, a socket or a device.",
            why="a file that is written takes the place of what has its name",
            do="name a file",
        )
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None


def _locked_file(target: Path, mode: int) -> tuple[int, Path]:
    """A new file beside the target, open and locked."""
    stem = os.fsdecode(os.fsencode(target.name)[:200])
    while True:
        beside = target.with_name(f".{stem}.{os.urandom(8).hex()}.tmp")
        file = os.open(beside, os.O_WRONLY | _NEW, mode)
        _lock(file, wait=True)
        if os.fstat(file).st_nlink or fcntl is None:
            return file, beside
        os.close(file)  # taken for one of a killed writer, before it had its lock


def _lock(file: int, *, wait: bool = False) -> bool | None:
    """Lock an open file; whether it has worked, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some file systems of networks
        return None
    return True


def _tidy(target: Path) -> None:
    """Remove what killed writers of this file left; a file that is being written is locked."""
    stem = os.fsdecode(os.fsencode(target.name)[:200])
    with contextlib.suppress(PermissionError):  # of the folder
        for name in os.listdir(target.parent):
            if name.startswith(f".{stem}.") and _SUFFIX.fullmatch(name, len(stem) + 1):
                with contextlib.suppress(OSError):  # gone, or not ours: it is in nobody's way
                    beside = target.with_name(name)
                    file = os.open(beside, _LOOK)
                    try:
                        if _lock(file):
                            beside.unlink()
                    finally:
                        os.close(file)


def _write_all(file: int, part: memoryview) -> None:
    while part.nbytes:
        part = part[os.write(file, part) :]


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
