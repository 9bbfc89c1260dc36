"""The exit codes of all commands."""

from __future__ import annotations

from typing import Final

from sglang_coserve.errors import CoserveError, ServerError

__all__ = ["OK", "SERVER", "SOME_FAILED", "USAGE", "of_error", "of_signal"]

OK: Final = 0
SOME_FAILED: Final = 1
"""The work is done, but part of it has no result."""

USAGE: Final = 2
"""A flag or a file cannot be used; also what the command line parser exits with."""

SERVER: Final = 3
"""The server does not answer or refuses the client; the same command continues later."""


def of_signal(number: int) -> int:
    """Return the exit code after a clean stop by a signal, as shells number it: 130 for Ctrl-C."""
    return 128 + number


def of_error(error: CoserveError) -> int:
    """Return the exit code for an error that ended a command."""
    return SERVER if isinstance(error, ServerError) else USAGE
