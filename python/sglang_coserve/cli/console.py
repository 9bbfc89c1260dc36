"""What commands print, and the codes with which they end."""

from __future__ import annotations

from enum import IntEnum

import typer

from sglang_coserve.errors import CoserveError, ServerError
from sglang_coserve.terminal import printable

__all__ = ["ExitCode", "code_of_error", "code_of_signal", "say"]


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    SOME_FAILED = 1
    """The work is done, but part of it has no result."""

    USAGE = 2
    """A flag or a file cannot be used; also what the command line parser exits with."""

    SERVER = 3
    """The server does not answer or refuses the client; the same command continues later."""


def code_of_signal(number: int) -> int:
    """Return the exit code after a clean stop by a signal, as shells number it: 130 for Ctrl-C."""
    return 128 + number


def code_of_error(error: CoserveError) -> ExitCode:
    """Return the exit code for an error that ended a command."""
    return ExitCode.SERVER if isinstance(error, ServerError) else ExitCode.USAGE


def say(text: object, *, newline: bool = True, is_error: bool = False) -> None:
    """Print ``text``, with control characters escaped so that text of others cannot control the
    terminal, on standard output or standard error.

    Not for JSON, which has escapes of its own.
    """
    typer.echo(printable(str(text)), nl=newline, err=is_error)
