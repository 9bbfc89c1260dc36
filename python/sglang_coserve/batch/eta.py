"""When batches will be complete, and whether that is in time. Pure arithmetic.

What the rest of a batch takes is what its finished lines took, in proportion to what
they were expected to take. The engine's measured rate of offline tokens is shared as
``fair_slots`` shares it: alike between owners, and within an owner priority by
priority, by weight within one. What a batch or an owner who is done gives up goes to the
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from sglang_coserve.batch.record import BatchRecord

__all__ = ["Outlook", "Work", "completion_delays_s", "outlooks", "remaining_tokens"]

_PRIOR_LINES: Final = 20
"""The estimate weighs as much as this many finished lines."""

_URGENT_SHARE: Final = 0.1
"""A batch is urgent when less than this share of its remaining window would be left over."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of one batch."""

    owner: str
    tokens: float
    priority: int
    weight: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be expected of one batch."""

    eta_s: float | None
    """Seconds since the epoch; None when the engine's rate is not known."""

    rate_tokens_per_s: float | None
    """Mean rate from now to the end."""

    is_urgent: bool
    """It will miss its window, or nearly, unless it goes first of its owner's, and then it
    will not."""

    is_late: bool
    """It is expected to miss its window."""


def remaining_tokens(batch: BatchRecord) -> float:
    """Return the tokens that the unfinished lines of ``batch`` will take."""
    expected = batch.estimated_tokens
    if not batch.total_lines or not expected:
        return 0.0
    done = batch.progress
    prior = _PRIOR_LINES * expected / batch.total_lines
    correction = (done.usage.total_tokens + prior) / (done.estimated_tokens + prior)
    return max(0, expected - done.estimated_tokens) * correction


def completion_delays_s(works: Sequence[Work], tokens_per_s: float) -> list[float]:
    """Return the seconds that each of ``works`` needs when all share ``tokens_per_s``.

    O(n log n + n · owners).
    """
    delays = [0.0] * len(works)
    totals = _totals(works)
    for owner in totals:
        own = [i for i, work in enumerate(works) if work.owner == owner]
        for i, tokens in zip(own, _served_before([works[i] for i in own]), strict=True):
            delays[i] = _served_after_s(tokens, totals.values(), tokens_per_s)
    return delays


def _totals(works: Iterable[Work]) -> dict[str, float]:
    """Return what each owner has to do."""
    totals: dict[str, float] = {}
    for work in works:
        totals[work.owner] = totals.get(work.owner, 0.0) + work.tokens
    return totals


def _served_after_s(tokens: float, totals: Iterable[float], tokens_per_s: float) -> float:
    """Return when an owner who has that much to do has been served ``tokens``.

    All owners have been served the same by then, but for those who needed less.
    """
    return sum(min(total, tokens) for total in totals) / tokens_per_s


def _served_before(works: Sequence[Work]) -> list[float]:
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


def outlooks(
    batches: Iterable[BatchRecord], tokens_per_s: float | None, now_s: float
) -> dict[str, Outlook]:
    """Return the outlook of every batch, by id. ``batches`` are those that are being served."""
    running = list(batches)
    if not tokens_per_s:
        return {batch.id: Outlook(None, None, False, False) for batch in running}
    works = [Work(b.owner, remaining_tokens(b), b.priority, b.weight) for b in running]
    delays_s = completion_delays_s(works, tokens_per_s)
    totals = _totals(works)
    found: dict[str, Outlook] = {}
    for batch, work, delay_s in zip(running, works, delays_s, strict=True):
        alone_s = _served_after_s(work.tokens, totals.values(), tokens_per_s)
        found[batch.id] = _outlook(batch, work, delay_s, alone_s, tokens_per_s, now_s)
    return found


def _outlook(
    batch: BatchRecord,
    work: Work,
    delay_s: float,
    alone_s: float,
    tokens_per_s: float,
    now_s: float,
) -> Outlook:
    """``alone_s`` is what the batch would need were it the first of its owner's."""
    left_s = batch.expires_at_s - now_s
    # A window that cannot be kept must not push aside those that can.
    is_possible = alone_s <= left_s
    return Outlook(
        eta_s=now_s + delay_s,
        rate_tokens_per_s=work.tokens / delay_s if delay_s else tokens_per_s,
        is_urgent=is_possible and delay_s > left_s * (1 - _URGENT_SHARE),
        is_late=delay_s > left_s,
    )
