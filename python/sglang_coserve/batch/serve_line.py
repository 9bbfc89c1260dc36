"""Takes one line through the engine, as often as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sglang_coserve.batch.backend import LineRequest, LineResult
from sglang_coserve.batch.context import BatchContext
from sglang_coserve.batch.journal import TokenJournal
from sglang_coserve.batch.retry import RetryPolicy

__all__ = ["serve_line"]

_log = logging.getLogger(__name__)


async def serve_line(
    request: LineRequest, journal: TokenJournal, policy: RetryPolicy, context: BatchContext
) -> tuple[LineResult, str]:
    """Return the engine's answer to ``request``, or its last failure, and the model it is of.

    An attempt continues from the tokens of those before it, of an earlier run too, if they
    are of the same model. When the engine gets other weights while it serves the line, it
    starts over: an answer is of one model.

    Raises:
        StorageError: it cannot be noted that the engine has the line.
    """
    backend = context.backend
    if request.body.get("stream"):
        message = "a batch line cannot stream: remove stream from its body"
        return _error(400, message), backend.model

    def journal_tokens(tokens: Sequence[int]) -> None:
        if backend.model == journal.model:
            journal.add(request.line, tokens)

    failures = 0
    while True:
        await backend.settled()
        async with context.engine_lines.in_engine(request.batch_id, request.line) as limit:
            model = backend.model
            generated = journal.tokens(request.line) if model == journal.model else ()
            try:
                async with limit:
                    result = await backend.run(
                        replace(request, generated=generated), journal_tokens
                    )
            except Exception as error:
                if limit.expired():
                    continue
                # Whatever goes wrong in an engine is one line's misfortune, not the batch's.
                _log.exception(
                    "batch %s, line %d: the engine failed", request.batch_id, request.line
                )
                result = _error(500, f"the engine failed: {error}", is_retryable=True)
        if backend.model != model or (result.is_retryable and backend.is_changing):
            continue
        if not result.is_retryable:
            return result, model
        failures += 1
        delay_s = policy.delay_s(failures, context.rng)
        if delay_s is None:
            return result, model
        await context.clock.sleep(delay_s)
        context.counts.line_retries += 1


def _error(status_code: int, message: str, *, is_retryable: bool = False) -> LineResult:
    kind = "server_error" if status_code >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return LineResult(status_code, "", body, is_retryable)
