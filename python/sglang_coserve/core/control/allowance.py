"""Latency targets of online requests, and what they leave to offline work.

A target leaves the time between its limit and the same statistic of the no-interference baseline.
Latencies beside offline work are not used: a controller that answers rare late values would swing
with each late value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo

_WINDOW_S: Final = 300.0
"""Age in seconds after which a latency of the baseline no longer counts; at least the newest
``_LEAST_VALUES`` count. A longer memory makes quiet hours pay for busy ones: with this window,
traffic that alternates between 20 and 80% load every two minutes had P99 TTFTs of 1.20 x alone
(simulated)."""

_TAIL: Final = 0.01
"""Share of values beyond a P99. The same share of requests may bring own targets that are stricter
than what is kept, and statistics are computed anew after this share of new values."""

_LEAST_VALUES: Final = round(4 / _TAIL)
"""Values with four in the tail of a P99."""

_LEAST_OF_TTFT: Final = 1 / 22
"""Share of an absolute TTFT target that offline work may always add: half of what +10% allows.
Without it, a target that the baseline just meets stops offline work. Simulated (ConServe's Fig. 6,
1 request/s, the baseline's P99s as targets), 85% of requests keep both targets; with 0.3, 11%."""

_MOST_OF_MEDIAN: Final = 2.5
"""Longest time that offline work adds under a relative TTFT target, in tolerances of the median
TTFT alone: a tenth of a P99 can be half of a median. Simulated with 10% (H100, four traffics at 50
and 80% load), P50 TTFT is 0.94 to 1.14 x alone with 2, 0.97 to 1.14 with 2.5 and 0.99 to 1.13 with
3; offline work has 1 to 3% more tokens with 3 than with 2."""

Alone = tuple[float | None, float]
"""A request's own target in seconds, if any, and its latency in the baseline."""


class Targets(NamedTuple):
    """Limits in seconds for online requests without own targets; None without a limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    """Limit of a request's mean gap between tokens."""

    gap_s: float | None = None
    """Limit of each gap between tokens."""

    @property
    def token_s(self) -> float | None:
        """The stricter limit of ``tpot_s`` and ``gap_s``, for policies with one limit per token."""
        limits_s = [limit_s for limit_s in (self.tpot_s, self.gap_s) if limit_s is not None]
        return min(limits_s, default=None)


class _AloneValues:
    """Recent values of one latency in the baseline, and their statistics.

    Statistics are computed anew only after some new values, since a plan may ask in every step.
    """

    def __init__(self, prior_s: float) -> None:
        """Start without values; ``prior_s`` is every statistic until a value is known."""
        self._values = RecentValues(_WINDOW_S, at_least=_LEAST_VALUES)
        self._num_new = 0
        self._statistics: dict[Statistic, float] = {}
        self._prior_s = prior_s

    def observe(self, values: Mapping[Alone, int], now_s: float) -> bool:
        """Record values with the count of each; return True if statistics may have changed."""
        for (_, alone_s), count in values.items():
            self._values.add(alone_s, now_s, count)
            self._num_new += count
        if self._num_new <= _TAIL * self._values.count:
            return False
        self._num_new = 0
        self._statistics.clear()
        return True

    def statistic(self, statistic: Statistic) -> float:
        """Return a statistic in seconds. O(1), but O(bins log bins) after new values."""
        if not self._values.count:
            return self._prior_s
        if statistic not in self._statistics:
            self._statistics[statistic] = self._values.statistic(statistic)
        return self._statistics[statistic]


class _Limit:
    """The limit of one latency: the strictest of its SLOs that the baseline can keep.

    An absolute SLO that half of the baseline's values exceed is left out: keeping it would cost
    offline work and the other targets, in vain.
    """

    def __init__(self, latency: Latency, slos: Sequence[Slo], prior_s: float) -> None:
        """Start without values; ``prior_s`` stands for the baseline's until one is known."""
        self.slos: Final = [slo for slo in slos if slo.latency is latency]
        self.alone: Final = _AloneValues(prior_s)
        self.limit_s = math.inf
        """The limit in seconds; infinite without one."""

        self._renew()

    @property
    def target_s(self) -> float | None:
        """The limit in seconds, None without one."""
        return None if math.isinf(self.limit_s) else self.limit_s

    def observe(self, values: Mapping[Alone, int], now_s: float) -> None:
        """Record values that became known together, with the count of each. Amortized O(values)."""
        if self.alone.observe(values, now_s):
            self._renew()

    def _renew(self) -> None:
        self.limit_s = min([limit_s for _, limit_s in self._feasible()], default=math.inf)

    def _feasible(self) -> list[tuple[Slo, float]]:
        """Return the SLOs that the baseline can keep, each with its limit in seconds."""
        alone = self.alone.statistic
        median_s = alone(Statistic.P50)
        limits = [(slo, slo.limit_over_value(alone(slo.statistic))) for slo in self.slos]
        return [(slo, limit_s) for slo, limit_s in limits if median_s <= limit_s]


class _Headroom(_Limit):
    """A limit, and the time that it leaves above the same statistic of the baseline."""

    def __init__(self, latency: Latency, slos: Sequence[Slo], prior_s: float) -> None:
        """See ``_Limit``."""
        self._own_left = RecentValues(_WINDOW_S, at_least=_LEAST_VALUES)
        """Seconds that each request's own target leaves; infinite without an own target."""

        self.added_s = math.inf
        """Longest time in seconds that may be added to any value; infinite without a limit."""

        super().__init__(latency, slos, prior_s)

    def observe(self, values: Mapping[Alone, int], now_s: float) -> None:
        """See ``_Limit``."""
        for (own_s, alone_s), count in values.items():
            left_s = math.inf
            if own_s is not None and own_s >= alone_s:  # A stricter target cannot be met.
                left_s = max(own_s - alone_s, own_s * _LEAST_OF_TTFT)
            self._own_left.add(left_s, now_s, count)
        super().observe(values, now_s)

    def _renew(self) -> None:
        super()._renew()
        alone = self.alone.statistic
        lefts_s = []
        for slo, limit_s in self._feasible():
            left_s = limit_s - alone(slo.statistic)
            if slo.tolerance is not None:
                most_s = _MOST_OF_MEDIAN * slo.tolerance * alone(Statistic.P50)
                lefts_s.append(min(left_s, most_s))
            else:
                lefts_s.append(max(left_s, limit_s * _LEAST_OF_TTFT))
        if self.slos and not lefts_s:
            lefts_s = [_LEAST_OF_TTFT * alone(slo.statistic) for slo in self.slos]
        if self._own_left.count:
            lefts_s.append(self._own_left.quantile(_TAIL))
        self.added_s = min(lefts_s, default=math.inf)


class Allowance:
    """The limits that SLOs and own targets set to online latencies, by the baseline.

    Deadlines of running requests follow from ``targets`` and bound each step (``online_phase``).
    Deadlines cannot account for a request that arrives during a step: ``arrival_s`` does.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests; the priors stand for the baseline's latencies until known."""
        self._ttft = _Headroom(Latency.TTFT, slos, ttft_prior_s)
        self._tpot = _Limit(Latency.TPOT, slos, gap_prior_s)
        self._gap = _Limit(Latency.TBT, slos, gap_prior_s)
        self.is_relative: Final = all(slo.limit_s is None for slo in slos)
        """True when no SLO asks for other latencies than those without offline work."""

        self._has_slos = bool(slos)
        self._most_s = math.inf

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that offline work may add to the TTFT of a request that
        arrives now."""
        # The request waits for the rest of a step, and is served in another step as long.
        return min(self._ttft.added_s, self._ttft.limit_s / 2, self._most_s)

    def tighten(self, most_s: float) -> None:
        """Let offline work add no more than ``most_s`` to a first token, if anything bounds it.

        The limits stay: online prompts and decodes are paced by them, too.
        """
        if self._has_slos or not math.isinf(self.arrival_s):
            self._most_s = most_s

    @property
    def targets(self) -> Targets:
        """Limits for a request without own targets."""
        return Targets(self._ttft.target_s, self._tpot.target_s, self._gap.target_s)

    @property
    def stall_s(self) -> float:
        """P99 gap of the baseline, in seconds: the stall of decodes behind online prompts."""
        return self._gap.alone.statistic(Statistic.P99)

    def first_token(self, info: RequestInfo, alone_s: float, now_s: float) -> None:
        """Record the baseline's TTFT of a request."""
        self._ttft.observe({(info.ttft_target_s, alone_s): 1}, now_s)

    def gaps(self, values: Mapping[Alone, int], now_s: float) -> None:
        """Record the baseline's gaps that became known together, with the count of each."""
        self._gap.observe(values, now_s)

    def finished(self, info: RequestInfo, alone_s: float, now_s: float) -> None:
        """Record the baseline's TPOT of a request that has ended."""
        if self._tpot.slos:
            self._tpot.observe({(info.tpot_target_s, alone_s): 1}, now_s)
