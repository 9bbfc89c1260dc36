"""Prints for commands; text of others is escaped, so that it cannot control the terminal."""

from __future__ import annotations

import typer

from sglang_coserve.printable import printable

__all__ = ["say"]


def say(text: object, *, newline: bool = True, is_error: bool = False) -> None:
    """Print ``text``, with control characters escaped, on standard output or standard error.

    Not for JSON, which has escapes of its own.
    """
    typer.echo(printable(str(text)), nl=newline, err=is_error)
