"""``coserve jobs``: the batches of a data directory, without a server."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_coserve.cli.batches import batch_json, batch_row
from sglang_coserve.cli.say import say

if TYPE_CHECKING:
    from sglang_coserve.batch.record import JobRecord
    from sglang_coserve.batch.state import Event
    from sglang_coserve.batch.stored_jobs import StoredJobs

__all__ = ["jobs"]

_HASH_CHARS = 64
_OWNER_CHARS = 8
"""Characters of an owner's hash that are shown: enough to tell owners apart."""

jobs = typer.Typer(
    help="Show and change batches in a data directory that no server is using: because it does"
    " not start any more, say. What is asked for is done when it starts again.",
    no_args_is_help=True,
)

BatchId = Annotated[str, typer.Argument(metavar="BATCH")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON objects, one a line.")]


@jobs.callback()
def directory(
    context: typer.Context,
    data_dir: Annotated[
        Path,
        typer.Option("--data-dir", metavar="DIRECTORY", help="The server's --coserve-data-dir."),
    ],
) -> None:
    """Set the directory for all commands."""
    context.obj = data_dir


@jobs.command("list")
def list_jobs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Most batches to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the newest batches of all API keys, with the beginning of the key's hash."""
    with _opened(context) as stored:
        for record in stored.newest(limit):
            _show(record, as_json)


@jobs.command()
def cancel(context: typer.Context, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Cancel a batch; its results so far are kept."""
    from sglang_coserve.batch.state import CancelAsked

    _change(context, batch_id, CancelAsked(), as_json)


@jobs.command()
def pause(context: typer.Context, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Pause a batch until it is resumed; its window is not extended."""
    from sglang_coserve.batch.state import PauseAsked

    _change(context, batch_id, PauseAsked(), as_json)


@jobs.command()
def resume(context: typer.Context, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Resume a paused batch."""
    from sglang_coserve.batch.state import ResumeAsked

    _change(context, batch_id, ResumeAsked(), as_json)


def _change(context: typer.Context, batch_id: str, event: Event, as_json: bool) -> None:
    with _opened(context) as stored:
        _show(stored.change(batch_id, event), as_json)


@contextmanager
def _opened(context: typer.Context) -> Generator[StoredJobs]:
    from sglang_coserve.batch.data_directory import InUseError
    from sglang_coserve.batch.stored_jobs import StoredJobs
    from sglang_coserve.errors import StartupError

    data_dir: Path = context.obj
    try:
        with StoredJobs.open(data_dir, time.time) as stored:
            yield stored
    except InUseError:
        raise StartupError(
            f"a server has the data directory {data_dir} open: ask that one, with"
            " 'coserve list' or 'coserve cancel BATCH' and its --base-url"
        ) from None


def _show(record: JobRecord, as_json: bool) -> None:
    from sglang_coserve.batch.render import batch_object

    batch: dict[str, Any] = batch_object(record).model_dump(mode="json")
    is_hash = len(record.owner) == _HASH_CHARS
    owner = record.owner[:_OWNER_CHARS] if is_hash else record.owner
    if as_json:
        typer.echo(batch_json(batch | {"owner": owner}))
        return
    warning = batch["coserve"]["warning"]
    say(f"{batch_row(batch)}  owner {owner}")
    if warning:
        say(f"  warning: {warning}")
