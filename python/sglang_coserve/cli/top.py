"""``coserve top``: what a server does, in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import typer

from sglang_coserve.cli.console import OperatorFlags, code_of_signal, flag, say, takes
from sglang_coserve.errors import ServerError, ServerGoneError
from sglang_coserve.terminal import printable

_TIMEOUT_S: Final = 10.0
_PATH: Final = "/coserve/view"
_LAST_S: Final = 5.0
"""Of the history only the last sample is shown."""

View = dict[str, Any]


@dataclass(frozen=True)
class TopFlags(OperatorFlags):
    """What ``top`` is told."""

    interval: float = flag(2.0, "Seconds from one look to the next.", min=0.2)
    plain: bool = flag(False, "One line of text each time; so also into a pipe.", "--plain")
    once: bool = flag(False, "Look once and end.", "--once")


@takes(TopFlags)
def top(flags: TopFlags) -> None:
    """Watch a server: whether online users are hurt, the engine, batches, and why.

    Ends with Ctrl-C.
    """
    try:
        with _reading(flags.base_url, flags.key) as read:
            # An unusable address or key is reported at once.
            _show(read(), read, flags)
    except KeyboardInterrupt:
        raise typer.Exit(code_of_signal(signal.SIGINT)) from None


def _show(view: View, read: Callable[[], View], flags: TopFlags) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from sglang_coserve.view.terminal import as_line, as_tables

    if flags.plain or not (flags.once or sys.stdout.isatty()):
        say(as_line(view))
        while not flags.once:
            time.sleep(flags.interval)
            try:
                say(as_line(read()))
            except ServerGoneError as error:
                say(error, is_error=True)
        return
    console = Console(markup=False, highlight=False)
    if flags.once:
        console.print(as_tables(view))
        return
    with Live(as_tables(view), console=console, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(flags.interval)
            try:
                live.update(as_tables(view := read()))
            except ServerGoneError as error:
                gone = f"{printable(str(error))}; above is what it said last"
                live.update(Group(as_tables(view), gone))


@contextmanager
def _reading(base_url: str, key: str | None) -> Iterator[Callable[[], View]]:
    """Connect to a server, and give what returns its view.

    Raises:
        ConfigError: the address or the key cannot be used.
        ServerGoneError: on reading, there is no answer.
        ServerError: on reading, the server refuses, or is none of ours; or what it said cannot be
            shown.
    """
    import httpx
    import msgspec

    from sglang_coserve.client.calls import server_address

    address, headers = server_address(base_url, key)

    since_s = 0.0

    def read() -> View:
        nonlocal since_s
        try:
            answer = http.get(_PATH, params={"since": since_s})
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ServerGoneError(
                f"{address}: no answer: {reason}: is the server there? --base-url says which"
            ) from error
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise ServerError(
                f"{address}: the server asks for its key: give its --api-key or --admin-api-key as"
                " --api-key, or in COSERVE_API_KEY"
            )
        if answer.status_code != HTTPStatus.OK:
            raise ServerError(
                f"{address}{_PATH}: answered with {answer.status_code}: is it a server of "
                "sglang_coserve, and as new as this command?"
            )
        try:
            view = msgspec.json.decode(answer.content, type=View)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{address}{_PATH}: the answer cannot be read: {error}") from error
        since_s = view["at"] - _LAST_S
        return view

    with httpx.Client(
        base_url=address, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as http:
        try:
            yield read
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ServerError(
                f"{address}{_PATH}: the answer cannot be shown ({error!r}): is the server of the"
                " same version as this command?"
            ) from error
