"""When batches will be complete, whether that is in time, and what could be added.

What the rest of a batch takes is what its finished lines took, in proportion to what
they were expected to take. The engine's measured rate of offline tokens is shared as
``fair_slots`` shares it: alike between owners, and within an owner priority by
priority, by weight within one. What a batch or an owner who is done gives up goes to the
others. How much longer batches took than was forecast says how sure this one is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from sglang_coserve.batch.record import JobRecord, Status

REMEMBERED: Final = 39
"""Past batches that count. The fewest of which P95 is a value with one beyond it, and P5 one with
one below."""

_FEWEST: Final = 19
"""The fewest of which P95 is a value at all."""

_PRIOR: Final = tuple(math.exp(0.25 * step) for step in range(-9, 10))
"""Actual ÷ predicted where fewer batches have ended: from a tenth to ten times. Of 509 simulated
batches the 5% quantiles were 0.6 and 0.7, the 95% quantiles 5.3 and 5.9, the extremes 0.3 and 22
(tag ``measurements-1``)."""

_PRIOR_LINES: Final = 20
"""The estimate weighs as much as this many finished lines."""

_CENTURY_S: Final = 100 * 365 * 86_400.0
"""What takes longer is said to take so long: calendars end."""

_LEAST_LEFT_S: Final = 60.0
"""Least time left that is assumed, so that a window that is about to close needs no infinite
rate."""


class FinishEstimate(NamedTuple):
    """When a batch will be complete, in seconds from now: 5, 50 and 95 of 100 are by then."""

    p05_s: float
    p50_s: float
    p95_s: float


class PastBatches:
    """What earlier batches say of forecasts: empirical quantiles of actual ÷ forecast, the factors
    by which they are corrected, and what lines took over what was expected of them.

    Of n past errors the k-th smallest exceeds the next one with the probability k ÷ (n + 1), if
    all of them are alike: no more is assumed of how they are distributed. So with few of
    them P95 is the largest, and with fewer than that, errors that nobody has seen are put
    beside them.
    """

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=REMEMBERED)
        self._factors = sorted(_PRIOR)
        self._took_tokens = 0.0
        self._expected_tokens = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def are_enough(self) -> bool:
        """True when P5 and P95 are of errors that were made, and of no others."""
        return len(self) >= _FEWEST

    @property
    def token_bias(self) -> float:
        """Tokens that lines took, over those that they were expected to take."""
        if self._took_tokens and self._expected_tokens:
            return self._took_tokens / self._expected_tokens
        return 1.0

    def add(
        self, forecast_s: float, actual_s: float, tokens: float = 0.0, expected_tokens: float = 0.0
    ) -> None:
        """Take in a batch that is complete, in place of the oldest one.

        ``forecast_s`` is its duration as forecast at admission, before any correction; its lines
        took ``tokens``, and ``expected_tokens`` were expected.
        """
        self._took_tokens += tokens
        self._expected_tokens += expected_tokens
        if min(forecast_s, actual_s) <= 0:
            return
        self._newest.append(actual_s / forecast_s)
        unseen = () if self.are_enough else _PRIOR
        self._factors = sorted([*self._newest, *unseen])

    def ended(self, batch: JobRecord) -> None:
        """Take in a batch in a final state, if it is complete and had a forecast."""
        if batch.status is not Status.COMPLETED or batch.forecast_s is None:
            return
        assert batch.completed_at_s is not None
        took_s, progress = batch.completed_at_s - batch.created_at_s, batch.progress
        self.add(batch.forecast_s, took_s, progress.usage.total_tokens, progress.estimated_tokens)

    def finish(self, forecast_s: float) -> FinishEstimate:
        """Return when a batch is complete that would take ``forecast_s`` by the forecast. O(1)."""
        return FinishEstimate(*(forecast_s * self._quantile(share) for share in (0.05, 0.5, 0.95)))

    def _quantile(self, share: float) -> float:
        """Return the factor that the next one is below with the probability ``share``."""
        factors = self._factors
        if share == 0.5:
            middle = len(factors) // 2
            return math.sqrt(factors[middle] * factors[-middle - 1])
        # Rounded away from the middle: an error is rather feared than hoped for.
        place = share * (len(factors) + 1)
        index = math.floor(place) if share < 0.5 else math.ceil(place - 1e-9)
        return factors[min(max(index, 1), len(factors)) - 1]


class RemainingWork(NamedTuple):
    """What is left of one batch."""

    owner: str
    tokens: float
    priority: int
    weight: float


@dataclass(frozen=True, slots=True)
class JobForecast:
    """The forecast of one batch; what is not known is None."""

    eta_s: float | None = None
    """P50: as likely before as after. Seconds since the epoch."""

    rate_tokens_per_s: float | None = None
    """Mean rate from now to the end."""

    is_urgent: bool = False
    """It may miss its window, unless it goes first of its owner's, and then it probably
    will not."""

    is_late: bool = False
    """It is expected to miss its window."""

    eta_p95_s: float | None = None
    """P95: of 20 such batches 19 are complete by then."""

    forecast_s: float | None = None
    """Its duration before past errors are taken into account."""

    first_s: float | None = None
    """P5 of how long it would take were it the first of its owner's; None while too few batches
    have ended to know."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What offline work gets, what is promised of it, and what that leaves."""

    tokens_per_s: float | None
    """Offline tokens a second that the engine serves, or is expected to; None if unknown."""

    required_tokens_per_s: float
    """What the unfinished batches need to be complete within their windows."""

    headroom_tokens_per_s: float | None
    """What could be added; None if unknown."""


def remaining_tokens(batch: JobRecord, token_bias: float = 1.0) -> float:
    """Return the tokens that the unfinished lines of ``batch`` will take.

    ``token_bias`` is what lines of other batches took, over what was expected of them.
    """
    expected, done = batch.estimated_tokens, batch.progress
    if not expected:
        return 0.0
    if not batch.total_lines:
        return expected * token_bias  # Not validated yet.
    prior = _PRIOR_LINES * expected / batch.total_lines
    correction = (done.usage.total_tokens + prior * token_bias) / (done.estimated_tokens + prior)
    return max(0, expected - done.estimated_tokens) * correction


def headroom(
    batches: Iterable[JobRecord], rate_per_s: float | None, now_s: float, token_bias: float = 1.0
) -> Headroom:
    """Return what could be added beside ``batches``; see ``job_forecasts`` for the arguments."""
    required_per_s = sum(
        remaining_tokens(batch, token_bias) / max(batch.expires_at_s - now_s, _LEAST_LEFT_S)
        for batch in batches
    )
    spare_per_s = None if rate_per_s is None else max(rate_per_s - required_per_s, 0)
    return Headroom(rate_per_s, required_per_s, spare_per_s)


def served_before(works: Sequence[RemainingWork]) -> list[float]:
    """Return what is served, to whomever, until each of ``works`` is complete.

    O(n log n).
    """
    served = [0.0] * len(works)
    to_all = _ServedToAll(works)
    by_owner: defaultdict[str, list[int]] = defaultdict(list)
    for i, work in enumerate(works):
        by_owner[work.owner].append(i)
    for own in by_owner.values():
        to_owner = 0.0
        own.sort(key=lambda i: (-works[i].priority, works[i].tokens / works[i].weight))
        for _, group in groupby(own, key=lambda i: works[i].priority):
            # Whoever has the fewest tokens per weight ends first; until then all of them
            # have been served the same number per weight.
            ending = list(group)
            weight = sum(works[i].weight for i in ending)
            for i in ending:
                per_weight = works[i].tokens / works[i].weight
                served[i] = to_all(to_owner + per_weight * weight)
                to_owner += works[i].tokens
                weight -= works[i].weight
    return served


class _ServedToAll:
    """What all owners of ``works`` have been served together when one of them has been so much."""

    def __init__(self, works: Iterable[RemainingWork]) -> None:
        totals: defaultdict[str, float] = defaultdict(float)
        for work in works:
            totals[work.owner] += work.tokens
        self._totals = sorted(totals.values())
        self._sums = [*accumulate(self._totals, initial=0.0)]

    def __call__(self, tokens: float) -> float:
        """Return it for an owner who has ``tokens`` or more to do. O(log owners).

        All owners have been served the same by then, but for those who needed less.
        """
        less = bisect_left(self._totals, tokens)
        return self._sums[less] + (len(self._totals) - less) * tokens


def job_forecasts(
    batches: Iterable[JobRecord],
    rate_per_s: float | None,
    now_s: float,
    past: PastBatches,
) -> dict[str, JobForecast]:
    """Return the forecast of every batch, by id; nothing is known without a rate.

    Args:
        batches: Those that are being served, or soon will be.
        rate_per_s: Tokens a second of all offline work; more than 0.
        now_s: Seconds since the epoch.
        past: What became of earlier forecasts.
    """
    running = list(batches)
    found = {batch.id: JobForecast() for batch in running}
    if rate_per_s is None:
        return found
    works = [
        RemainingWork(b.owner, remaining_tokens(b, past.token_bias), b.priority, b.weight)
        for b in running
    ]
    to_all = _ServedToAll(works)
    for batch, work, served in zip(running, works, served_before(works), strict=True):
        if not batch.estimated_tokens:
            continue
        forecast_s, left_s = served / rate_per_s, batch.expires_at_s - now_s
        finish = past.finish(forecast_s)
        first = past.finish(to_all(work.tokens) / rate_per_s)
        found[batch.id] = JobForecast(
            eta_s=now_s + min(finish.p50_s, _CENTURY_S),
            rate_tokens_per_s=work.tokens / finish.p50_s if finish.p50_s else None,
            # A window that cannot be kept must not push aside those that can.
            is_urgent=first.p50_s <= left_s < finish.p95_s,
            is_late=finish.p50_s > left_s,
            eta_p95_s=now_s + min(finish.p95_s, _CENTURY_S),
            forecast_s=forecast_s,
            first_s=first.p05_s if past.are_enough else None,
        )
    return found
