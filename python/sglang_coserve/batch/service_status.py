"""The load of the Batch API, in a few numbers for an operator.

The rate of offline tokens is what online requests leave. The accepted batches need a part of it to
finish within their windows; the rest is the headroom.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sglang_coserve.batch.job_forecast import remaining_tokens
from sglang_coserve.batch.record import JobRecord, Status
from sglang_coserve.lines.fair_slots import FairSlots

__all__ = [
    "EXPORTED_STATES",
    "Headroom",
    "ServiceStatus",
    "TokenRate",
    "headroom",
    "required_tokens_per_s",
    "service_status",
]

_LEARNING_S: Final = 10.0
_TOGETHER_S: Final = 0.1
"""Tokens that come within it are remembered as one number, so that memory does not grow with the
rate: 2,000 lines a second took some 40 MiB."""


class TokenRate:
    """A moving mean over the last ``window_s``, to 0.1 s, in which anything was in flight.

    Time without work does not count, so the rate after a pause is that before it.
    ``clock`` is monotonic, in seconds. ``expected_per_s`` stands in for what is
    missing of the first ten seconds with work: a prompt counts only when its line ends.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        window_s: float = 60.0,
        expected_per_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self._expected_per_s = expected_per_s
        self._in_flight = 0
        self._last_s = clock()
        self._busy_s = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self.total_tokens = 0
        """Since the start."""

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count the time within it as time with work."""
        self._advance()
        self._in_flight += 1
        try:
            yield
        finally:
            self._advance()
            self._in_flight -= 1

    @property
    def num_in_flight(self) -> int:
        """How many are within ``in_flight``."""
        return self._in_flight

    def add(self, tokens: int) -> None:
        """Count tokens that work in flight took. O(1) amortised."""
        self._advance()
        since_s, together = self._recent[-1] if self._recent else (-math.inf, 0)
        if self._busy_s - since_s < _TOGETHER_S:
            self._recent[-1] = (since_s, together + tokens)
        else:
            self._recent.append((self._busy_s, tokens))
        self._tokens += tokens
        self.total_tokens += tokens

    def per_s(self) -> float | None:
        """Return the mean; before the first tokens what is expected, None if nothing is."""
        self._advance()
        observed_s = min(self._busy_s, self._window_s)
        if self._expected_per_s is None:
            return self._tokens / observed_s if self._tokens and observed_s else None
        # Work that gets nothing, because online requests take all, lowers it further and further.
        missing_s = max(_LEARNING_S - observed_s, 0.0 if self._tokens else 1.0)
        return (self._tokens + self._expected_per_s * missing_s) / (observed_s + missing_s)

    def _advance(self) -> None:
        now_s = self._clock()
        if self._in_flight:
            self._busy_s += now_s - self._last_s
        self._last_s = now_s
        while self._recent and self._recent[0][0] <= self._busy_s - self._window_s:
            self._tokens -= self._recent.popleft()[1]


_LEAST_LEFT_S: Final = 60.0
"""Least time left that is assumed, so that a window that is about to close needs no infinite
rate."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What offline work gets, what is promised of it, and what that leaves."""

    tokens_per_s: float | None
    """Offline tokens a second that the engine serves, or is expected to; None if unknown."""

    required_tokens_per_s: float
    """What the unfinished batches need to be complete within their windows."""

    headroom_tokens_per_s: float | None
    """What could be added; None if unknown."""


def required_tokens_per_s(
    batches: Iterable[JobRecord], now_s: float, token_bias: float = 1.0
) -> float:
    """Return the rate at which all ``batches`` would be complete just in time."""
    return sum(
        remaining_tokens(batch, token_bias) / max(batch.expires_at_s - now_s, _LEAST_LEFT_S)
        for batch in batches
    )


def headroom(rate_per_s: float | None, required_per_s: float) -> Headroom:
    """Return what could be added now.

    Args:
        rate_per_s: Of offline tokens, of late; None if unknown.
        required_per_s: As ``required_tokens_per_s`` returns it.
    """
    spare_per_s = None if rate_per_s is None else max(rate_per_s - required_per_s, 0)
    return Headroom(rate_per_s, required_per_s, spare_per_s)


EXPORTED_STATES: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""Of ``batches``, for Prometheus: there a state that no batch has is named, too."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A moment in the life of the service."""

    batches: Mapping[str, int]
    """Unfinished batches by status; a status that none has is not named."""

    paused_batches: int
    """Of them, those that wait to be resumed."""

    lines_in_flight: int
    """Lines that the engine has."""

    bytes_in_flight: int
    """Of the input, for these lines."""

    lines_waiting: int
    """Lines of batches in progress that the engine has yet to get, paused ones too. One that
    has just ended is among them until its record is on the disk."""

    line_retries: int
    """Since the start."""

    webhooks_pending: int
    """Ends of batches that no receiver has accepted yet."""

    model: str
    """The model that answers lines; unfinished ones continue after a restart if it is the same."""


def service_status(
    unfinished: Iterable[JobRecord],
    slots: FairSlots,
    suspects_in_flight: int,
    model: str,
    line_retries: int,
    webhooks_pending: int,
) -> ServiceStatus:
    """Return the status of a service whose batches in no final state are ``unfinished``."""
    records = list(unfinished)
    lines_left = sum(
        record.total_lines - record.progress.lines
        for record in records
        if record.status is Status.IN_PROGRESS
    )
    return ServiceStatus(
        batches=dict(Counter(record.status.value for record in records)),
        paused_batches=sum(record.is_paused for record in records),
        lines_in_flight=slots.lines_in_flight + suspects_in_flight,
        bytes_in_flight=slots.bytes_in_flight,
        lines_waiting=max(0, lines_left - slots.lines_in_flight),
        line_retries=line_retries,
        webhooks_pending=webhooks_pending,
        model=model,
    )
