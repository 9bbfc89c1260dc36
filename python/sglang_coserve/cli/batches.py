"""A server and its batches: coserve top, status, list, cancel, delete and results."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from sglang_coserve.cli.console import ExitCode, OperatorFlags, ServerFlags, say, takes
from sglang_coserve.errors import ConfigError, ServerError, ServerGoneError
from sglang_coserve.terminal import INTERRUPTED, flag, printable

if TYPE_CHECKING:
    from sglang_coserve.client import Batch, BatchApi


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
    try:
        with showing_answers(flags):
            call_server(flags, lambda api: _watch(api, flags))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


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


T = TypeVar("T")

BatchId = Annotated[str, typer.Argument(metavar="BATCH")]


@dataclass(frozen=True)
class BatchFlags(OperatorFlags):
    """Which server is asked, by whom, and how the answer is shown."""

    as_json: bool = flag(False, "As the server's JSON objects, one a line.", "--json")


@takes(BatchFlags)
def status(
    flags: BatchFlags,
    batch_id: Annotated[str | None, typer.Argument(metavar="BATCH", show_default=False)] = None,
) -> None:
    """Show how a server stands, or a batch and when it is expected to be complete."""
    if batch_id is None and not flags.as_json:
        watch_server(TopFlags(flags.base_url, flags.api_key, flags.as_operator, once=True))
        return

    async def show(api: BatchApi) -> None:
        if batch_id is None:
            typer.echo(json.dumps(await api.view()))
        else:
            _show(await api.retrieve(batch_id), _details, flags)

    call_server(flags, show)


@dataclass(frozen=True)
class ListFlags(BatchFlags):
    """What ``list`` is told."""

    limit: int = flag(20, "Most batches to show.", min=1, max=100)
    owner: str | None = flag(None, "With --as-operator: only this owner's, as shown.")
    status: str | None = flag(None, "With --as-operator: only those in this status.")


@takes(ListFlags)
def list_batches(flags: ListFlags) -> None:
    """Show the newest batches of this API key, or as an operator of all."""
    if (flags.owner or flags.status) and not flags.as_operator:
        raise ConfigError("--owner and --status are an operator's: add --as-operator")

    async def show(api: BatchApi) -> None:
        for batch in await api.newest(flags.limit, owner=flags.owner, status=flags.status):
            _show(batch, _operator_row if flags.as_operator else batch_row, flags)

    call_server(flags, show)


@takes(BatchFlags)
def cancel(batch_id: BatchId, flags: BatchFlags) -> None:
    """Cancel a batch; its results so far are kept."""

    async def ask(api: BatchApi) -> None:
        _show(await api.cancel(batch_id), batch_row, flags)

    call_server(flags, ask)


@takes(ServerFlags)
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="BATCH|FILE...", help="Files, or batches that have ended."),
    ],
    flags: ServerFlags,
) -> None:
    """Delete files from the server: one, or a batch's input and results."""

    async def ask(api: BatchApi) -> None:
        for each in ids:
            for file_id in await _files_of(api, each):
                await api.delete(file_id)
                say(f"deleted {file_id}")

    call_server(flags, ask)


async def _files_of(api: BatchApi, named: str) -> list[str]:
    from sglang_coserve.client.batch_api import FINAL_STATUSES

    if not named.startswith("batch_"):
        return [named]
    batch = await api.retrieve(named)
    if batch["status"] not in FINAL_STATUSES:
        raise ConfigError(f"{named} is {batch['status']}: wait for its end, or cancel it first")
    names = ("input_file_id", "output_file_id", "error_file_id")
    files = [batch[name] for name in names if batch[name]]
    return [file for file in files if await api.has_file(file)]


@takes(ServerFlags)
def results(
    batch_id: BatchId,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUTPUT.jsonl",
            help="Results; failed lines go to OUTPUT.errors.jsonl. What is there already of this"
            " batch is not fetched again.",
        ),
    ],
    flags: ServerFlags,
) -> None:
    """Fetch the results that a batch has so far.

    Exits with 0 when the batch is complete and every line has a result, else with 1.
    """
    from sglang_coserve.client.job import fetch_results
    from sglang_coserve.client.output_files import cut_unsynced, locked

    async def fetch(api: BatchApi) -> bool:
        batch = await api.retrieve(batch_id)
        with locked(output):
            await asyncio.to_thread(cut_unsynced, batch_id, output)
            await fetch_results(api, batch, output)
        say(f"{batch_row(batch)}\nresults: {output}")
        return batch["status"] == "completed" and not batch["request_counts"]["failed"]

    if not call_server(flags, fetch):
        raise typer.Exit(ExitCode.SOME_FAILED)


def call_server(
    flags: ServerFlags, do: Callable[[BatchApi], Awaitable[T]], *, as_operator: bool = False
) -> T:
    """Return what ``do`` does with the server of the flags; ``as_operator`` uses the admin key."""
    from sglang_coserve.client import BatchApi, RetryPolicy

    as_operator = as_operator or (isinstance(flags, OperatorFlags) and flags.as_operator)
    admin_key = os.environ.get("COSERVE_ADMIN_API_KEY") if as_operator else None
    key = admin_key or flags.api_key

    async def run() -> T:
        # Short commands do not wait for a server that is down.
        policy = RetryPolicy(retry_for_s=5.0)
        async with BatchApi(flags.base_url, key, policy, as_operator=as_operator) as api:
            return await do(api)

    return asyncio.run(run())


@contextmanager
def showing_answers(flags: ServerFlags) -> Iterator[None]:
    """Tell an answer in a form that this version does not know from a fault of this command.

    Raises:
        ServerError: the answer could not be shown.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerError(
            f"{flags.base_url}: what the server says cannot be shown ({error!r}): is it of the same"
            " version as this command?"
        ) from error


def _show(batch: Batch, as_text: Callable[[Batch], str], flags: BatchFlags) -> None:
    if flags.as_json:
        typer.echo(json.dumps(batch))
    else:
        say(as_text(batch))


def batch_row(batch: Batch) -> str:
    """Return a batch in one line."""
    counts = batch["request_counts"]
    paused = " (paused)" if batch["coserve"].get("paused") else ""
    return (
        f"{batch['id']}  {batch['status']}{paused}  {counts['completed']} ok, "
        f"{counts['failed']} failed of {counts['total']}  created {_time(batch['created_at'])}"
    )


def _operator_row(batch: Batch) -> str:
    return f"{batch_row(batch)}  owner {batch['coserve'].get('owner')}"


def _details(batch: Batch) -> str:
    from sglang_coserve.view.terminal import waiting_text

    usage, extra = batch["usage"], batch["coserve"]
    lines = [
        batch_row(batch),
        f"window {batch['completion_window']}, until {_time(batch['expires_at'])}",
        f"{usage['total_tokens']} tokens ({usage['input_tokens']} prompt, "
        f"{usage['output_tokens']} completion)",
    ]
    if extra.get("eta") is not None:
        rate = extra.get("rate_tokens_per_s") or 0.0
        lines.append(f"expected to be complete {_time(extra['eta'])}, at {rate:.1f} tokens/s")
    if waiting := waiting_text(batch):
        lines.append(waiting)
    if extra.get("lines_in_flight"):
        lines.append(f"{extra['lines_in_flight']} lines in the engine")
    if extra.get("last_record_at") is not None:
        lines.append(f"latest result {_time(extra['last_record_at'])}")
    if extra.get("online_delay_s") is not None:
        lines.append(f"delayed online requests by {extra['online_delay_s']:.1f} s in all")
    if extra.get("warning"):
        lines.append(f"warning: {extra['warning']}")
    for fault in (batch["errors"] or {"data": []})["data"]:
        where = f"line {fault['line']}: " if fault["line"] else ""
        lines.append(f"error: {where}{fault['message']}")
    return "\n".join(lines)


def _time(epoch_s: float) -> str:
    return f"{datetime.fromtimestamp(epoch_s).astimezone():%Y-%m-%d %H:%M:%S}"
