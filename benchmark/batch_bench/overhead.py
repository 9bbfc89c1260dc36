"""What the Batch API costs the offline throughput of an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
    BackendLoad,
    BatchLimits,
    BatchService,
    CreateBatch,
    LineRequest,
    LineResult,
    owner_of,
)

if TYPE_CHECKING:
    from sglang_coserve.srt.batch_backend import BatchBackend

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
        self._timed = TimedBackend(BatchBackend(*managers, fingerprint=""))
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
        self._timed.reset()
        batch = await service.create_batch(_OWNER, request)
        await service.event_added()
        seconds = self._timed.elapsed_s()
        done = await service.retrieve_batch(_OWNER, batch.id)
        assert done.status == "completed" and not done.request_counts.failed, done
        for event in await service.pending_events():
            await service.settle_event(event.id)
        return seconds


class TimedBackend:
    """A backend that notes when it gets the first line after ``reset``."""

    def __init__(self, inner: BatchBackend) -> None:
        self._inner = inner
        self._began_s: float | None = None
        self.model, self.endpoints, self.limits = inner.model, inner.endpoints, inner.limits

    is_changing = False

    def when_changing(self, take_out: Callable[[], None]) -> None:
        """See ``Backend.when_changing``."""

    async def settled(self) -> None:
        """See ``Backend.settled``."""

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend.run``."""
        if self._began_s is None:
            self._began_s = time.perf_counter()
        return await self._inner.run(request, on_tokens)

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """See ``Backend.online_delays_s``."""
        return await self._inner.online_delays_s()

    def hand_back(self, request: LineRequest) -> bool:
        """See ``Backend.hand_back``."""
        return self._inner.hand_back(request)

    def prompt_tokens(self, request: LineRequest) -> int | None:
        """See ``Backend.prompt_tokens``."""
        return self._inner.prompt_tokens(request)

    def load(self) -> BackendLoad:
        """See ``Backend.load``."""
        return self._inner.load()

    def reset(self) -> None:
        """Wait for the first line anew."""
        self._began_s = None

    def elapsed_s(self) -> float:
        """Return the seconds since the first line."""
        assert self._began_s is not None, "no line has come"
        return time.perf_counter() - self._began_s


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
