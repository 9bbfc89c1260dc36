"""When batches will be complete, and whether that is in time. Pure arithmetic.

What the rest of a batch takes is what its finished lines took, in proportion to what
they were expected to take. The engine's measured rate of offline tokens is shared as
``fair_slots`` shares it: alike between owners, and within an owner priority by
priority, by weight within one. What a batch or an owner who is done gives up goes to the
others. How much longer batches took than was forecast says how sure this one is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from sglang_coserve.batch.record import JobRecord

__all__ = [
    "REMEMBERED",
    "FinishEstimate",
    "ForecastErrors",
    "JobForecast",
    "PastJob",
    "RemainingWork",
    "job_forecasts",
    "remaining_tokens",
    "served_before",
]

REMEMBERED: Final = 39
"""Past batches that count. The fewest of which P95 is a value with one beyond it, and P5 one with
one below."""

_FEWEST: Final = 19
"""The fewest of which P95 is a value at all."""

_PRIOR: Final = tuple(math.exp(0.25 * step) for step in range(-9, 10))
"""Actual ÷ predicted where fewer batches have ended: from a tenth to ten times. Of 509 simulated
batches the 5% quantiles were 0.6 and 0.7, the 95% quantiles 5.3 and 5.9, the extremes 0.3 and 22
(tag ``measurements-1``)."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """A batch that is complete."""

    forecast_s: float
    """Its duration as forecast at admission, before any correction."""

    actual_s: float


@dataclass(frozen=True, slots=True)
class FinishEstimate:
    """When a batch will be complete, in seconds from now: 5, 50 and 95 of 100 are by then."""

    p05_s: float
    p50_s: float
    p95_s: float


class ForecastErrors:
    """Empirical quantiles of actual ÷ forecast: the factors by which forecasts are corrected.

    Of n past errors the k-th smallest exceeds the next one with the probability k ÷ (n + 1), if
    all of them are alike: no more is assumed of how they are distributed. So with few of
    them P95 is the largest, and with fewer than that, errors that nobody has seen are put
    beside them.
    """

    def __init__(self, past: Iterable[PastJob] = ()) -> None:
        """Start with ``past`` batches, the oldest first."""
        self._newest: deque[float] = deque(maxlen=REMEMBERED)
        self._factors = sorted(_PRIOR)
        for each in past:
            self.add(each)

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def are_enough(self) -> bool:
        """True when P5 and P95 are of errors that were made, and of no others."""
        return len(self) >= _FEWEST

    def add(self, past: PastJob) -> None:
        """Take in a batch that has ended, in place of the oldest one."""
        if min(past.forecast_s, past.actual_s) <= 0:
            return
        self._newest.append(past.actual_s / past.forecast_s)
        unseen = () if self.are_enough else _PRIOR
        self._factors = sorted([*self._newest, *unseen])

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


_PRIOR_LINES: Final = 20
"""The estimate weighs as much as this many finished lines."""

_CENTURY_S: Final = 100 * 365 * 86_400.0
"""What takes longer is said to take so long: calendars end."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What is left of one batch."""

    owner: str
    tokens: float
    priority: int
    weight: float


@dataclass(frozen=True, slots=True)
class JobForecast:
    """The forecast of one batch."""

    eta_s: float | None
    """P50: as likely before as after. Seconds since the epoch; None when the engine's rate is
    not known."""

    rate_tokens_per_s: float | None
    """Mean rate from now to the end."""

    is_urgent: bool
    """It may miss its window, unless it goes first of its owner's, and then it probably
    will not."""

    is_late: bool
    """It is expected to miss its window."""

    eta_p95_s: float | None = None
    """P95: of 20 such batches 19 are complete by then."""

    forecast_s: float | None = None
    """Its duration before past errors are taken into account."""

    first_s: float | None = None
    """P5 of how long it would take were it the first of its owner's; None while too few batches
    have ended to know."""


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


def served_before(works: Sequence[RemainingWork]) -> list[float]:
    """Return what is served, to whomever, until each of ``works`` is complete.

    O(n log n + n · owners).
    """
    served = [0.0] * len(works)
    totals = _totals(works)
    for owner in totals:
        own = [i for i, work in enumerate(works) if work.owner == owner]
        for i, tokens in zip(own, _served_to_owner([works[i] for i in own]), strict=True):
            served[i] = _served_to_all(tokens, totals.values())
    return served


def _totals(works: Iterable[RemainingWork]) -> dict[str, float]:
    """Return the tokens that each owner has left."""
    totals: dict[str, float] = {}
    for work in works:
        totals[work.owner] = totals.get(work.owner, 0.0) + work.tokens
    return totals


def _served_to_all(tokens: float, totals: Iterable[float]) -> float:
    """Return what all have been served when an owner who has that much to do has been ``tokens``.

    All owners have been served the same by then, but for those who needed less.
    """
    return sum(min(total, tokens) for total in totals)


def _served_to_owner(works: Sequence[RemainingWork]) -> list[float]:
    """Return, for the works of one owner, what the owner is served until each is complete."""
    served_before = [0.0] * len(works)
    served = 0.0
    order = sorted(range(len(works)), key=lambda i: -works[i].priority)
    for _, group in groupby(order, key=lambda i: works[i].priority):
        # Whoever has the fewest tokens per weight ends first; until then all of them
        # have been served the same number per weight.
        ending = sorted(group, key=lambda i: works[i].tokens / works[i].weight)
        weight = sum(works[i].weight for i in ending)
        served_per_weight = 0.0
        for i in ending:
            per_weight = works[i].tokens / works[i].weight
            served += (per_weight - served_per_weight) * max(weight, 0.0)
            served_per_weight = per_weight
            weight -= works[i].weight
            served_before[i] = served
    return served_before


def job_forecasts(
    batches: Iterable[JobRecord],
    rate_per_s: float | None,
    now_s: float,
    errors: ForecastErrors,
    token_bias: float = 1.0,
) -> dict[str, JobForecast]:
    """Return the forecast of every batch, by id; nothing is known without a rate.

    Args:
        batches: Those that are being served, or soon will be.
        rate_per_s: Tokens a second of all offline work; more than 0.
        now_s: Seconds since the epoch.
        errors: What became of earlier forecasts.
        token_bias: What finished batches took, over what was expected of their lines.
    """
    running = list(batches)
    if rate_per_s is None:
        return {batch.id: JobForecast(None, None, False, False) for batch in running}
    works = [
        RemainingWork(b.owner, remaining_tokens(b, token_bias), b.priority, b.weight)
        for b in running
    ]
    totals = _totals(works)
    found: dict[str, JobForecast] = {}
    for batch, work, served in zip(running, works, served_before(works), strict=True):
        if not batch.estimated_tokens:
            found[batch.id] = JobForecast(None, None, False, False)
            continue
        forecast_s = served / rate_per_s
        first_s = _served_to_all(work.tokens, totals.values()) / rate_per_s
        found[batch.id] = _outlook(batch, work, forecast_s, first_s, now_s, errors)
    return found


def _outlook(
    batch: JobRecord,
    work: RemainingWork,
    forecast_s: float,
    first_s: float,
    now_s: float,
    errors: ForecastErrors,
) -> JobForecast:
    """``first_s`` is what the batch would need were it the first of its owner's."""
    left_s = batch.expires_at_s - now_s
    finish, first = errors.finish(forecast_s), errors.finish(first_s)
    # A window that cannot be kept must not push aside those that can.
    is_possible = first.p50_s <= left_s
    return JobForecast(
        eta_s=now_s + min(finish.p50_s, _CENTURY_S),
        rate_tokens_per_s=work.tokens / finish.p50_s if finish.p50_s else None,
        is_urgent=is_possible and finish.p95_s > left_s,
        is_late=finish.p50_s > left_s,
        eta_p95_s=now_s + min(finish.p95_s, _CENTURY_S),
        forecast_s=forecast_s,
        first_s=first.p05_s if errors.are_enough else None,
    )
