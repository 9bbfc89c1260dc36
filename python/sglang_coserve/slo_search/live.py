"""Runs on a real local server: online requests are streamed, offline ones sent as a batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sglang_coserve.client import AsyncCoserveClient, AsyncJob, ClientOptions
from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.extras import require
from sglang_coserve.local_server import LocalServer
from sglang_coserve.metrics import LatencyReport, Outcome, latency_report
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.slo_search.machine import EngineMachine
from sglang_coserve.slo_search.measurement import SearchRun
from sglang_coserve.slo_search.progress import SearchProgress
from sglang_coserve.streamed_load import StreamedLoad, replayed
from sglang_coserve.workload import TraceRequest

__all__ = ["LiveBench"]

_READY_TIMEOUT_S: Final = 1800.0
_STEADY_S: Final = 5.0
_STEADY_TIMEOUT_S: Final = 300.0
_DRAIN_S: Final = 60.0
_POLL_S: Final = 0.1
_WARMUP_REQUESTS: Final = 4
_WARMUP_INDEX: Final = 1 << 40
"""First index of warm-up requests, so that the measured prompts are not in the prefix cache."""


@dataclass(frozen=True, slots=True)
class LiveBench:
    """Starts servers, one at a time, and measures them."""

    flags: Sequence[str]
    """Flags of every server: the model and the user's flags for SGLang."""

    vocab_size: int
    logs: Path
    """A folder for the servers' logs and the offline results."""

    progress: SearchProgress

    @classmethod
    def of(
        cls, model_path: str, flags: Sequence[str], logs: Path, progress: SearchProgress
    ) -> LiveBench:
        """Return a bench for a model, given by folder or hub name.

        Raises:
            ConfigError: there is no such model.
            MissingExtraError: the engine is not installed.
        """
        require("engine", "a server to measure")
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model_path).get_text_config()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model-path {model_path}: no model to serve: {error}") from error
        return cls(flags, int(config.vocab_size), logs, progress)

    @contextmanager
    def serving(self, name: str, *more_flags: str) -> Iterator[str]:
        """Run a server, with a log named ``name``, and yield its address.

        Raises:
            StartupError: it does not start; the message has the end of its log.
        """
        self.progress.begin(f"{name}: starting the server")
        server = LocalServer(
            ["--log-level", "warning", *self.flags, *more_flags],
            log_path=self.logs / f"{name}.log",
            ready_timeout_s=_READY_TIMEOUT_S,
        )
        with server:
            yield server.base_url

    def machine(self, base_url: str) -> EngineMachine:
        """Read the limits of a server.

        Raises:
            ServerError: the server does not report them.
        """
        return EngineMachine.at(base_url)

    def measure(
        self, name: str, base_url: str, load: SearchLoad, offline_file: Path | None = None
    ) -> SearchRun:
        """Send the online requests, together with a batch file if given, and measure them.

        Raises:
            ServerError: the server fails to serve the requests.
        """
        return asyncio.run(self._measure(name, base_url, load, offline_file))

    async def _measure(
        self, name: str, base_url: str, load: SearchLoad, offline_file: Path | None
    ) -> SearchRun:
        self.progress.begin(f"{name}: warming up")
        warmup = [
            replace(request, index=request.index + _WARMUP_INDEX, arrival_s=0.0)
            for request in load.online[:_WARMUP_REQUESTS]
        ]
        async with self._online(base_url, warmup) as online:
            await online.finished()
        online = self._online(base_url, load.online)
        if offline_file is None:
            async with online:
                await self._wait(name, online, load.seconds)
                await online.finished()
            return SearchRun(_latencies(online))
        options = ClientOptions(concurrency=load.offline_concurrency)
        async with AsyncCoserveClient(base_url, options=options) as client:
            results = self.logs / f"{name}.results.jsonl"
            results.unlink(missing_ok=True)
            job = await client.submit_jsonl(offline_file, results)
            await _until_steady(job)
            before = job.status
            async with online:
                await self._wait(name, online, load.seconds)
                after, ran_out = job.status, not job.is_running
                if ran_out:
                    await job.wait()  # Raises if the job failed.
                await online.finished()
        tokens = after.prompt_tokens + after.completion_tokens
        tokens -= before.prompt_tokens + before.completion_tokens
        return SearchRun(
            _latencies(online),
            offline_tokens_per_s=tokens / load.seconds,
            offline_requests_per_s=(after.ok - before.ok) / load.seconds,
            offline_ran_out=ran_out,
        )

    def _online(self, base_url: str, requests: Sequence[TraceRequest]) -> StreamedLoad:
        return StreamedLoad(
            base_url,
            replayed(requests, vocab_size=self.vocab_size),
            arrivals_s=[request.arrival_s for request in requests],
            drain_s=_DRAIN_S,
        )

    async def _wait(self, name: str, online: StreamedLoad, seconds: float) -> None:
        """Wait until the end of the time in which offline tokens are counted."""
        self.progress.begin(f"{name}: measuring", seconds)
        while (elapsed_s := time.perf_counter() - online.began_s) < seconds:
            self.progress.tick(elapsed_s)
            await asyncio.sleep(min(_POLL_S, seconds - elapsed_s))


async def _until_steady(job: AsyncJob) -> None:
    """Wait until offline requests end as well as start, so that their rate is steady."""
    start_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < _STEADY_TIMEOUT_S:
        if elapsed_s >= _STEADY_S and job.status.ok:
            return
        if not job.is_running:
            await job.wait()  # Raises if the job failed.
            break
        await asyncio.sleep(_POLL_S)
    raise ServerError(f"the server finished no offline request; failed ones are in {job.errors}")


def _latencies(online: StreamedLoad) -> LatencyReport:
    timelines = online.timelines()
    if all(timeline.outcome is Outcome.FAILED for timeline in timelines):
        raise ServerError("the server refused every online request; see its log")
    return latency_report(timelines)
