"""Takes one line through the engine, as often as it takes."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial

from sglang_coserve.batch.backend import Backend, LineRequest, LineResult
from sglang_coserve.batch.clock import Clock
from sglang_coserve.batch.journal import TokenJournal
from sglang_coserve.batch.retry import RetryPolicy

__all__ = ["serve_line"]

_log = logging.getLogger(__name__)


async def serve_line(
    backend: Backend,
    request: LineRequest,
    journal: TokenJournal,
    policy: RetryPolicy,
    clock: Clock,
    rng: random.Random,
) -> LineResult:
    """Return the engine's answer to ``request``, or its last failure.

    An attempt continues from the tokens of those before it, of an earlier run too.
    """
    if request.body.get("stream"):
        return _error(400, "a batch line cannot stream: remove stream from its body")
    failures = 0
    while True:
        request = replace(request, generated=journal.tokens(request.line))
        try:
            result = await backend.run(request, partial(journal.add, request.line))
        except Exception as error:
            # Whatever goes wrong in an engine is one line's misfortune, not the batch's.
            _log.exception("batch %s, line %d: the engine failed", request.batch_id, request.line)
            result = _error(500, f"the engine failed: {error}", is_retryable=True)
        if not result.is_retryable:
            return result
        failures += 1
        delay_s = policy.delay_s(failures, rng)
        if delay_s is None:
            return result
        await clock.sleep(delay_s)


def _error(status_code: int, message: str, *, is_retryable: bool = False) -> LineResult:
    kind = "server_error" if status_code >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return LineResult(status_code, "", body, is_retryable)
