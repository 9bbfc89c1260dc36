"""Serves one line: when it is tried again, and when it or the server is given up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from msgspec.structs import replace

from sglang_coserve.errors import ServerError, ServerGoneError
from sglang_coserve.lines.backend import FailureKind, LineBackend, LineRequest, LineResult
from sglang_coserve.lines.background import Clock, WorkerThreads, backoff_s
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.fair_slots import FairSlots, JobShare
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.result_record import error_message
from sglang_coserve.told_faults import without_directories


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits and delays of retries."""

    retry_for_s: float = 300.0
    """Give up the server when it has answered no line for this long; infinity for never."""

    max_attempts: int = 5
    """Give up a line after this many failures for which it is to blame."""

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0


class EngineHealth:
    """The state of the server, as observed by all lines together."""

    def __init__(self) -> None:
        self.last_answer_s = -math.inf
        self.num_answers = 0
        self.num_retries = 0
        """Number of repeated attempts after failures."""

        self.last_failure: str | None = None
        """Reason of the last failure; None once a line has been answered since."""

    def answered(self, now_s: float) -> None:
        """Record that the server has answered some line, with success or an error."""
        self.last_answer_s = now_s
        self.num_answers += 1
        self.last_failure = None


class LineRetries:
    """The retries of one line: exponential backoff with jitter.

    The line is to blame for a failure if the server says so (5xx), or if it was
    lost or timed out while other lines were answered since its previous failure: one
    bad line must not stop the others. Otherwise the server is to blame, and the
    line is retried until no line has been answered for ``retry_for_s``.
    """

    def __init__(
        self, line: int, policy: RetryPolicy, server: EngineHealth, rng: random.Random
    ) -> None:
        self._line = line
        self._policy = policy
        self._server = server
        self._rng = rng
        self._num_retries = 0
        self._own_failures = 0
        self._failing_since_s: float | None = None
        self._attempt_began_s = 0.0
        self._answers_before = server.num_answers

    def began(self, now_s: float) -> None:
        """Record that an attempt begins."""
        self._attempt_began_s = now_s

    def failed(self, result: LineResult, now_s: float) -> float | None:
        """Return the wait in seconds before the next attempt, or None to give up the line.

        ``result`` must be retryable.

        Raises:
            ServerGoneError: the server has answered nothing for ``retry_for_s``.
        """
        others_answered = self._server.num_answers > self._answers_before
        self._answers_before = self._server.num_answers
        reason = error_message(result.body)
        if result.status_code:
            reason = f"HTTP {result.status_code}: {reason}"
        if result.kind is FailureKind.FAILED:
            self._server.answered(now_s)
            self._own_failures += 1
        elif others_answered and result.kind in (FailureKind.LOST, FailureKind.TIMED_OUT):
            self._own_failures += 1
        if self._own_failures >= self._policy.max_attempts:
            return None
        self._server.last_failure = reason
        left_s = self._time_left_s(result.kind, reason, now_s)
        self._num_retries += 1
        policy = self._policy
        pause_s = backoff_s(self._num_retries, policy.first_delay_s, policy.max_delay_s, self._rng)
        return min(result.retry_after_s + pause_s, left_s)

    def _time_left_s(self, kind: FailureKind, reason: str, now_s: float) -> float:
        retry_for_s = self._policy.retry_for_s
        # A server that held the line for this long was up: the outage starts now.
        was_held = kind is FailureKind.LOST and now_s - self._attempt_began_s >= retry_for_s
        if self._failing_since_s is None or was_held:
            self._failing_since_s = now_s
        # Count the outage from the first failure, as lines still in service do not prove one.
        outage_since_s = max(self._failing_since_s, self._server.last_answer_s)
        left_s = outage_since_s + retry_for_s - now_s
        if left_s <= 0:
            raise ServerGoneError(
                f"the server has answered nothing for {retry_for_s:g} s"
                f" (line {self._line}: {reason})"
            )
        return left_s


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Return the seconds in a ``Retry-After`` header (RFC 9110 §10.2.3).

    Accepts both forms, seconds and a date; None without a header or if it is neither.
    ``now`` must have a time zone.
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        return None
    return max(0.0, (when - now).total_seconds())


_log = logging.getLogger(__name__)


async def serve_line(
    request: LineRequest,
    fresh_body: Callable[[], Awaitable[dict[str, Any]]],
    received: LineTokens,
    context: AttemptContext,
    share: JobShare | None = None,
) -> tuple[LineResult, str]:
    """Return the engine's answer to ``request``, or its last failure, and the model used.

    An attempt continues from the tokens ``received`` in earlier attempts, also of an earlier run,
    if the model is the same. If the weights change while the line is served, the line starts over,
    as an answer must be of one model. Each attempt gets its own body: the first attempt the body of
    ``request``, each later attempt a ``fresh_body``. ``share`` counts where the line waits.

    Raises:
        StorageError: the line cannot be recorded as in the engine.
        ServerError: no line can be served any more.
    """
    backend, now_s = context.backend, asyncio.get_running_loop().time
    retries = LineRetries(request.line, context.retry_policy, context.health, context.rng)
    model, share = "", share or JobShare("", 0, math.inf)

    def take_tokens(tokens: Sequence[int]) -> None:
        # An attempt that has ended may still tell of tokens, which are of its own model.
        if model == backend.model == received.model:
            received.add(request.line, tokens)

    is_first = True
    while True:
        result: LineResult | None = None
        with share.waiting("model"):
            await backend.settled()
        async with context.engine_lines.in_engine(request.batch_id, request.line, share) as limit:
            model = backend.model
            generated = received.tokens(request.line) if model == received.model else ()
            body, is_first = (request.body if is_first else await fresh_body()), False
            retries.began(now_s())
            try:
                with share.in_engine():
                    result = await backend.run(
                        replace(request, body=body, generated=generated), take_tokens
                    )
            except ServerError:
                raise
            except Exception as error:
                if not limit.expired():
                    # An unexpected error in the engine must fail only this line, not the job.
                    _log.exception("%s, line %d: the engine failed", request.batch_id, request.line)
                    message = f"the engine failed: {without_directories(str(error))}"
                    result = LineResult.refused(500, message)
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
        with share.waiting("engine"):
            await context.clock.sleep(delay_s)
        context.health.num_retries += 1


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
