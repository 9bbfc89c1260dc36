"""How commands print: nothing that others wrote reaches the terminal as more than text."""

from __future__ import annotations

import typer

from sglang_coserve.printable import printable

__all__ = ["say"]


def say(text: object, *, newline: bool = True, is_error: bool = False) -> None:
    """Print ``text``, escaped where it is no text, on standard output or standard error.

    Not for JSON, which has escapes of its own.
    """
    typer.echo(printable(str(text)), nl=newline, err=is_error)
