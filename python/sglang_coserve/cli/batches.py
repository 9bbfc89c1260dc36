"""``coserve status``, ``list``, ``cancel``, ``results``: batches that a server runs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.say import say
from sglang_coserve.cli.server_flags import DEFAULT_BASE_URL, ApiKey, BaseUrl
from sglang_coserve.errors import ConfigError

if TYPE_CHECKING:
    from sglang_coserve.client import Batch, BatchApi

__all__ = [
    "ADMIN_KEY_VARIABLE",
    "AsOperator",
    "batch_json",
    "batch_row",
    "cancel",
    "list_batches",
    "results",
    "status",
]

T = TypeVar("T")

ADMIN_KEY_VARIABLE: Final = "COSERVE_ADMIN_API_KEY"

BatchId = Annotated[str, typer.Argument(metavar="BATCH")]
AsOperator = Annotated[
    bool,
    typer.Option(
        "--as-operator",
        help="Batches of every key: COSERVE_ADMIN_API_KEY, or else --api-key, is then the server's"
        " --admin-api-key.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As the server's JSON objects, one a line.")]


def status(
    batch_id: BatchId,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    as_operator: AsOperator = False,
    as_json: AsJson = False,
) -> None:
    """Show the progress of a batch, and when it is expected to be complete."""

    async def show(api: BatchApi) -> None:
        batch = await api.retrieve(batch_id)
        _show(batch, _details, as_json=as_json)

    _call(base_url, api_key, show, as_operator=as_operator)


def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most batches to show.")] = 20,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    as_operator: AsOperator = False,
    owner: Annotated[
        str | None, typer.Option(help="With --as-operator: only this owner's, as shown.")
    ] = None,
    batch_status: Annotated[
        str | None,
        typer.Option("--status", help="With --as-operator: only those in this status."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest batches of this API key, or as an operator of all."""
    if (owner or batch_status) and not as_operator:
        raise ConfigError("--owner and --status are an operator's: add --as-operator")

    async def show(api: BatchApi) -> None:
        for batch in await api.newest(limit, owner=owner, status=batch_status):
            _show(batch, _operator_row if as_operator else batch_row, as_json=as_json)

    _call(base_url, api_key, show, as_operator=as_operator)


def cancel(
    batch_id: BatchId,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    as_operator: AsOperator = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a batch; its results so far are kept."""

    async def ask(api: BatchApi) -> None:
        _show(await api.cancel(batch_id), batch_row, as_json=as_json)

    _call(base_url, api_key, ask, as_operator=as_operator)


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
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
) -> None:
    """Fetch the results that a batch has so far.

    Exits with 0 when the batch is complete and every line has a result, else with 1.
    """
    from sglang_coserve.client.server_batch import fetch_results, recover_results

    async def fetch(api: BatchApi) -> bool:
        batch = await api.retrieve(batch_id)
        await recover_results(batch_id, output)
        await fetch_results(api, batch, output)
        say(batch_row(batch))
        return batch["status"] == "completed" and not batch["request_counts"]["failed"]

    if not _call(base_url, api_key, fetch):
        raise typer.Exit(exit_codes.SOME_FAILED)


def batch_json(batch: Batch) -> str:
    """Return a batch as one line of JSON."""
    return json.dumps(batch)


def _call(
    base_url: str,
    api_key: str | None,
    do: Callable[[BatchApi], Awaitable[T]],
    *,
    as_operator: bool = False,
) -> T:
    from sglang_coserve.client import BatchApi, RetryPolicy

    key = os.environ.get(ADMIN_KEY_VARIABLE, api_key) if as_operator else api_key

    async def run() -> T:
        # Short commands do not wait for a server that is down.
        api = BatchApi(base_url, key, RetryPolicy(retry_for_s=5.0), as_operator=as_operator)
        try:
            return await do(api)
        finally:
            await api.close()

    return asyncio.run(run())


def _show(batch: Batch, as_text: Callable[[Batch], str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(batch_json(batch))
    else:
        say(as_text(batch))


def batch_row(batch: Batch) -> str:
    """Return a batch in one line."""
    counts = batch["request_counts"]
    paused = " (paused)" if _extra(batch).get("paused") else ""
    return (
        f"{batch['id']}  {batch['status']}{paused}  {counts['completed']} ok, "
        f"{counts['failed']} failed of {counts['total']}  created {_time(batch['created_at'])}"
    )


def _operator_row(batch: Batch) -> str:
    return f"{batch_row(batch)}  owner {_extra(batch).get('owner')}"


def _details(batch: Batch) -> str:
    usage, extra = batch["usage"], _extra(batch)
    lines = [
        batch_row(batch),
        f"window {batch['completion_window']}, until {_time(batch['expires_at'])}",
        f"{usage['total_tokens']} tokens ({usage['input_tokens']} prompt, "
        f"{usage['output_tokens']} completion)",
    ]
    if extra.get("eta") is not None:
        rate = extra.get("rate_tokens_per_s") or 0.0
        lines.append(f"expected to be complete {_time(extra['eta'])} (P50), at {rate:.1f} tokens/s")
    if extra.get("eta_p95") is not None:
        lines.append(f"and with 95% certainty by {_time(extra['eta_p95'])} (P95)")
    if extra.get("online_delay_s") is not None:
        lines.append(f"delayed online requests by {extra['online_delay_s']:.1f} s in all")
    if extra.get("warning"):
        lines.append(f"warning: {extra['warning']}")
    for fault in (batch["errors"] or {"data": []})["data"]:
        where = f"line {fault['line']}: " if fault["line"] else ""
        lines.append(f"error: {where}{fault['message']}")
    return "\n".join(lines)


def _extra(batch: Batch) -> dict[str, Any]:
    return batch.get("coserve") or {}


def _time(epoch_s: float) -> str:
    return f"{datetime.fromtimestamp(epoch_s).astimezone():%Y-%m-%d %H:%M:%S}"
