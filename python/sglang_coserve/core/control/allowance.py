"""What offline work may add to the latencies of online requests, by their SLOs.

It is what a target leaves above the latencies of the no-interference baseline. Nothing is learned
from the latencies that offline work was beside: a controller that answers rare late values swings
with every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

_WINDOW_S: Final = 300.0
"""The baseline's latencies of the last five minutes count, at least so many that four are in the
tail of a P99. A longer memory has quiet hours pay for busy ones: docs/policies.md, "When something
is off", has what traffic that changes costs with this one."""

_TAIL: Final = 0.01
"""What a P99 leaves out. The strictest own targets of so many requests do, too; and statistics are
computed again when so many of the values are new."""

_LEAST_OF_TTFT: Final = 1 / 22
"""Least share of an absolute target for first tokens that offline work may add where the baseline
leaves less: half of what it may add under +10%. Simulated (ConServe's Fig. 6, 1 request/s, targets
of the P99s alone), 85% of requests keep both targets; with 0.3 it is 11%."""

_LEAST_OF_GAPS: Final = 0.3
"""The same of a target for gaps. Decodes have deadlines, which keep a target that plain SGLang
misses: simulated (H100, Azure's conversations at 50 and 80% load, 500 and 50 ms), offline work has
0.92 and 1.02 of the steady bound with 0.3, 0.95 and 1.06 with 0.5 and 0.64 and 0.73 with 1/22, at
P99 TTFTs of 1.35 and 1.79, 1.41 and 1.99, 1.17 and 1.39 x alone; gaps keep 50 ms with each."""

Alone = tuple[float | None, float]
"""A latency in the baseline, after the target that the request brought along, if any."""


class _Headroom:
    """The SLOs on one latency, and what they leave above the same statistics of the baseline.

    Whatever adds no more to any latency keeps them. An absolute target that half of the baseline's
    values miss is left out: it would cost offline work and the other targets, and not be met. If
    none is left, offline work may add the least share of what the baseline has.
    """

    def __init__(self, latency: Latency, slos: Sequence[Slo], prior_s: float) -> None:
        """Start without values; ``prior_s`` is what the baseline has until one is known."""
        self.slos: Final = [slo for slo in slos if slo.latency is latency]
        is_ttft = latency is Latency.TTFT
        self._least_share = _LEAST_OF_TTFT if is_ttft else _LEAST_OF_GAPS
        self._alone = RecentValues(_WINDOW_S, at_least=round(4 / _TAIL))
        self._own_left = RecentValues(_WINDOW_S, at_least=round(4 / _TAIL))
        """What each request's own target leaves; infinite for none."""

        self._num_new = 0
        self._left_s = math.inf
        self._own_left_s = math.inf
        """What the own targets of all but the strictest hundredth of requests leave."""

        self.target_s = math.inf
        """Limit of a latency that is in time; infinite without one."""

        self._renew(lambda _: prior_s, 0.0)

    @property
    def added_s(self) -> float:
        """What offline work may add to any latency; infinite if nothing bounds it."""
        return min(self._left_s, self._own_left_s)

    def observe(self, values: Mapping[Alone, int], now_s: float) -> None:
        """Record values that became known together, with the count of each. Amortized O(values)."""
        for (own_s, alone_s), count in values.items():
            self._alone.add(alone_s, now_s, count)
            self._num_new += count
            left_s = math.inf
            if own_s is not None and own_s >= alone_s:  # Else it could not be met.
                left_s = max(own_s - alone_s, own_s * self._least_share)
            self._own_left.add(left_s, now_s, count)
        if self._num_new > _TAIL * self._alone.count:
            self._num_new = 0
            self._renew(self._alone.statistic, self._alone.statistic(Statistic.P50))
            self._own_left_s = self._own_left.quantile(_TAIL)

    def _renew(self, statistic: Callable[[Statistic], float], median_s: float) -> None:
        self.target_s = self._left_s = missed_s = math.inf
        for slo in self.slos:
            alone_s = statistic(slo.statistic)
            limit_s = slo.limit_over_value(alone_s)
            if slo.limit_s is None:
                left_s = limit_s - alone_s
            elif median_s > limit_s:
                missed_s = min(missed_s, alone_s)
                continue
            else:
                left_s = max(limit_s - alone_s, limit_s * self._least_share)
            self.target_s = min(self.target_s, limit_s)
            self._left_s = min(self._left_s, left_s)
        if math.isinf(self.target_s):
            self._left_s = self._least_share * missed_s


class Allowance:
    """Limits the time that offline work adds to steps, by what each SLO leaves.

    The deadlines of running requests already bound each step (``online_phase``). They cannot
    account for requests that arrive during the step, nor for prompts that stall the decodes after
    it. For these, what offline work may *add* is bounded: ``arrival_s`` and ``gap_s``.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests; the priors are what the baseline has until it is known."""
        self._ttft = _Headroom(Latency.TTFT, slos, ttft_prior_s)
        self._tpot = _Headroom(Latency.TPOT, slos, gap_prior_s)
        self._tbt = _Headroom(Latency.TBT, slos, gap_prior_s)
        self.is_relative: Final = all(slo.limit_s is None for slo in slos)
        """True when no SLO asks for other latencies than those without offline work."""

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that offline work may add to the TTFT of a request that
        arrives now."""
        # It waits for the rest of a step, and is served in another one as long.
        return min(self._ttft.added_s, self._ttft.target_s / 2)

    def gap_s(self, slack_s: float) -> float:
        """Return the longest time, in seconds, that offline work may add to a step whose online
        decodes could wait ``slack_s`` longer."""
        return min(max(slack_s, 0.0), self._tpot.added_s, self._tbt.added_s)

    @property
    def gap_share(self) -> float:
        """The share of the TPOT target that offline work may take of a step: 1 without one."""
        target_s = self.targets.tpot_s
        return 1.0 if target_s is None else self.gap_s(target_s) / target_s

    @property
    def targets(self) -> SloTargets:
        """TTFT and TPOT targets of a request that brought none of its own."""
        ttft_s, tpot_s = self._ttft.target_s, min(self._tpot.target_s, self._tbt.target_s)
        return SloTargets(
            None if math.isinf(ttft_s) else ttft_s, None if math.isinf(tpot_s) else tpot_s
        )

    def first_token(self, info: RequestInfo, alone_s: float, now_s: float) -> None:
        """Record the baseline's TTFT of a request."""
        self._ttft.observe({(info.ttft_target_s, alone_s): 1}, now_s)

    def gaps(self, values: Mapping[Alone, int], now_s: float) -> None:
        """Record the baseline's gaps that became known together, with the count of each."""
        if self._tbt.slos:
            self._tbt.observe(values, now_s)

    def finished(self, info: RequestInfo, alone_s: float, now_s: float) -> None:
        """Record the baseline's TPOT of a request that has ended."""
        if self._tpot.slos:
            self._tpot.observe({(info.tpot_target_s, alone_s): 1}, now_s)
