"""``coserve top``: what a server does, in the terminal."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from sglang_coserve.cli.console import code_of_signal, say
from sglang_coserve.cli.flags import OperatorFlags, flag, takes
from sglang_coserve.errors import ServerGoneError

if TYPE_CHECKING:
    from sglang_coserve.client.view_client import ViewClient

__all__ = ["top"]

_HISTORY_S: Final = 120.0


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
    from sglang_coserve.client.view_client import ViewClient

    try:
        with ViewClient(flags.base_url, flags.key) as client:
            first = client.read()  # An unusable address or key is reported at once.
            if flags.once:
                _show_once(first, plain=flags.plain)
            elif flags.plain or not sys.stdout.isatty():
                _lines(client, first, flags.interval)
            else:
                _screen(client, first, flags.interval)
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

    from sglang_coserve.terminal import printable
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
