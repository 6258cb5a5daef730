"""From the words of a command line to the command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module

from ..._errors import MissingExtra
from ..._version import __version__
from ._commands import add_commands
from ._parser import Ended, Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words of the command line; default those of the process.

    Returns:
        The exit status: 0, 1 if the command failed, 2 if its words do not fit, 130 if it was
        interrupted.

    Raises:
        SystemExit: with status 2, after an error, if the words make no command.
    """
    _open_streams()
    options = parser().parse_args(arguments)
    if options.check is not None:
        options.check(options)
    search_path = list(sys.path)  # a file of the user's adds its folder
    try:
        with _terminated_as_interrupted():
            return import_module(f"._{options.command}", __package__).run(options)
    except Ended as error:
        print(error, file=sys.stderr)
        return error.status
    except MissingExtra as error:
        return options.parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stderr.close()
        return 1
    finally:
        sys.path[:] = search_path


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM as Ctrl-C, at which a command writes what is finished."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open_streams() -> None:
    """Streams that the shell has closed (`2>&-`): else a file would get their number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # for the rest of the process


def parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="braintrace",
        description="Online learning of recurrent and spiking networks in JAX.",
        epilog="`braintrace COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"braintrace {__version__}")
    add_commands(parser)
    return parser
