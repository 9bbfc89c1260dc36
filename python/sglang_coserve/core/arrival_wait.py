"""How long the iteration that an online request arrives into may be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from sglang_coserve.core.late_first_tokens import LATE_SHARE, LateFirstTokens
from sglang_coserve.core.step import Served

__all__ = ["ArrivalWait"]

_WINDOW: Final = 1024
_PASSES: Final = 2048
_RECOMPUTE_EVERY: Final = 4
_BISECTIONS: Final = 10

_EXCESS: Final = 0.07
"""Where online requests alone come close to the target, or miss it, offline work may still add
this part of the target: to stop altogether would help them little, since it is not the cause."""

_MOST_EXCESS: Final = 0.2
"""However late online requests alone would be, offline work stops at this much over the target.
What they need alone is an estimate from above: offline work also makes them overlap more."""

_LEAST_SHARE: Final = 1 / 16
_MOST_SHARE: Final = 0.45
"""Of the target, what the answer may be; the most only on an engine without online work."""

_MOST_SHARE_UNTIL_SAFEPOINT: Final = 0.25
"""The same where iterations can be aborted: a shorter wait then costs offline work little, since it
does not make iterations shorter by as much."""

_PRIOR_SHARE: Final = 1 / 8
_PRIOR_REQUESTS: Final = 16
_PRIOR_IN_TIME: Final = 100
"""Requests taken to have been in time before the first was seen: of fewer than a hundred a
single one that would be late whatever offline work does is more than a hundredth."""

_PRIOR_UTILIZATION: Final = 0.5
_UTILIZATION_SPAN_S: Final = 20.0


class ArrivalWait:
    """The longest iteration that offline work may fill, learned from first tokens.

    A request arrives at a random time in an iteration of length w and waits for
    its end, U(0, w). It then takes what it takes by itself: t from the moment the
    scheduler can see it, in an iteration whose online part lasts p and that
    offline work may fill up to w. With a window of (t, p), the answer is the
    largest w with

        mean over (t, p) of P[t + max(0, w - p) + U(0, w) > target] <= 1%,

    the target raised by what offline work may add where online requests alone
    already reach it. Offline work that ran while a request was seen and waited is
    taken off its t.

    Two things bound it besides. A queue amplifies each delay by 1 / (1 - ρ), ρ the
    utilization by online work: w is at most a share of (1 - ρ)·target. What an iteration
    takes however small it is does not count as such work: an engine that always has some
    online row to decode would seem fully used, offline work would get no time, and
    that would never change. And what all this leaves out, ``LateFirstTokens`` learns.

    O(log window) an iteration; O(window) once every few first tokens.
    """

    def __init__(self, target_s: float) -> None:
        """``target_s`` is the TTFT target."""
        self._target_s = target_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._since_recomputed = 0
        self._modelled_s = _PRIOR_SHARE * target_s
        self._limit_s = target_s
        self._late = LateFirstTokens()
        self._utilization = _PRIOR_UTILIZATION
        # Start of each iteration, and what offline work had added before it.
        self._starts_s: deque[float] = deque(maxlen=_PASSES)
        self._added_before_s: deque[float] = deque(maxlen=_PASSES)
        self._added_s = 0.0
        self._online_work_s = 0.0

    @property
    def wait_s(self) -> float:
        """The answer, from the requests seen so far."""
        return self._bounded_s(_MOST_SHARE, _LEAST_SHARE)

    def wait_until_safepoint_s(self, share: float) -> float:
        """Return the answer where a safepoint ends the wait, and not the iteration; no longer.

        ``share`` is the part of an iteration that an arrival then waits at most. It is the
        iteration that is never shorter than the least part of the target.
        """
        return self._bounded_s(_MOST_SHARE_UNTIL_SAFEPOINT, _LEAST_SHARE * share)

    def observe(
        self,
        started_s: float,
        took_s: float,
        online_part_s: float,
        first_tokens: Sequence[Served],
        fixed_s: float = 0.0,
    ) -> None:
        """Take an iteration into account that has ended, not before those that began earlier.

        Args:
            started_s: When it started.
            took_s: How long what it ran takes, by the model.
            online_part_s: The part of that for its online work alone.
            first_tokens: The online requests to which it gave their first token.
            fixed_s: What an iteration takes however small it is.
        """
        self._follow_utilization(started_s)
        self._online_work_s = max(online_part_s - fixed_s, 0.0)
        self._starts_s.append(started_s)
        self._added_before_s.append(self._added_s)
        added_now_s = max(took_s - online_part_s, 0.0)
        for info, _, token_s in first_tokens:
            assert token_s is not None
            seen_s = info.arrival_s if info.seen_s is None else info.seen_s
            added_s = self._added_s - self._added_until(seen_s)
            self._late.observe(token_s - info.arrival_s, added_s + added_now_s, self._limit_s)
            own_s = max(started_s - seen_s - added_s, 0.0) + online_part_s
            self._samples.append((own_s, online_part_s))
            self._since_recomputed += 1
        self._added_s += added_now_s
        if self._since_recomputed >= _RECOMPUTE_EVERY:
            self._since_recomputed = 0
            self._recompute()

    def _bounded_s(self, most_share: float, least_share: float) -> float:
        learned_s = self._modelled_s * self._late.factor
        most_s = most_share * (1 - self._utilization) * self._target_s
        return max(min(learned_s, most_s), least_share * self._target_s)

    def _follow_utilization(self, now_s: float) -> None:
        """Take the time since the last iteration's start into account."""
        if not self._starts_s or now_s <= self._starts_s[-1]:
            return
        span_s = now_s - self._starts_s[-1]
        weight = -math.expm1(-span_s / _UTILIZATION_SPAN_S)
        busy = min(self._online_work_s / span_s, 1.0)
        self._utilization += weight * (busy - self._utilization)

    def _added_until(self, seen_s: float) -> float:
        """Return what offline work had added before the iteration that saw a request."""
        index = bisect_left(self._starts_s, seen_s)
        return self._added_before_s[min(index, len(self._added_before_s) - 1)]

    def _recompute(self) -> None:
        own_s, part_s = np.array(self._samples).T
        alone_s = float(np.quantile(own_s, 1 - LATE_SHARE))
        limit_s = max(self._target_s, alone_s + _EXCESS * self._target_s)
        self._limit_s = limit_s = min(limit_s, (1 + _MOST_EXCESS) * self._target_s)
        low_s, high_s = _LEAST_SHARE * self._target_s, _MOST_SHARE * self._target_s
        for _ in range(_BISECTIONS):
            wait_s = (low_s + high_s) / 2
            ends_s = own_s + np.maximum(0.0, wait_s - part_s)
            num_late = np.clip((ends_s + wait_s - limit_s) / wait_s, 0.0, 1.0).sum()
            if num_late <= LATE_SHARE * (len(own_s) + _PRIOR_IN_TIME):
                low_s = wait_s
            else:
                high_s = wait_s
        # A few requests say little about a hundredth of them.
        share = min(1.0, len(own_s) / _PRIOR_REQUESTS)
        self._modelled_s = share * low_s + (1 - share) * _PRIOR_SHARE * self._target_s
