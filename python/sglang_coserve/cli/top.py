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

_HISTORY_S: Final = 120.0
_TIMEOUT_S: Final = 10.0
_PATH: Final = "/coserve/view"

View = dict[str, Any]
"""See ``shown_view``."""

Read = Callable[[float], View]
"""Returns the view with its history from a time on, in seconds since the epoch."""


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
            first = read(0.0)  # An unusable address or key is reported at once.
            if flags.once:
                _show_once(first, plain=flags.plain)
            elif flags.plain or not sys.stdout.isatty():
                _lines(read, first, flags.interval)
            else:
                _screen(read, first, flags.interval)
    except KeyboardInterrupt:
        raise typer.Exit(code_of_signal(signal.SIGINT)) from None


@contextmanager
def _reading(base_url: str, key: str | None) -> Iterator[Read]:
    """Connect to a server.

    Raises:
        ConfigError: the address or the key cannot be used.
        ServerGoneError: on reading, there is no answer.
        ServerError: on reading, the server refuses, or is none of ours.
    """
    import httpx
    import msgspec

    from sglang_coserve.client.calls import server_address
    from sglang_coserve.view.shown_view import shown_view

    address, headers = server_address(base_url, key)

    def read(since_s: float) -> View:
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
            if "online_users" not in view:
                raise ValueError("it is no view")
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{address}{_PATH}: the answer cannot be read: {error}") from error
        return shown_view(view)

    with httpx.Client(
        base_url=address, headers=headers, timeout=_TIMEOUT_S, trust_env=False
    ) as http:
        yield read


def _show_once(view: View, *, plain: bool) -> None:
    from rich.console import Console

    from sglang_coserve.view.terminal import as_line, as_screen

    if plain:
        say(as_line(view))
    else:
        Console(markup=False, highlight=False).print(as_screen(view))


def _lines(read: Read, view: View, interval_s: float) -> None:
    from sglang_coserve.view.terminal import as_line

    say(as_line(view))
    while True:
        time.sleep(interval_s)
        try:
            view = read(view["at"] - _HISTORY_S)
            say(as_line(view))
        except ServerGoneError as error:
            say(error, is_error=True)


def _screen(read: Read, view: View, interval_s: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from sglang_coserve.terminal import printable
    from sglang_coserve.view.terminal import as_screen

    live = Live(as_screen(view), screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        # Not as a context manager: an interrupt while it starts would leave its screen in place.
        live.start(refresh=True)
        while True:
            time.sleep(interval_s)
            try:
                view = read(view["at"] - _HISTORY_S)
                live.update(as_screen(view), refresh=True)
            except ServerGoneError as error:
                gone = Text(printable(f"{error}; shown is what it said last"), "bold red")
                live.update(Group(gone, as_screen(view)), refresh=True)
    finally:
        live.stop()
