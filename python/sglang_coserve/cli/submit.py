"""``coserve submit``: a file of requests in, a file of results out."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sglang_coserve.cli import exit_codes
from sglang_coserve.cli.batches import batch_json
from sglang_coserve.cli.say import say
from sglang_coserve.cli.server_flags import DEFAULT_BASE_URL, ApiKey, BaseUrl
from sglang_coserve.errors import ConfigError, CoserveError

if TYPE_CHECKING:
    from sglang_coserve.client import AsyncJob, BatchApi, BatchOptions

__all__ = ["submit"]

_T = TypeVar("_T")


def submit(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT.jsonl", help="Requests in OpenAI's batch input format.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUTPUT.jsonl",
            help="Wait, and write results in OpenAI's batch output format; failed lines go to"
            " OUTPUT.errors.jsonl. When it exists, the run that wrote it is continued. Without it"
            " the batch is left to the server: see coserve status and coserve results.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Time in which the server is to complete the batch: 2h, 90m, 7d.",
            show_default="24h",
        ),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Batches of a higher one go first.", show_default="0")
    ] = None,
    best_effort: Annotated[
        bool,
        typer.Option(
            "--best-effort",
            help="Begin also where the window cannot be kept; what is not finished then, expires.",
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end; --output does it in any case.")
    ] = False,
    no_batch: Annotated[
        bool,
        typer.Option(
            "--no-batch",
            help="Send the lines one by one from here, as to a server without a Batch API.",
        ),
    ] = False,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    api_key: ApiKey = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Lines that the server has at the same time.")
    ] = 64,
    retry_for: Annotated[
        float, typer.Option(help="Give up when the server has answered nothing for this long, s.")
    ] = 300.0,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="Give one line up after this many failures of its own.")
    ] = 5,
    request_timeout: Annotated[
        float | None, typer.Option(help="Give one attempt up after this long, s. Default: never.")
    ] = None,
    max_line_mib: Annotated[int, typer.Option(min=1, help="A longer line is an error, MiB.")] = 64,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Send the failed lines again.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Of the jitter between retries.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The summary as one JSON object on standard output.")
    ] = False,
) -> None:
    """Run every request of a file in the offline class and write the results as they come.

    A server with a Batch API runs them as one batch, which continues if this command ends. Exits
    with 0 when every line has a result, 1 when some failed, 2 when a file or flag cannot be used, 3
    when the server is gone, 130 on Ctrl-C. With --output the same command continues in every case:
    no line is answered twice.
    """
    from sglang_coserve.client import (
        AsyncCoserveClient,
        BatchOptions,
        ClientOptions,
        JobState,
        RetryPolicy,
    )

    options = ClientOptions(
        concurrency=concurrency,
        request_timeout_s=request_timeout,
        retry_policy=RetryPolicy(retry_for_s=retry_for, max_attempts=max_attempts),
        max_line_bytes=max_line_mib << 20,
        seed=seed,
    )

    has_options = window is not None or priority is not None or best_effort
    batch_options = BatchOptions(window or "24h", priority or 0, best_effort)

    async def run() -> int:
        async with AsyncCoserveClient(base_url, api_key=api_key, options=options) as client:
            if output is None:
                api = client.batches
                if no_batch or retry_failed or not await _shown(api, api.is_on(), quiet):
                    raise ConfigError(
                        "without a Batch API of the server, results need a place: add -o FILE"
                    )
                return await _leave(api, source, batch_options, wait, quiet, as_json)
            submitted = client.submit_jsonl(
                source,
                output,
                retry_failed=retry_failed,
                batch_options=batch_options if has_options else None,
                use_batch=False if no_batch else None,
            )
            job = await _shown(client.batches, submitted, quiet)
            signals = _cancel_on_signal(job)
            error: CoserveError | None = None
            try:
                await job.wait(progress=not quiet)
            except CoserveError as failure:
                error = failure
            if as_json:
                typer.echo(json.dumps(_summary(job, error)))
            elif not quiet:
                say(_describe(job))
            if error:
                raise error
            if job.status.state is JobState.CANCELLED:
                return exit_codes.of_signal(signals[0])
            return exit_codes.SOME_FAILED if job.status.failed else exit_codes.OK

    raise typer.Exit(asyncio.run(run()))


async def _leave(
    api: BatchApi, source: Path, batch_options: BatchOptions, wait: bool, quiet: bool, as_json: bool
) -> int:
    """Begin a batch, and wait for its end if that is wanted; results stay with the server."""
    from sglang_coserve.client.server_batch import begin_batch, check_outcome, follow_batch
    from sglang_coserve.client.submission import Submission

    begun = begin_batch(api, source, batch_options, Submission.new(), lambda _: None)
    batch = await _shown(api, begun, quiet)
    if wait:
        batch = await follow_batch(api, batch, source, show=not quiet)
    if as_json:
        typer.echo(batch_json(batch))
    else:
        say(batch["id"])
    if not wait:
        return exit_codes.OK
    check_outcome(batch, source)
    return exit_codes.SOME_FAILED if batch["request_counts"]["failed"] else exit_codes.OK


async def _shown(api: BatchApi, work: Awaitable[_T], quiet: bool) -> _T:
    """Await ``work``, and show why its calls are being retried when they are."""
    from sglang_coserve.client.progress import showing

    return await (work if quiet else showing(work, lambda: api.last_failure))


def _cancel_on_signal(job: AsyncJob) -> list[int]:
    """Let the first SIGINT or SIGTERM stop ``job``; return where its number will be.

    A second signal ends the process at once, which loses nothing that was written.
    """
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    received: list[int] = []

    def stop(received_number: int) -> None:
        received.append(received_number)
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        job.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    return received


def _summary(job: AsyncJob, error: CoserveError | None) -> dict[str, Any]:
    return job.status.to_dict() | {
        "output": str(job.output),
        "errors": str(job.errors),
        "error": str(error) if error else None,
    }


def _describe(job: AsyncJob) -> str:
    from sglang_coserve.client.batch_api import FINAL_STATUSES

    status = job.status
    tokens = status.prompt_tokens + status.completion_tokens
    earlier = f" ({status.resumed} by an earlier run)" if status.resumed else ""
    lines = [
        f"{status.state.value}: {status.ok} ok, {status.failed} failed{earlier}",
        f"{tokens} tokens ({status.prompt_tokens} prompt, {status.completion_tokens} completion)"
        f" in {status.elapsed_s:.1f} s: {status.tokens_per_s:.1f} tokens/s",
        f"results: {job.output}",
    ]
    if status.failed:
        again = "" if status.batch_id else " (--retry-failed sends these lines again)"
        lines.append(f"errors: {job.errors}{again}")
    if status.state.value != "completed":
        if status.batch_state not in (None, *FINAL_STATUSES):
            lines.append(f"the server goes on with it, unless: coserve cancel {status.batch_id}")
        lines.append("run the same command again to continue")
    return "\n".join(lines)
