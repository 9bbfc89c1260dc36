"""``coserve submit``: a file of requests in, a file of results out."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from sglang_coserve.cli.console import ExitCode, ServerFlags, say, takes
from sglang_coserve.errors import ConfigError, CoserveError, InputFileError, require
from sglang_coserve.terminal import flag

if TYPE_CHECKING:
    from sglang_coserve.client import AsyncJob, BatchApi, BatchOptions

_T = TypeVar("_T")


_READ_ERRORS: Final = 1000
_REASON_CHARS: Final = 300
_BATCH: Final = "The batch"
_LOCAL: Final = "Where the server has no Batch API"


@dataclass(frozen=True)
class SubmitFlags(ServerFlags):
    """What ``submit`` is told."""

    output: Path | None = flag(
        None,
        "Wait, and write results in OpenAI's batch output format; failed lines go to"
        " OUTPUT.errors.jsonl, and both into a table as well where it is OUTPUT.parquet. When it"
        " exists, the run that wrote it is continued. Without it the batch is left to the server:"
        " see coserve status and coserve results.",
        "--output",
        "-o",
        metavar="OUTPUT.jsonl",
    )
    window: str | None = flag(
        None,
        "Time in which the batch is to be complete: 2h, 90m, 7d.",
        show_default="24h on a server, else 366d",
        group=_BATCH,
    )
    priority: int = flag(0, "Batches of a higher one go first.", group=_BATCH)
    retry_for: float = flag(300.0, "Give up when the server has answered nothing for this long, s.")
    no_batch: bool = flag(
        False, "Keep the batch here, also where the server could.", "--no-batch", group=_LOCAL
    )
    concurrency: int = flag(64, "Lines that the server has at the same time.", min=1, group=_LOCAL)
    max_attempts: int = flag(
        5, "Give one line up after this many failures of its own.", min=1, group=_LOCAL
    )
    request_timeout: float | None = flag(
        None, "Give one attempt up after this long, s. Default: never.", group=_LOCAL
    )
    max_line_mib: int = flag(64, "A longer line is an error, MiB.", min=1, group=_LOCAL)
    quiet: bool = flag(False, "No progress, no summary.", "--quiet", "-q")
    as_json: bool = flag(False, "The summary as one JSON object on standard output.", "--json")


@takes(SubmitFlags)
def submit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Requests in OpenAI's batch input format: a file, an address such as"
            " s3://BUCKET/FILE, - for standard input, or a table, FILE.parquet.",
        ),
    ],
    flags: SubmitFlags,
) -> None:
    """Run every request of a file in the offline class and write the results as they come.

    A server with a Batch API keeps them as one batch, which goes on if this command ends. For any
    other server the batch is kept here, in OUTPUT.jsonl.coserve, until it has ended. Exits with 0
    when every line has a result, 1 when some failed, 2 when a file or flag cannot be used, 3 when
    the server is gone, 130 on Ctrl-C. With --output the same command continues in every case: no
    line is answered twice.
    """
    from sglang_coserve.client import (
        AsyncCoserveClient,
        BatchOptions,
        ClientOptions,
        JobState,
        RetryPolicy,
    )
    from sglang_coserve.client.tables import TABLE, local_lines, write_table

    options = ClientOptions(
        concurrency=flags.concurrency,
        request_timeout_s=flags.request_timeout,
        retry_policy=RetryPolicy(retry_for_s=flags.retry_for, max_attempts=flags.max_attempts),
        max_line_bytes=flags.max_line_mib << 20,
    )
    batch_options = BatchOptions(flags.window, flags.priority)

    wanted = flags.output
    if wanted and wanted.exists() and Path(source).exists() and wanted.samefile(source):
        raise InputFileError(f"{wanted} would overwrite the input: choose another output")
    output = wanted
    if wanted and wanted.suffix == TABLE:
        require("remote", str(wanted))  # It is written last.
        output = wanted.with_suffix(".jsonl")

    async def run(source: Path) -> int:
        async with AsyncCoserveClient(
            flags.base_url, api_key=flags.api_key, options=options
        ) as client:
            if output is None:
                return await _leave(client.batches, source, batch_options, flags)
            submitted = client.submit_jsonl(
                source,
                output,
                batch_options=batch_options,
                use_batch=False if flags.no_batch else None,
            )
            job = await _shown(client.batches, submitted, flags.quiet)
            signals = _cancel_on_signal(job)
            error: CoserveError | None = None
            try:
                await job.wait(progress=not flags.quiet)
            except CoserveError as failure:
                error = failure
            if wanted and wanted != output and job.status.state is JobState.COMPLETED:
                await asyncio.to_thread(write_table, job.output, wanted)
            if flags.as_json:
                typer.echo(json.dumps(_summary(job, output, error)))
            elif not flags.quiet:
                say(_describe(job, output))
            if error:
                raise error
            if job.status.state is JobState.CANCELLED:
                return 128 + signals[0]  # As shells number it.
            return ExitCode.SOME_FAILED if job.status.failed else ExitCode.OK

    with local_lines(source) as path:
        raise typer.Exit(asyncio.run(run(path)))


async def _leave(
    api: BatchApi, source: Path, batch_options: BatchOptions, flags: SubmitFlags
) -> int:
    """Begin a batch, whose results stay with the server."""
    from sglang_coserve.client.job import begin_batch
    from sglang_coserve.client.submission import Submission

    if flags.no_batch or not await _shown(api, api.is_on(), quiet=flags.quiet):
        raise ConfigError("without a Batch API of the server, results need a place: add -o FILE")
    begun = begin_batch(api, source, batch_options, Submission.new(), lambda _: None)
    batch = await _shown(api, begun, flags.quiet)
    if flags.as_json:
        typer.echo(json.dumps(batch))
    else:
        say(batch["id"])
    return ExitCode.OK


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


def _summary(job: AsyncJob, output: Path, error: CoserveError | None) -> dict[str, Any]:
    from sglang_coserve.client.output_files import errors_path

    return job.status.to_dict() | {
        "output": str(output),
        "errors": str(errors_path(output)),
        "error": str(error) if error else None,
    }


def _describe(job: AsyncJob, output: Path) -> str:
    """Return the summary for people, with ``output`` as it was given."""
    from sglang_coserve.client.batch_api import FINAL_STATUSES
    from sglang_coserve.client.output_files import errors_path

    status = job.status
    tokens = status.prompt_tokens + status.completion_tokens
    earlier = f" ({status.resumed} by an earlier run)" if status.resumed else ""
    lines = [
        f"{status.state.value}: {status.ok} ok, {status.failed} failed{earlier}",
        f"{tokens} tokens ({status.prompt_tokens} prompt, {status.completion_tokens} completion)"
        f" in {status.elapsed_s:.1f} s: {status.tokens_per_s:.1f} tokens/s",
        f"results: {output}",
    ]
    if status.failed:
        lines.append(f"errors: {errors_path(output)}")
        lines += _main_reason(job.errors)
    if status.state.value != "completed":
        if not status.is_local and status.batch_state not in (None, *FINAL_STATUSES):
            lines.append(f"the server goes on with it, unless: coserve cancel {status.batch_id}")
        if job.can_continue:
            lines.append("run the same command again to continue")
    return "\n".join(lines)


def _main_reason(errors: Path) -> list[str]:
    """Say what is most often wrong, by the first failed lines; nothing if that is unknown."""
    from sglang_coserve.client.output_files import decode_record

    reasons: Counter[str] = Counter()
    try:
        with errors.open("rb") as records:
            for record in islice(records, _READ_ERRORS):
                error = decode_record(record).error
                reasons[error.message if error else ""] += 1
    except (OSError, ValueError):  # Gone, or its end is not written yet.
        pass
    return [f"most often: {reason[:_REASON_CHARS]}" for reason, _ in reasons.most_common(1)]
