"""From the words of a command line to the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .._version import __version__
from .commands import COMMANDS, Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words of the command line; default those of the process.

    Returns:
        The exit status: 0, 1 if the command failed, 130 if it was interrupted.

    Raises:
        SystemExit: with status 2, after an error, if the words make no command.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        return 1


def _parser() -> Parser:
    parser = Parser(
        prog="braintrace",
        description="Online learning of recurrent and spiking networks in JAX.",
        epilog="`braintrace COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"braintrace {__version__}")
    commands = parser.add_subparsers(
        prog="braintrace", dest="command", metavar="COMMAND", required=True
    )
    for add in COMMANDS:
        add(commands)
    parser.commands = tuple(commands.choices)
    return parser
