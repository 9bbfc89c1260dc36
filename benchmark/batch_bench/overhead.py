"""What the Batch API costs the offline throughput of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from batch_bench.setting import Setting
from common.failures import RunFailedError
from common.figures import Figure
from common.input_file import COMPLETIONS, write_lines
from common.own_process import OwnProcess
from sglang_coserve.batch import (
    BatchLimits,
    BatchService,
    CreateBatch,
    LineRequest,
    LineResult,
    owner_of,
)

if TYPE_CHECKING:
    pass

__all__ = ["measure"]

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32
_TARGET_PERCENT: Final = 5.0
_NEVER_TOKENS: Final = 1 << 20
"""Longer than any answer: the tokens of a bare feed are told of once, at the end."""

FEED, API = "feed", "api"
_OWNER: Final = owner_of(None)
_LIMITS: Final = BatchLimits()


def measure(setting: Setting) -> list[Figure]:
    """Serve the same lines with the Batch API and with a bare feed, in turn, on one engine.

    Both are in the engine's process, so there is no HTTP in either.

    Raises:
        RunFailedError: the engine's process failed.
    """
    options = setting.options
    path = setting.work / "overhead.jsonl"
    write_lines(
        path,
        options.overhead_lines,
        vocab_size=setting.model.vocab_size,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=_OUTPUT_TOKENS,
        seed=options.seed,
    )
    seconds: dict[str, list[float]] = {FEED: [], API: []}
    try:
        with OwnProcess(Lines, setting.model.path, path, setting.work / "overhead") as lines:
            for repeat in setting.track(options.repeats, f"{options.overhead_lines:,} lines"):
                # Who comes first alternates, so that a slow change of the machine favours neither.
                for kind in (FEED, API) if repeat % 2 == 0 else (API, FEED):
                    seconds[kind].append(lines.call("seconds", kind))
    except SystemExit as error:
        raise RunFailedError(str(error)) from None
    tokens = options.overhead_lines * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
    pairs = zip(seconds[FEED], seconds[API], strict=True)
    percents = tuple(100 * (1 - feed / api) for feed, api in pairs)
    rates = {kind: tuple(tokens / s for s in found) for kind, found in seconds.items()}
    return [
        Figure("offline throughput, bare feed", "tokens/s", rates[FEED]),
        Figure("offline throughput, Batch API", "tokens/s", rates[API]),
        Figure("throughput lost to the Batch API", "%", percents, at_most=_TARGET_PERCENT),
    ]


class Lines:
    """An engine that serves the lines of a file; for ``OwnProcess``."""

    def __init__(self, model: str, path: Path, directory: Path) -> None:
        from sglang_coserve.srt.cpu import defaults as cpu

        if not cpu.has_cuda():
            cpu.set_environment_defaults()  # SGLang reads these when it is imported.
        from sglang_coserve.config import CoserveConfig
        from sglang_coserve.srt.batch_backend import BatchBackend
        from sglang_coserve.srt.engine import CoserveEngine

        self._path = path
        self._engine: Any = CoserveEngine(
            model_path=model,
            coserve_config=CoserveConfig(offline_policy="fifo"),
            log_level="warning",
        )
        managers = (self._engine.tokenizer_manager, self._engine.template_manager)
        self._bare = BatchBackend(*managers, fingerprint="", stream_interval_tokens=_NEVER_TOKENS)
        self._timed = BatchBackend(*managers, fingerprint="")
        self._began_s: list[float] = []
        self._time_first_line()
        self._stack = AsyncExitStack()
        opened = BatchService.open(directory, self._timed, _LIMITS, record_events=True)
        self._service: BatchService = self._run(self._entered(opened))
        for kind in (FEED, API):  # The first ones find a cold engine.
            self.seconds(kind)

    def close(self) -> None:
        """End the engine."""
        self._run(self._stack.aclose())
        self._engine.shutdown()

    def seconds(self, kind: str) -> float:
        """Serve every line once; return the seconds from the first line in the engine to the end.

        The end is the last answer, or the batch's being completed, with every record on the disk.
        """
        # Or the second one would find its prompts in the prefix cache.
        self._run(self._engine.tokenizer_manager.flush_cache(timeout_s=60))
        return float(self._run(self._feed() if kind == FEED else self._serve_batch()))

    def _run(self, work: Any) -> Any:
        return self._engine.loop.run_until_complete(work)

    async def _entered(self, opened: Any) -> Any:
        return await self._stack.enter_async_context(await opened)

    def _time_first_line(self) -> None:
        """Note when the engine gets the first line of a batch."""
        run = self._timed.run

        async def timed(
            request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
        ) -> LineResult:
            if not self._began_s:
                self._began_s.append(time.perf_counter())
            return await run(request, on_tokens)

        self._timed.run = timed  # type: ignore[method-assign]

    async def _feed(self) -> float:
        places = asyncio.Semaphore(_LIMITS.max_in_flight)

        async def serve(request: LineRequest) -> None:
            async with places:
                result = await self._bare.run(request, lambda _: None)
            assert result.status_code == 200, result.body

        requests = list(line_requests(self._path))
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(serve(request))
        return time.perf_counter() - began_s

    async def _serve_batch(self) -> float:
        service, path = self._service, self._path
        file = await service.create_file(_OWNER, path.name, "batch", contents(path))
        request = CreateBatch(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        self._began_s.clear()
        batch = await service.create_batch(_OWNER, request)
        await service.event_added()
        seconds = time.perf_counter() - self._began_s[0]
        done = await service.retrieve_batch(_OWNER, batch.id)
        assert done.status == "completed" and not done.request_counts.failed, done
        for event in await service.pending_events():
            await service.settle_event(event.id)
        return seconds


def line_requests(path: Path) -> list[LineRequest]:
    """Return the lines as the Batch API gives them to a backend."""
    deadline_s = time.time() + 86_400
    return [
        LineRequest(
            batch_id="batch_feed",
            line=number,
            endpoint=COMPLETIONS,
            body=orjson.loads(line)["body"],
            generated=(),
            deadline_s=deadline_s,
        )
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
    ]


async def contents(path: Path) -> AsyncIterator[bytes]:
    """Yield the file."""
    yield path.read_bytes()
