"""Learns how long offline work may delay online requests, from the harm it has done so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sglang_coserve.core.control.integrator import GAIN, LEAST, Integrator
from sglang_coserve.core.control.own_targets import OwnTargets
from sglang_coserve.core.control.relative_target import LatencyPair, RelativeTarget
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

__all__ = ["Allowance"]

_TAILS: Final[Mapping[Statistic, float]] = MappingProxyType(
    {Statistic.P50: 0.5, Statistic.P90: 0.1, Statistic.P99: 0.01}
)

_FIRST_ARRIVAL: Final = 1 / 8
_MOST_ARRIVAL: Final = 1 / 2
"""First and largest share of the TTFT target that a request may wait for a running step. It waits
for the rest of that step and is served in another one as long, so two steps must fit: at most 1/2.
With 1 (simulated, Llama-3.1-8B on an H100, prompts of 256 and outputs of 512 tokens, 20% load,
target 1.5 x the P99 of the baseline) the learned factor swung more, and offline work got
13,177 tokens/s instead of 19,309."""

_GAPS_GAIN: Final = 0.1
"""Half of the gain for requests, as gaps are far more numerous. A share that is too large must fall
within seconds: slower decodes leave more requests in flight, their steps are longer, and what
has queued up takes as long again to go away (docs/benchmarks.md, "Congestion"). Simulated on an
H100 (``bound.py --requests 800 --lengths 256x512 --seed`` 1, 2), 0.02 had 7% more offline work."""

_MEAN_OF: Final = 64
"""Observations in the moving average of how many values arrive together."""


class Allowance:
    """Limits the delay from offline work: one integrator per SLO, driven by the harmed share.

    A request, or a gap between two tokens, is harmed when it misses its target and would
    not have missed it in the no-interference baseline. An SLO on a percentile tolerates as large
    a harmed share as its tail (1% for P99); for an SLO on a mean, the harm is how far the mean is
    exceeded. The target of a relative SLO follows the baseline (``RelativeTarget``).

    The deadlines of running requests already bound each step (``online_phase``). They cannot
    account for requests that arrive during the step, nor for steps that take longer than
    predicted. ``arrival_s`` and ``gap_share`` reserve room for both, sized by the harm measured.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests.

        Args:
            slos: Absolute limits, and tolerances relative to the no-interference baseline.
            ttft_prior_s: Baseline TTFT assumed until one is known.
            gap_prior_s: Baseline gap assumed until one is known.
        """
        self._ttft = [_Loop(slo, ttft_prior_s) for slo in slos if slo.latency is Latency.TTFT]
        self._tpot = [_Loop(slo, gap_prior_s) for slo in slos if slo.latency is Latency.TPOT]
        self._tbt = [_Loop(slo, gap_prior_s) for slo in slos if slo.latency is Latency.TBT]
        self._own_ttft = OwnTargets(first=_FIRST_ARRIVAL, most=_MOST_ARRIVAL)
        self._in_time, self._in_pace = (
            Integrator(_TAILS[Statistic.P99], first=1.0) for _ in range(2)
        )
        self.needs_gaps: Final = bool(self._tbt)
        """True when an SLO bounds gaps, so that ``gaps`` must be called."""

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that an arriving request may wait for a step that cannot be
        suspended."""
        bounds_s = [loop.target_s * loop.factor for loop in self._ttft]
        return min([*bounds_s, self._own_ttft.arrival_s])

    @property
    def shed_share(self) -> float:
        """Share of the time until its TTFT deadline that a request's first token may be predicted
        to take; a request above it is refused (``Overload.SHED``). Learned so that 1% of the
        requests are late although every one is served as late as its deadline allows."""
        return self._in_time.factor

    @property
    def shed_pace(self) -> float:
        """Share of the time until a decode misses its TPOT target that a step may take when it
        also computes new prompts (``Overload.SHED``)."""
        return self._in_pace.factor

    @property
    def gap_share(self) -> float:
        """Share of the slack of the online decodes that offline work may fill. Slack is the time
        until the next token is late, less the time of the decodes themselves."""
        return min((loop.factor for loop in self._tpot + self._tbt), default=1.0)

    @property
    def targets(self) -> SloTargets:
        """TTFT and TPOT targets of a request that brought none of its own."""
        ttft_s = min((loop.target_s for loop in self._ttft), default=None)
        tpot_s = min((loop.target_s for loop in self._tpot + self._tbt), default=None)
        return SloTargets(ttft_s, tpot_s)

    @property
    def tpot_target_s(self) -> float | None:
        """Target for a request's mean gap in seconds; None if no SLO bounds the TPOT."""
        return min((loop.target_s for loop in self._tpot), default=None)

    def first_token(
        self, info: RequestInfo, ttft_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record a TTFT, and the baseline's TTFT of the same request (None if unknown)."""
        value = LatencyPair(info.ttft_target_s, ttft_s, alone_s)
        self._own_ttft.observe(value, now_s)
        target_s = info.ttft_target_s or self.targets.ttft_s
        if target_s is not None:
            self._in_time.observe(float(ttft_s > target_s))
        for loop in self._ttft:
            loop.observe({value: 1}, now_s)

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None]], now_s: float) -> None:
        """Record gaps that became known together: request, measured, in the baseline.

        In seconds; the baseline's gap is None if unknown. O(gaps).
        """
        # Gaps that end with the same step are mostly equal.
        values = Counter(
            [LatencyPair(info.tpot_target_s, gap_s, alone_s) for info, gap_s, alone_s in gaps]
        )
        for loop in self._tbt:
            loop.observe(values, now_s)

    def finished(
        self, info: RequestInfo, tpot_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record the TPOT of a request that has ended, and its TPOT in the baseline."""
        target_s = info.tpot_target_s or self.targets.tpot_s
        if target_s is not None:
            self._in_pace.observe(float(tpot_s > target_s))
        for loop in self._tpot:
            loop.observe({LatencyPair(info.tpot_target_s, tpot_s, alone_s): 1}, now_s)


class _Loop:
    """The control loop of one SLO: its target, and the factor that is adjusted to keep it."""

    def __init__(self, slo: Slo, prior_s: float) -> None:
        first, most = 1.0, 1.0  # Deadlines alone hold the mean of a request's gaps.
        if slo.latency is Latency.TTFT:
            first, most = _FIRST_ARRIVAL, _MOST_ARRIVAL
        gain = GAIN
        if slo.latency is Latency.TBT:
            first = LEAST  # Long gaps of the first seconds would be the P99 of minutes.
            gain = _GAPS_GAIN
        self._tail = _TAILS.get(slo.statistic)
        self._integrator = Integrator(self._tail or 0.0, first=first, most=most, gain=gain)
        self._limit_s = slo.limit_s
        self._relative = RelativeTarget(slo, prior_s)
        self._mean_count = 1.0

    @property
    def target_s(self) -> float:
        return self._limit_s or self._relative.limit_s

    @property
    def factor(self) -> float:
        return self._integrator.factor

    def observe(self, values: Mapping[LatencyPair, int], now_s: float) -> None:
        """Record values that became known together, with the count of each.

        Together they weigh as one observation, scaled by their number relative to the usual one:
        a step that is too long makes all of its decodes late at once.
        """
        harmed, judged = 0.0, 0
        for value, count in values.items():
            if (harm := self._harm(value)) is not None:
                harmed += count * harm
                judged += count
        if self._limit_s is None:
            self._relative.observe(values, now_s)
        if judged:
            self._mean_count += (judged - self._mean_count) / _MEAN_OF
            self._integrator.observe(harmed / judged, judged / self._mean_count)

    def _harm(self, value: LatencyPair) -> float | None:
        """Return the harm of a value, -1 to 1; None if it does not count.

        Lateness in the baseline is subtracted from the measured lateness, value by value but for
        their sum: both engines delay decodes for prompts, but not the same decodes. What the
        engine did for online requests meanwhile is no excuse: offline work leaves more of
        them in flight, and their steps take longer.

        A relative target is a percentile of the baseline's own values, so some of these are late
        by definition, and their average share is added back. Until enough baseline
        values are known to fill the tail, nothing counts: the limit is still too low, and the
        factor would stay low for the next 1,000 requests. Simulated
        (``bound.py --requests 1000 --lengths 256x512 --loads 0.2 --seed`` 1 to 4), an earlier
        version had 13,571 offline tokens/s at +10% on average with this rule, 7,037 without.
        """
        target_s = value.own_target_s or self.target_s
        alone_s = value.alone_s or 0.0
        if self._tail is None:
            return min(value.measured_s / max(target_s, alone_s) - 1, 1.0)
        harm = float(value.measured_s > target_s) - float(alone_s > target_s)
        if self._limit_s is not None or value.own_target_s is not None:
            return harm
        if self._relative.num_alone * self._tail < 1:
            return None
        return harm + self._relative.late_alone_share
