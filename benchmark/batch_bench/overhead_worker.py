"""An engine that serves the lines of a file, with the Batch API or without.

``python -m batch_bench.overhead_worker MODEL FILE DIRECTORY`` answers ``{}`` when it is
ready. For each line ``feed`` or ``api`` on stdin it serves the file once and answers with
the ``seconds`` from the first line in the engine to the end: the last answer, or the
batch's being completed, with every record on the disk. It ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from batch_bench.input_file import COMPLETIONS
from sglang_coserve.batch import (
    BackendLoad,
    BatchLimits,
    BatchService,
    CreateBatch,
    LineRequest,
    LineResult,
    owner_of,
)
from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt.batch_backend import BatchBackend
from sglang_coserve.srt.engine import CoserveEngine

_OWNER: Final = owner_of(None)
_LIMITS: Final = BatchLimits()
_NEVER_TOKENS: Final = 1 << 20
"""Longer than any answer: the tokens of a bare feed are told of once, at the end."""


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


async def feed(backend: BatchBackend, path: Path) -> float:
    """Serve every line and drop what it answers; return the seconds."""
    places = asyncio.Semaphore(_LIMITS.max_in_flight)

    async def serve(request: LineRequest) -> None:
        async with places:
            result = await backend.run(request, lambda _: None)
        assert result.status_code == 200, result.body

    requests = list(line_requests(path))
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(serve(request))
    return time.perf_counter() - began_s


async def serve_batch(service: BatchService, backend: TimedBackend, path: Path) -> float:
    """Serve the file as a batch; return the seconds."""
    file = await service.create_file(_OWNER, path.name, "batch", contents(path))
    request = CreateBatch(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    backend.reset()
    batch = await service.create_batch(_OWNER, request)
    await service.event_added()
    seconds = backend.elapsed_s()
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


async def answer_orders(engine: Any, path: Path, directory: Path, say: Callable[..., None]) -> None:
    """Serve as often as stdin says."""
    managers = (engine.tokenizer_manager, engine.template_manager)
    bare = BatchBackend(*managers, fingerprint="", stream_interval_tokens=_NEVER_TOKENS)
    timed = TimedBackend(BatchBackend(*managers, fingerprint=""))
    async with await BatchService.open(directory, timed, _LIMITS, record_events=True) as service:
        serve = {
            "feed": lambda: feed(bare, path),
            "api": lambda: serve_batch(service, timed, path),
        }
        for kind in serve:  # The first ones find a cold engine.
            await serve[kind]()
        say()
        while order := await asyncio.to_thread(sys.stdin.readline):
            # Or the second one would find its prompts in the prefix cache.
            await engine.tokenizer_manager.flush_cache(timeout_s=60)
            say(seconds=await serve[order.strip()]())


def main() -> None:
    """Start the engine and answer."""
    # SGLang prints to stdout: give it stderr, which is the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model, path, directory = sys.argv[1:]
    engine = CoserveEngine(
        model_path=model, coserve_config=CoserveConfig(offline_policy="fifo"), log_level="warning"
    )
    try:
        engine.loop.run_until_complete(
            answer_orders(
                engine,
                Path(path),
                Path(directory),
                lambda **fields: print(json.dumps(fields), file=answers),
            )
        )
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
