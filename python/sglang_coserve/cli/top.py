"""``coserve top``: what a server does, in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sglang_coserve.cli.console import code_of_signal, say
from sglang_coserve.cli.flags import DEFAULT_BASE_URL, ApiKey, AsOperator, BaseUrl, key_for
from sglang_coserve.errors import ServerGoneError

if TYPE_CHECKING:
    from sglang_coserve.client.view_client import ViewClient

__all__ = ["top"]

_HISTORY_S: Final = 120.0


def top(
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    as_operator: AsOperator = False,
    interval: Annotated[
        float, typer.Option(min=0.2, help="Seconds from one look to the next.")
    ] = 2.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line of text each time; so also into a pipe.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Watch a server: whether online users are hurt, the engine, batches, and why.

    Ends with Ctrl-C.
    """
    from sglang_coserve.client.view_client import ViewClient

    key = key_for(api_key, as_operator=as_operator)
    try:
        with ViewClient(base_url, key) as client:
            first = client.read()  # An unusable address or key is reported at once.
            if once:
                _show_once(first, plain=plain)
            elif plain or not sys.stdout.isatty():
                _lines(client, first, interval)
            else:
                _screen(client, first, interval)
    except KeyboardInterrupt:
        raise typer.Exit(code_of_signal(signal.SIGINT)) from None


def _show_once(view: dict[str, Any], *, plain: bool) -> None:
    from rich.console import Console

    from sglang_coserve.view.terminal import as_line, as_screen

    if plain:
        say(as_line(view))
    else:
        Console(markup=False, highlight=False).print(as_screen(view))


def _lines(client: ViewClient, view: dict[str, Any], interval_s: float) -> None:
    from sglang_coserve.view.terminal import as_line

    say(as_line(view))
    while True:
        time.sleep(interval_s)
        try:
            view = client.read(view["at"] - _HISTORY_S)
            say(as_line(view))
        except ServerGoneError as error:
            say(error, is_error=True)


def _screen(client: ViewClient, view: dict[str, Any], interval_s: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from sglang_coserve.printable import printable
    from sglang_coserve.view.terminal import as_screen

    live = Live(as_screen(view), screen=True, auto_refresh=False, vertical_overflow="crop")
    try:
        # Not as a context manager: an interrupt while it starts would leave its screen in place.
        live.start(refresh=True)
        while True:
            time.sleep(interval_s)
            try:
                view = client.read(view["at"] - _HISTORY_S)
                live.update(as_screen(view), refresh=True)
            except ServerGoneError as error:
                gone = Text(printable(f"{error}; shown is what it said last"), "bold red")
                live.update(Group(gone, as_screen(view)), refresh=True)
    finally:
        live.stop()
