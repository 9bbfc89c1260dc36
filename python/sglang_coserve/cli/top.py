"""``coserve top``: what a server does, in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import typer

from sglang_coserve.cli.console import OperatorFlags, code_of_signal, say, takes
from sglang_coserve.errors import ServerError, ServerGoneError
from sglang_coserve.terminal import flag, printable

if TYPE_CHECKING:
    from sglang_coserve.client import BatchApi

_LAST_S: Final = 5.0
"""Of the history only the last sample is shown."""


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
    watch_server(flags)


def watch_server(flags: TopFlags) -> None:
    """Show a server, once or until Ctrl-C.

    Raises:
        ServerError: it does not answer, or what it says cannot be shown.
    """
    from sglang_coserve.client import BatchApi, RetryPolicy

    async def watch() -> None:
        async with BatchApi(flags.base_url, flags.key, RetryPolicy(retry_for_s=5.0)) as api:
            await _watch(api, flags)

    try:
        asyncio.run(watch())
    except KeyboardInterrupt:
        raise typer.Exit(code_of_signal(signal.SIGINT)) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerError(
            f"{flags.base_url}: what the server says cannot be shown ({error!r}): is it of the same"
            " version as this command?"
        ) from error


async def _watch(api: BatchApi, flags: TopFlags) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from sglang_coserve.view.terminal import as_line, as_tables

    view = await api.view()
    if flags.plain or not (flags.once or sys.stdout.isatty()):
        say(as_line(view))
        while not flags.once:
            await asyncio.sleep(flags.interval)
            try:
                view = await api.view(view["at"] - _LAST_S)
                say(as_line(view))
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
            await asyncio.sleep(flags.interval)
            try:
                view = await api.view(view["at"] - _LAST_S)
                live.update(as_tables(view))
            except ServerGoneError as error:
                gone = f"{printable(str(error))}; above is what it said last"
                live.update(Group(as_tables(view), gone))
