"""What one SLO lets offline work add to the latencies of online requests.

An SLO's percentile tolerates some late values: the credit that is left decides the allowance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

__all__ = ["Allowance"]


class Credit:
    """An account of late values.

    It gains the tolerated share of each value, and loses each late one. It holds at most what a
    whole window of values tolerates, in either direction, so that an old surplus, or an old debt,
    is forgotten within a window.
    """

    def __init__(self, tolerated: float) -> None:
        """Start with neither credit nor debt; ``tolerated`` is the share of late values."""
        self._tolerated = tolerated
        self._credit = 0.0
        self._most = 1.0

    @property
    def level(self) -> float:
        """The credit as a share of the most that it can be: -1 (debt) to 1."""
        return self._credit / self._most

    def observe(self, late: float, count: float, window: float) -> None:
        """Record ``count`` values, of which ``late`` were late, in a window of ``window``."""
        self._most = max(self._tolerated * window, 1.0)
        credit = self._credit + self._tolerated * count - late
        self._credit = min(max(credit, -self._most), self._most)


_WINDOW_S: Final = 300.0
_LEAST_VALUES: Final = 400
"""The baseline's latencies of the last five minutes count, and at least so many, four of which are
in the tail of a P99. A longer memory has quiet hours pay for busy ones: see docs/benchmarks.md,
"Changing traffic", also for what shorter ones cost."""

_LEAST_GAPS: Final = 4000
"""The same for gaps between tokens: a step that is too long makes those of all decodes late."""

_RENEWED_SHARE: Final = 1 / 128
"""Statistics are computed again when this share of the values is new."""

_TOLERATED: Final[Mapping[Statistic, float]] = MappingProxyType(
    {Statistic.P50: 0.5, Statistic.P90: 0.1, Statistic.P99: 0.01, Statistic.MEAN: 0.01}
)
"""Shares of values that may be late. A mean has none: there it is by how much it may be exceeded,
or undercut, before the account is full."""

_LEAST_ADDED: Final = 1 / 22
"""Least share of an absolute target that offline work may add where the baseline leaves nothing:
half of what +10% adds. A target that cannot be met must not end offline work, which is not why."""

_DEBT_WEIGHT: Final = 2
"""A debt of half of the account leaves only ``_LEAST_SHARE``. Simulated on an H100 (Azure's
conversations at 50% and 80% load, +10%), with 1 the P99 gap was 1.19 and 1.12 x alone and offline
work had 10% and 14% more; with 2 it is 1.08 and 1.09."""

_LEAST_SHARE: Final = 1 / 8
"""Least share of ``safe_s`` that is added with a debt. Noise of the machine makes debts, too, and
they must not end offline work, which is then not what makes requests late."""

_MISSED_ADDED: Final = 0.1
"""An absolute target that half of the baseline's values miss counts as +10%."""

_LEAST_S: Final = 1e-6


class LatencyPair(NamedTuple):
    """A TTFT, a TPOT or a gap, as measured and in the baseline, in seconds."""

    own_target_s: float | None
    """The target that the request brought along, if any."""

    measured_s: float
    alone_s: float | None
    """The latency in the no-interference baseline; None if unknown."""


class LatencyAccount:
    """Computes an SLO's target, and what offline work may add to any one latency.

    ``safe_s`` is the target less the same statistic of the baseline: whatever adds no more to any
    latency keeps the SLO, without any learning. The late values that the SLO tolerates are spent
    from a credit account, whose debt in turn reduces what may be added.
    """

    def __init__(self, slo: Slo, prior_s: float) -> None:
        """Start without values; ``prior_s`` is the baseline's statistic until one is known."""
        self._slo = slo
        self._tolerated = _TOLERATED[slo.statistic]
        self._credit = Credit(self._tolerated)
        self._alone = RecentValues(_WINDOW_S, at_least=_LEAST_VALUES)
        self._strictness = RecentValues(_WINDOW_S, at_least=_LEAST_VALUES)
        """Inverse of what each request's own target leaves; 0 for none."""

        self._has_own = False
        self._late_alone_share = 0.0
        """Share of the baseline's values that are late; at most half of what is tolerated, so that
        a target that cannot be met leaves the other half to offline work."""

        self._num_new = 0
        self._least_window = _LEAST_GAPS if slo.latency is Latency.TBT else _LEAST_VALUES
        self.target_s = math.inf
        """Limit of a latency that is in time; infinite without one."""

        self.safe_s = math.inf
        """What offline work may add to any latency with the SLO still kept."""

        self._own_safe_s = math.inf
        """What may be added to all but the strictest hundredth of what requests ask for."""

        self._renew(prior_s, 0.0)

    def added_s(self, most_s: float) -> float:
        """Return how much offline work may add to a latency, if ``most_s`` is all there is.

        ``safe_s``, and a share of the rest as large as the credit; less than it with a debt.
        """
        surely_s, level = self.surely_s, self._credit.level
        if level > 0 and surely_s < most_s:
            surely_s += level * (most_s - surely_s)
        return min(surely_s, most_s, self._own_safe_s)

    @property
    def share(self) -> float:
        """1, or what a debt leaves: 0 at the largest."""
        return 1 + min(self._credit.level, 0.0)

    @property
    def surely_s(self) -> float:
        """What offline work may add to every latency: ``safe_s``, or less with a debt; infinite
        if nothing bounds it."""
        safe_s, level = min(self.safe_s, self._own_safe_s), self._credit.level
        if level >= 0 or math.isinf(safe_s):
            return safe_s
        return safe_s * max(1 + _DEBT_WEIGHT * level, _LEAST_SHARE)

    def observe(self, values: Mapping[LatencyPair, int], now_s: float) -> None:
        """Record values that became known together, with the count of each. Amortized O(values)."""
        late, judged = 0.0, 0
        for value, count in values.items():
            own_s, measured_s, alone_s = value
            if own_s is not None and (alone_s or 0.0) > own_s:
                own_s = None  # It could not be met.
            target_s = own_s or self.target_s
            judged += count
            if self._slo.statistic is Statistic.MEAN:
                late += count * (measured_s / target_s - 1)
            else:
                late += count * ((measured_s > target_s) - ((alone_s or 0.0) > target_s))
            if alone_s is not None:
                self._alone.add(alone_s, now_s, count)
                self._num_new += count
            self._has_own |= own_s is not None
            if self._has_own:
                left_s = 0.0 if own_s is None else own_s - (alone_s or 0.0)
                least_s = 0.0 if own_s is None else max(own_s * _LEAST_ADDED, _LEAST_S)
                strictness = 0.0 if own_s is None else 1 / max(left_s, least_s)
                self._strictness.add(strictness, now_s, count)
        known = self._alone.count
        if self._slo.limit_s is not None or known * self._tolerated >= 1:
            late += judged * self._late_alone_share
            self._credit.observe(late, judged, max(known, self._least_window))
        if self._num_new > _RENEWED_SHARE * known:
            self._num_new = 0
            statistic_s = self._alone.statistic(self._slo.statistic)
            self._renew(statistic_s, self._alone.statistic(Statistic.P50))
            late_alone_share = self._alone.share_above(self.target_s)
            most = self._tolerated / 2 if self._slo.tolerance is None else 1.0
            self._late_alone_share = min(late_alone_share, most)

    def _renew(self, alone_s: float, median_s: float) -> None:
        limit_s = self._slo.limit_over_value(alone_s)
        if self._slo.limit_s is None:
            self.safe_s = limit_s - alone_s
        elif median_s > limit_s:
            self.safe_s = alone_s * _MISSED_ADDED
            limit_s = alone_s + self.safe_s
        else:
            self.safe_s = max(limit_s - alone_s, limit_s * _LEAST_ADDED)
        self.target_s = limit_s
        if self._has_own:
            self._own_safe_s = 1 / self._strictness.statistic(Statistic.P99)


_NO_SLO: Final = Slo(Latency.TTFT, Statistic.P99, limit_s=math.inf)
"""Only the targets that requests bring along count."""


class Allowance:
    """Limits the time that offline work adds to steps, by an account of each SLO.

    The deadlines of running requests already bound each step (``online_phase``). They cannot
    account for requests that arrive during the step, nor for prompts that stall the decodes after
    it. For these, what offline work may *add* is bounded: ``arrival_s`` and ``gap_s``.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests.

        Args:
            slos: Absolute limits, and tolerances relative to the no-interference baseline.
            ttft_prior_s: Baseline TTFT assumed until one is known.
            gap_prior_s: Baseline gap assumed until one is known.
        """

        def accounts(latency: Latency, prior_s: float) -> list[LatencyAccount]:
            return [LatencyAccount(slo, prior_s) for slo in slos if slo.latency is latency]

        self._ttft = accounts(Latency.TTFT, ttft_prior_s) or [LatencyAccount(_NO_SLO, ttft_prior_s)]
        self._tpot = accounts(Latency.TPOT, gap_prior_s)
        self._tbt = accounts(Latency.TBT, gap_prior_s)
        self.needs_gaps: Final = bool(self._tbt)
        """True when an SLO bounds gaps, so that ``gaps`` must be called."""

        self.is_relative: Final = all(slo.limit_s is None for slo in slos)
        """True when no SLO asks for other latencies than those without offline work."""

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that offline work may add to the TTFT of a request that
        arrives now."""
        # It waits for the rest of a step, and is served in another one as long.
        return min([account.added_s(account.target_s / 2) for account in self._ttft])

    @property
    def prompt_s(self) -> float:
        """Longest time, in seconds, that may be added to the TTFT of every request."""
        return min([account.surely_s for account in self._ttft])

    @property
    def prompt_share(self) -> float:
        """The share of the time until a first token is due that prompts may take beside decodes:
        less than 1 with a debt of first tokens, more with one of gaps, which prompts without
        decodes would increase."""
        of_ttft = min([account.share for account in self._ttft])
        of_gaps = min([account.share for account in self._tpot + self._tbt], default=1.0)
        return of_ttft / of_gaps if of_gaps > 0 else math.inf

    def gap_s(self, slack_s: float) -> float:
        """Return the longest time, in seconds, that offline work may add to a step whose online
        decodes could wait ``slack_s`` longer."""
        slack_s = max(slack_s, 0.0)
        return min([one.added_s(slack_s) for one in self._tpot + self._tbt], default=slack_s)

    @property
    def gap_share(self) -> float:
        """The share of the TPOT target that offline work may take of a step: 1 without one."""
        target_s = self.targets.tpot_s
        return 1.0 if target_s is None else self.gap_s(target_s) / target_s

    @property
    def targets(self) -> SloTargets:
        """TTFT and TPOT targets of a request that brought none of its own."""
        ttft_s = min([account.target_s for account in self._ttft])
        tpot_s = min((account.target_s for account in self._tpot + self._tbt), default=None)
        return SloTargets(None if math.isinf(ttft_s) else ttft_s, tpot_s)

    def first_token(
        self, info: RequestInfo, ttft_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record a TTFT, and the baseline's TTFT of the same request (None if unknown)."""
        values = {LatencyPair(info.ttft_target_s, ttft_s, alone_s): 1}
        for account in self._ttft:
            account.observe(values, now_s)

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None]], now_s: float) -> None:
        """Record gaps that became known together: request, measured, in the baseline.

        In seconds; the baseline's gap is None if unknown. O(gaps).
        """
        # Gaps that end with the same step are mostly equal.
        values = Counter(
            [LatencyPair(info.tpot_target_s, gap_s, alone_s) for info, gap_s, alone_s in gaps]
        )
        for account in self._tbt:
            account.observe(values, now_s)

    def finished(
        self, info: RequestInfo, tpot_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record the TPOT of a request that has ended, and its TPOT in the baseline."""
        for account in self._tpot:
            account.observe({LatencyPair(info.tpot_target_s, tpot_s, alone_s): 1}, now_s)
