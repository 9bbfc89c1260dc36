"""Serves one line, with retries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from sglang_coserve.errors import ServerError
from sglang_coserve.lines.backend import LineBackend, LineRequest, LineResult
from sglang_coserve.lines.clock import Clock
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.retry import EngineHealth, LineRetries, RetryPolicy
from sglang_coserve.lines.worker_threads import WorkerThreads

_log = logging.getLogger(__name__)


async def serve_line(
    request: LineRequest,
    fresh_body: Callable[[], Awaitable[dict[str, Any]]],
    received: LineTokens,
    context: AttemptContext,
) -> tuple[LineResult, str]:
    """Return the engine's answer to ``request``, or its last failure, and the model used.

    An attempt continues from the tokens ``received`` in earlier attempts, also of an earlier run,
    if the model is the same. If the weights change while the line is served, it
    starts over, as an answer must be of one model. Each attempt gets its own body: the first that
    of ``request``, later ones a ``fresh_body``.

    Raises:
        StorageError: the line cannot be recorded as in the engine.
        ServerError: no line can be served any more.
    """
    backend, now_s = context.backend, asyncio.get_running_loop().time
    retries = LineRetries(request.line, context.retry_policy, context.health, context.rng)

    def take_tokens(tokens: Sequence[int]) -> None:
        if backend.model == received.model:
            received.add(request.line, tokens)

    is_first = True
    while True:
        result: LineResult | None = None
        await backend.settled()
        async with context.engine_lines.in_engine(request.batch_id, request.line) as limit:
            model = backend.model
            generated = received.tokens(request.line) if model == received.model else ()
            body, is_first = (request.body if is_first else await fresh_body()), False
            retries.began(now_s())
            try:
                result = await backend.run(
                    replace(request, body=body, generated=generated), take_tokens
                )
            except ServerError:
                raise
            except Exception as error:
                if not limit.expired():
                    # An unexpected error in the engine must fail only this line, not the job.
                    _log.exception("%s, line %d: the engine failed", request.batch_id, request.line)
                    result = _engine_failed(error)
        if result is None:
            continue  # It was taken out.
        if backend.model != model or (result.is_retryable and backend.is_changing):
            continue
        if not result.is_retryable:
            context.health.answered(now_s())
            return result, model
        delay_s = retries.failed(result, now_s())
        if delay_s is None:
            return result, model
        await context.clock.sleep(delay_s)
        context.health.num_retries += 1


def _engine_failed(error: Exception) -> LineResult:
    message = f"the engine failed: {error}"
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return LineResult(HTTPStatus.INTERNAL_SERVER_ERROR, "", body, is_retryable=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """What is needed to serve one line, with retries."""

    backend: LineBackend
    engine_lines: EngineLines
    clock: Clock

    rng: random.Random
    """Source of ids and of the jitter of retries."""

    retry_policy: RetryPolicy
    health: EngineHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class LineContext(AttemptContext):
    """Everything that a job needs to serve its lines, shared by all jobs."""

    slots: FairSlots
    threads: WorkerThreads

    flush_interval_s: float
    """Longest time that a result waits to be written together with others."""

    journal_interval_s: float
    """Interval of journal writes, i.e. the most generation time that a crash can lose."""
