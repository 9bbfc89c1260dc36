"""When to try a line again, when to give the line up, and when to give the server up.

Pure decisions: the clock and the random numbers come from outside.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import Enum

from sglang_coserve.client.batch_result import Response
from sglang_coserve.errors import ServerGoneError

__all__ = ["Failure", "FailureKind", "LineRetries", "RetryPolicy", "ServerHealth", "retry_after_s"]


class FailureKind(Enum):
    """How an attempt failed, by what it says about the server and about the line."""

    UNREACHABLE = "unreachable"
    """No connection was made: says nothing about the line."""

    UNAVAILABLE = "unavailable"
    """The server, or a proxy before it, takes no work now: 429, 502, 503, 504."""

    LOST = "lost"
    """The connection broke while the server had the line."""

    TIMED_OUT = "timed_out"
    """The server had the line for longer than the request timeout."""

    FAILED = "failed"
    """The server tried this line and failed: any other 5xx, or an abort."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    kind: FailureKind
    code: str
    """Goes into the error record, should this be the last attempt."""

    reason: str
    retry_after_s: float | None = None
    """How long the server asked to be left alone."""

    response: Response | None = None
    """What the server said, when it said something."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The bounds of every retry."""

    retry_for_s: float = 300.0
    """Give the server up when it has answered no line for this long."""

    max_attempts: int = 5
    """Give a line up after this many failures that are its own."""

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0


class ServerHealth:
    """What all lines together know of the server."""

    def __init__(self, now_s: float) -> None:
        self.last_answer_s = now_s
        self.num_answers = 0
        self.trouble: str | None = None
        """The last failure, until the next answer."""

    def answered(self, now_s: float) -> None:
        """Note that the server finished with some line, well or badly."""
        self.last_answer_s = now_s
        self.num_answers += 1
        self.trouble = None


class LineRetries:
    """The retries of one line: exponential backoff with jitter.

    A failure is the line's own when the server says so (5xx), or when it was
    lost or timed out and other lines were answered since it failed before: one
    bad line must not stop the rest. Otherwise the server is to blame, and the
    line is retried until nothing at all has been answered for ``retry_for_s``.
    """

    def __init__(
        self, line: int, policy: RetryPolicy, server: ServerHealth, rng: random.Random
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
        """Note that an attempt starts."""
        self._attempt_began_s = now_s

    def failed(self, failure: Failure, now_s: float) -> float | None:
        """Return how long to wait before the next attempt, or None to give the line up.

        Raises:
            ServerGoneError: the server has answered nothing for ``retry_for_s``.
        """
        others_answered = self._server.num_answers > self._answers_before
        self._answers_before = self._server.num_answers
        if failure.kind is FailureKind.FAILED:
            self._server.answered(now_s)
            self._own_failures += 1
        elif others_answered and failure.kind in (FailureKind.LOST, FailureKind.TIMED_OUT):
            self._own_failures += 1
        if self._own_failures >= self._policy.max_attempts:
            return None
        self._server.trouble = failure.reason
        return self._delay_s(failure, self._time_left_s(failure, now_s))

    def _time_left_s(self, failure: Failure, now_s: float) -> float:
        retry_for_s = self._policy.retry_for_s
        # A server that kept the line for this long was there: the outage starts now.
        was_held = failure.kind is FailureKind.LOST and now_s - self._attempt_began_s >= retry_for_s
        if self._failing_since_s is None or was_held:
            self._failing_since_s = now_s
        # Lines that are being served do not prove an outage, only lines that fail do.
        outage_since_s = max(self._failing_since_s, self._server.last_answer_s)
        left_s = outage_since_s + retry_for_s - now_s
        if left_s <= 0:
            raise ServerGoneError(
                f"the server has answered nothing for {retry_for_s:g} s"
                f" (line {self._line}: {failure.reason})"
            )
        return left_s

    def _delay_s(self, failure: Failure, left_s: float) -> float:
        policy = self._policy
        # The exponent is capped because a float overflows long before patience does.
        backoff_s = policy.first_delay_s * 2.0 ** min(self._num_retries, 30)
        delay_s = min(policy.max_delay_s, backoff_s) * self._rng.uniform(0.5, 1.0)
        self._num_retries += 1
        if failure.retry_after_s is not None:
            delay_s = failure.retry_after_s + delay_s
        return min(delay_s, left_s)


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Return the seconds a ``Retry-After`` header asks for (RFC 9110 §10.2.3).

    Takes both forms, seconds and a date; None for no header or one that is neither.
    ``now`` is aware of its time zone.
    """
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    if when.tzinfo is None:
        return None
    return max(0.0, (when - now).total_seconds())
