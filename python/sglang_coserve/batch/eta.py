"""When batches will be complete, and how much offline work could be added.

An ETA is what remains of a batch, divided by the rate that it gets. The engine's measured rate of
offline tokens is shared as ``fair_slots`` shares it: alike between owners, and among the batches of
an owner one after the other. An owner who is done leaves the rate to the others. Owners who are
held back have no forecasts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

from sglang_coserve.batch.record import JobRecord

_ESTIMATE_LINES: Final = 20
"""The estimate of a batch's tokens weighs as much as this many finished lines."""

_CENTURY_S: Final = 100 * 365 * 86_400.0
"""Longest time to an ETA: calendars end."""

_LEAST_LEFT_S: Final = 60.0
"""Least time left that is assumed, so that a window that is about to close needs no infinite
rate."""


class Eta(NamedTuple):
    """When a batch will be complete."""

    at_s: float
    """Seconds since the epoch."""

    rate_tokens_per_s: float
    """Mean rate from now to then; 0 when nothing remains."""


class Headroom(NamedTuple):
    """What offline work gets, what unfinished batches need of it, and what that leaves."""

    tokens_per_s: float | None
    """Offline tokens a second that the engine serves, or is expected to; None if unknown."""

    required_tokens_per_s: float
    """What the unfinished batches need to be complete within their windows."""

    headroom_tokens_per_s: float | None
    """What could be added; None if unknown."""


def remaining_tokens(batch: JobRecord) -> float:
    """Return the tokens that the unfinished lines of ``batch`` will take.

    Finished lines correct the estimate: the others are expected to exceed theirs as much.
    """
    expected, done = batch.estimated_tokens, batch.progress
    if not batch.total_lines:
        return expected  # Not validated yet.
    estimate = _ESTIMATE_LINES * expected / batch.total_lines
    if not estimate:
        return 0.0
    correction = (done.usage.total_tokens + estimate) / (done.estimated_tokens + estimate)
    return max(0, expected - done.estimated_tokens) * correction


class Forecasts:
    """When batches will be complete, as seen at one moment. O(n log n).

    A look at one of the batches, or at a new one, is O(log n).

    Args:
        batches: Those that are being served, or soon will be; none of owners who are held back.
        rate_per_s: Tokens a second of all offline work; more than 0. None if unknown.
    """

    def __init__(self, batches: Iterable[JobRecord], rate_per_s: float | None) -> None:
        batches = sorted(batches, key=_turn)
        self._rate_per_s = rate_per_s
        self._before: dict[str, float] = {}
        """Tokens of the owner's batches that are served before a batch, by its id."""

        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        for batch in batches:
            queue = self._queues[batch.owner]
            self._before[batch.id] = queue.tokens[-1]
            queue.turns.append(_turn(batch))
            queue.tokens.append(queue.tokens[-1] + remaining_tokens(batch))
        self._totals = sorted(queue.tokens[-1] for queue in self._queues.values())
        self._sums = [*accumulate(self._totals, initial=0.0)]

    def eta(self, batch: JobRecord, now_s: float) -> Eta | None:
        """Return when ``batch`` will be complete; None if it is not served, or without a rate.

        ``now_s`` is in seconds since the epoch.
        """
        if self._rate_per_s is None or not batch.will_be_served:
            return None
        queue = self._queues.get(batch.owner, _NO_QUEUE)
        before = self._before.get(batch.id)
        if before is None:
            before = queue.tokens[bisect_left(queue.turns, _turn(batch))]
        left = remaining_tokens(batch)
        tokens = before + left
        # Other owners have been served as much by then, or all that they have to do.
        ended = bisect_left(self._totals, tokens)
        to_all = self._sums[ended] + (len(self._totals) - ended) * tokens
        # Its owner has been served all of it, also what was not there at that moment.
        to_all += tokens - min(queue.tokens[-1], tokens)
        left_s = min(to_all / self._rate_per_s, _CENTURY_S)
        return Eta(now_s + left_s, left / left_s if left_s else 0.0)


class _Queue:
    """The batches of an owner, in the order in which they are served."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, float]] = []
        self.tokens = [0.0]
        """Sum of the tokens before each batch, and of all."""


_NO_QUEUE: Final = _Queue()


def _turn(batch: JobRecord) -> tuple[int, float]:
    return -batch.priority, batch.expires_at_s


def headroom(batches: Iterable[JobRecord], rate_per_s: float | None, now_s: float) -> Headroom:
    """Return what could be added beside ``batches``; see ``Forecasts`` for the arguments. O(n)."""
    required_per_s = sum(
        remaining_tokens(batch) / max(batch.expires_at_s - now_s, _LEAST_LEFT_S)
        for batch in batches
    )
    spare_per_s = None if rate_per_s is None else max(rate_per_s - required_per_s, 0)
    return Headroom(rate_per_s, required_per_s, spare_per_s)
