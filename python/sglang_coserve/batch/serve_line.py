"""Takes one line through the engine, as often as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sglang_coserve.batch.backend import LineRequest, LineResult
from sglang_coserve.batch.context import BatchContext
from sglang_coserve.batch.journal import TokenJournal
from sglang_coserve.batch.retry import RetryPolicy

__all__ = ["serve_line"]

_log = logging.getLogger(__name__)


async def serve_line(
    request: LineRequest, journal: TokenJournal, policy: RetryPolicy, context: BatchContext
) -> LineResult:
    """Return the engine's answer to ``request``, or its last failure.

    An attempt continues from the tokens of those before it, of an earlier run too. When
    the engine has got other weights since the journal was opened, it starts over, and
    what it generates is not journaled.
    """
    if request.body.get("stream"):
        return _error(400, "a batch line cannot stream: remove stream from its body")
    failures = 0
    while True:
        is_same_model = context.backend.model == journal.model
        generated = journal.tokens(request.line) if is_same_model else ()
        on_tokens = partial(journal.add, request.line) if is_same_model else _ignore
        try:
            result = await context.backend.run(replace(request, generated=generated), on_tokens)
        except Exception as error:
            # Whatever goes wrong in an engine is one line's misfortune, not the batch's.
            _log.exception("batch %s, line %d: the engine failed", request.batch_id, request.line)
            result = _error(500, f"the engine failed: {error}", is_retryable=True)
        if not result.is_retryable:
            return result
        failures += 1
        delay_s = policy.delay_s(failures, context.rng)
        if delay_s is None:
            return result
        await context.clock.sleep(delay_s)
        context.counts.line_retries += 1


def _ignore(_token_ids: Sequence[int]) -> None:
    pass


def _error(status_code: int, message: str, *, is_retryable: bool = False) -> LineResult:
    kind = "server_error" if status_code >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return LineResult(status_code, "", body, is_retryable)
