"""Extends typer by command names of two words and flags with several values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["CommandGroup", "SeveralSlosCommand"]


class CommandGroup(TyperGroup):
    """Commands of which some have names of two words.

    ``simulate fleet`` stands beside ``simulate``, which is a command and not a group.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take the first two arguments as a name where there is such a command."""
        name = " ".join(args[:2])
        if name in self.commands:
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)


class SeveralSlosCommand(TyperCommand):
    """A command whose ``--slo`` takes one or more values, as the server's does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before each of its values, which typer can take."""
        return super().parse_args(ctx, list(_repeated("--slo", args)))


def _repeated(flag: str, args: Iterable[str]) -> Iterator[str]:
    is_open = False
    for arg in args:
        if arg.startswith("-"):
            is_open = arg == flag
            if is_open:
                continue
        elif is_open:
            yield flag
        yield arg
