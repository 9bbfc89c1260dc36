"""Runs the demo: model, server, both workloads, report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_coserve.client import AsyncCoserveClient, ClientOptions
from sglang_coserve.demo import report
from sglang_coserve.demo.replay import replay
from sglang_coserve.errors import ConfigError, WorkloadError
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.local_server import LocalServer
from sglang_coserve.metrics import RequestTimeline, SloTargets
from sglang_coserve.printable import printable
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.workload import TraceRequest, fit_to_context, read_trace, window

__all__ = ["DemoOptions", "run_demo"]

# Small enough for two CPU cores to serve both workloads.
_MODEL = SmallModelSpec(hidden=128, layers=2)
_CONCURRENCY = 64
# Positions of the context that SGLang keeps for itself, and a few to spare.
_RESERVED_TOKENS = 8
_DRAIN_S = 20.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run."""

    seconds: float
    """How long both workloads run; set-up and the last online answers come on top."""

    trace: Path
    offline: Path
    out: Path
    model: Path | None
    """A model of the user's; None makes a small random one."""

    targets: SloTargets
    server_flags: tuple[str, ...] = ()
    """Further flags for the server."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"--seconds must be positive, got {self.seconds}")


def run_demo(options: DemoOptions, console: Console) -> report.DemoResult:
    """Run the demo and write ``report.json`` and ``timeline.png`` into ``options.out``.

    Raises:
        CoserveError: the trace, the file or the server is at fault.
        KeyboardInterrupt: on SIGINT or SIGTERM, after the server has ended.
    """
    requests = list(window(read_trace(options.trace), 0, options.seconds))
    if not requests:
        raise WorkloadError(f"{options.trace}: no request in the first {options.seconds} s")
    options.out.mkdir(parents=True, exist_ok=True)
    with terminate_as_interrupt():
        model = options.model
        if model is None:
            model = options.out / "model"
            with console.status("making a small model"):
                make_small_model(model, _MODEL)
        context_tokens, vocab_size = _limits(model)
        requests, cut = fit_to_context(requests, context_tokens - _RESERVED_TOKENS)
        online = f"online: {options.trace.name}, first {options.seconds:g} s: {cut}"
        console.print(printable(online), markup=False)
        console.print(printable(f"offline: {options.offline}"), markup=False)
        result = asyncio.run(
            _serve_both(options, model, requests, vocab_size=vocab_size, console=console)
        )
    report.write_json(result, options.out / "report.json")
    report.plot(result, options.out / "timeline.png")
    return result


async def _serve_both(
    options: DemoOptions,
    model: Path,
    requests: list[TraceRequest],
    *,
    vocab_size: int,
    console: Console,
) -> report.DemoResult:
    flags = ["--model-path", str(model), "--log-level", "warning", *_slo_flags(options.targets)]
    server = LocalServer([*flags, *options.server_flags], log_path=options.out / "server.log")
    try:
        with console.status(f"starting the server (log: {options.out / 'server.log'})"):
            await asyncio.to_thread(server.start)
        results = options.out / "offline_results.jsonl"
        _remove_earlier(results)
        client_options = ClientOptions(concurrency=_CONCURRENCY)
        async with AsyncCoserveClient(server.base_url, options=client_options) as client:
            return await _measure(options, client, server, requests, vocab_size, results, console)
    finally:
        server.stop()


async def _measure(
    options: DemoOptions,
    client: AsyncCoserveClient,
    server: LocalServer,
    requests: list[TraceRequest],
    vocab_size: int,
    results: Path,
    console: Console,
) -> report.DemoResult:
    start = time.perf_counter()
    job = await client.submit_jsonl(options.offline, results)
    answered: list[RequestTimeline] = []
    online = asyncio.create_task(
        replay(
            server.base_url,
            requests,
            vocab_size=vocab_size,
            drain_s=_DRAIN_S,
            on_finished=answered.append,
        )
    )
    finished_at: list[tuple[float, int]] = []
    with _progress(console) as progress:
        bar = progress.add_task("", total=options.seconds)
        while (elapsed_s := time.perf_counter() - start) < options.seconds:
            status = job.status
            tokens = status.prompt_tokens + status.completion_tokens
            if not finished_at or tokens > finished_at[-1][1]:
                finished_at.append((elapsed_s, tokens))
            progress.update(
                bar,
                completed=elapsed_s,
                description=f"online {len(answered)}/{len(requests)}, "
                f"offline {status.ok} ok, {status.failed} failed",
            )
            if online.done() and not job.is_running:
                break
            await asyncio.sleep(_POLL_S)
    is_complete = not job.is_running
    job.cancel()
    await job.ended()
    status = job.status
    if is_complete:
        await job.wait()  # Raises what ended it early, if anything did.
    timelines = await online
    return report.DemoResult(
        online=timelines,
        offline=report.OfflineResult(
            ok=status.ok,
            failed=status.failed,
            prompt_tokens=status.prompt_tokens,
            completion_tokens=status.completion_tokens,
            elapsed_s=status.elapsed_s,
            is_complete=is_complete,
            finished_at=finished_at,
        ),
        targets=options.targets,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )


def _limits(model: Path) -> tuple[int, int]:
    """Return the context length and the vocabulary size in the model's config.json."""
    config = json.loads((model / "config.json").read_text())
    return int(config["max_position_embeddings"]), int(config["vocab_size"])


def _slo_flags(targets: SloTargets) -> Iterator[str]:
    for flag, target_s in (("--slo-ttft-ms", targets.ttft_s), ("--slo-tpot-ms", targets.tpot_s)):
        if target_s is not None:
            yield from (flag, f"{target_s * 1e3:g}")


def _remove_earlier(results: Path) -> None:
    """Start the offline file anew: the client would continue an earlier demo's."""
    for path in islice(results.parent.glob(f"{results.stem}*"), 10):
        path.unlink()
