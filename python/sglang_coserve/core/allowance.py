"""How long offline work may keep online requests waiting: learned from the harm it did."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from sglang_coserve.core.integrator import Integrator
from sglang_coserve.core.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets, summarize

__all__ = ["Allowance"]

_TAILS: Final = {Statistic.P50: 0.5, Statistic.P90: 0.1, Statistic.P99: 0.01}
_FIRST_ARRIVAL: Final = 1 / 8
_MOST_ARRIVAL: Final = 1 / 2
"""An arrival waits for the rest of a step and is then served in one as long: two of them must fit
its target."""
_WINDOW: Final = 512
_RECOMPUTE_SHARE: Final = 1 / 32


class Allowance:
    """One integrator for each SLO, on the share of requests or gaps that were harmed.

    A request, or a gap between two tokens, is harmed when it misses its target and would
    not have in the no-interference baseline. An SLO on a percentile allows as many as its
    tail; for one on a mean, harm is how far it is exceeded. The factor of an SLO times its
    target is what the scheduler may make a request wait.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests.

        Args:
            slos: Absolute ones, and tolerances over what online requests get alone.
            ttft_prior_s: What is taken for a TTFT alone until one is known.
            gap_prior_s: The same of a gap.
        """
        self._ttft = [_Loop(slo, ttft_prior_s) for slo in slos if slo.latency is Latency.TTFT]
        self._tpot = [_Loop(slo, gap_prior_s) for slo in slos if slo.latency is Latency.TPOT]
        self._tbt = [_Loop(slo, gap_prior_s) for slo in slos if slo.latency is Latency.TBT]
        self.needs_gaps: Final = bool(self._tbt)

    @property
    def arrival_s(self) -> float:
        """The longest that a request which arrives may wait for a step that does not yield."""
        return min((loop.target_s * loop.factor for loop in self._ttft), default=math.inf)

    @property
    def gap_share(self) -> float:
        """The part of the time until a decode's deadline that offline work may take."""
        return min((loop.factor for loop in self._tpot + self._tbt), default=1.0)

    @property
    def targets(self) -> SloTargets:
        """The deadlines of a request that has none of its own."""
        ttft_s = min((loop.target_s for loop in self._ttft), default=None)
        tpot_s = min((loop.target_s for loop in self._tpot + self._tbt), default=None)
        return SloTargets(ttft_s, tpot_s)

    def first_token(self, info: RequestInfo, ttft_s: float, alone_s: float | None) -> None:
        """Note a TTFT, and what it would have been alone; None if that is not known."""
        for loop in self._ttft:
            loop.observe([(info.ttft_target_s, ttft_s, alone_s)])

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None]]) -> None:
        """Note gaps between tokens, each as measured and alone."""
        values = [(info.tpot_target_s, gap_s, alone_s) for info, gap_s, alone_s in gaps]
        for loop in self._tbt:
            loop.observe(values)

    def finished(self, info: RequestInfo, tpot_s: float, alone_s: float | None) -> None:
        """Note the TPOT of a request that has ended, and what it would have been alone."""
        for loop in self._tpot:
            loop.observe([(info.tpot_target_s, tpot_s, alone_s)])


class _Loop:
    """One SLO: its target, and the factor that keeps it."""

    def __init__(self, slo: Slo, prior_s: float) -> None:
        tail = _TAILS.get(slo.statistic)
        self._slo = slo
        self._tail = tail
        first, most = 1.0, 1.0
        if slo.latency is Latency.TTFT:
            first, most = _FIRST_ARRIVAL, _MOST_ARRIVAL
        self._integrator = Integrator(tail or 0.0, first=first, most=most)
        self._alone_s: deque[float] = deque(maxlen=_WINDOW)
        self._unseen = 0
        self._mean_count = 1.0
        if slo.limit_s is not None:
            self.target_s = slo.limit_s
        else:
            assert slo.tolerance is not None
            self.target_s = (1 + slo.tolerance) * prior_s

    @property
    def factor(self) -> float:
        return self._integrator.factor

    def observe(self, values: Sequence[tuple[float | None, float, float | None]]) -> None:
        """Take values into account that became known together: own target, measured, alone."""
        harm, count = 0.0, 0
        for own_s, value_s, alone_s in values:
            if alone_s is not None and self._slo.tolerance is not None:
                self._alone_s.append(alone_s)
                self._unseen += 1
            target_s = own_s or self.target_s
            if self._tail is None:
                harm += min(value_s / max(target_s, alone_s or 0.0) - 1, 1.0)
                count += 1
            elif alone_s is None or alone_s <= target_s:
                harm += value_s > target_s
                count += 1
        if self._unseen > _RECOMPUTE_SHARE * len(self._alone_s):
            self._follow_alone()
        if count:
            self._mean_count += (count - self._mean_count) / 64
            self._integrator.observe(harm / count, count / self._mean_count)

    def _follow_alone(self) -> None:
        self._unseen = 0
        alone_s = self._slo.statistic.of(summarize(self._alone_s))
        assert alone_s is not None and self._slo.tolerance is not None
        self.target_s = (1 + self._slo.tolerance) * alone_s
