"""What commands have in common: flags, what they print, and the codes with which they end."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Final, get_type_hints

import typer

from sglang_coserve.errors import CoserveError, ServerError
from sglang_coserve.terminal import flag, printable


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    SOME_FAILED = 1
    """The work is done, but part of it has no result."""

    USAGE = 2
    """A flag or a file cannot be used; also what the command line parser exits with."""

    SERVER = 3
    """The server does not answer or refuses the client; the same command continues later."""


def code_of_error(error: CoserveError) -> ExitCode:
    """Return the exit code for an error that ended a command."""
    return ExitCode.SERVER if isinstance(error, ServerError) else ExitCode.USAGE


def say(text: object, *, newline: bool = True, is_error: bool = False) -> None:
    """Print ``text``, with control characters escaped so that text of others cannot control the
    terminal, on standard output or standard error.

    Not for JSON, which has escapes of its own.
    """
    typer.echo(printable(str(text)), nl=newline, err=is_error)


def takes(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as flags, in place of its parameter ``flags``.

    All of them are made by ``terminal.flag``.
    """
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=Annotated[hints[one.name], _option(one.metadata, hints[one.name])],
        )
        for one in fields
    ]

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        shown: list[inspect.Parameter] = []
        for one in signature.parameters.values():
            shown += parameters if one.name == "flags" else [one.replace(kind=one.KEYWORD_ONLY)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            flags = kind(**{one.name: values.pop(one.name) for one in fields})
            command(flags=flags, **values)

        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return run

    return give


_METAVARS: Final = {int: "N", int | None: "N", float: "X", float | None: "X"}
"""Shorter than typer's, which would leave no room for the names of flags."""


def _option(of: Mapping[str, Any], kind: Any) -> Any:
    option = {"metavar": _METAVARS.get(kind), **of["option"]}
    return typer.Option(*of["names"], help=of["doc"], **option)


_SERVER: Final = "Server"


@dataclass(frozen=True)
class ServerFlags:
    """Which server is called."""

    base_url: str = flag(
        "http://127.0.0.1:30000", "The server.", envvar="COSERVE_BASE_URL", group=_SERVER
    )
    api_key: str | None = flag(
        None,
        "Sent as a bearer token.",
        envvar=["COSERVE_API_KEY", "OPENAI_API_KEY"],
        group=_SERVER,
    )


@dataclass(frozen=True)
class OperatorFlags(ServerFlags):
    """The same, by a user or by the operator."""

    as_operator: bool = flag(
        False,
        "Batches of every key: COSERVE_ADMIN_API_KEY, or else --api-key, is then the server's"
        " --admin-api-key.",
        "--as-operator",
        group=_SERVER,
    )
