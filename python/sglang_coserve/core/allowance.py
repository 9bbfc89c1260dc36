"""How long offline work may keep online requests waiting: learned from the harm it did."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from sglang_coserve.core.integrator import GAIN, Integrator
from sglang_coserve.core.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets, summarize

__all__ = ["Allowance"]

_TAILS: Final[Mapping[Statistic, float]] = MappingProxyType(
    {Statistic.P50: 0.5, Statistic.P90: 0.1, Statistic.P99: 0.01}
)

_FIRST_ARRIVAL: Final = 1 / 8
_MOST_ARRIVAL: Final = 1 / 2
"""Of a TTFT target: who arrives waits for the rest of a step and is served in one as long, so two
of them must fit. Where one might fill it (simulated, Llama-3.1-8B on an H100, prompts of 256 and
outputs of 512 tokens, 20% load, target 1.5 x the P99 alone), the learned factor swung more, and
offline work got 13,177 tokens/s instead of 19,309."""

_GAPS_GAIN: Final = 0.02
"""A tenth of that for requests, as there are so many more gaps. Simulated as above at 1.1 x:
15,897 offline tokens/s with it, 14,574 with 0.1 and 11,870 with 0.2; harmed 1.0, 0.9 and 0.9%."""

_WINDOW: Final = 512
"""Requests of the baseline that a relative target follows, as many as ``SloMonitor`` judges."""

_GAPS_WINDOW: Final = 8192
_GAPS_SAMPLED: Final = 16
"""Every so many gaps one counts for a relative target: those of one step are nearly equal, and the
window must span many prompts also where hundreds of requests decode at once."""

_RECOMPUTED_SHARE: Final = 1 / 128
_MEAN_OF: Final = 64


class Allowance:
    """One integrator for each SLO, on the share of requests or gaps that were harmed.

    A request, or a gap between two tokens, is harmed when it misses its target and would
    not have in the no-interference baseline. An SLO on a percentile allows as many as its
    tail; for one on a mean, harm is how far it is exceeded. A relative SLO follows the same
    statistic of what the last requests get in the baseline.

    The deadlines of requests bound a step before any of this: see ``online_phase``. What
    they cannot know is who arrives during the step, and what a step takes longer than
    predicted. ``arrival_s`` and ``gap_share`` leave room for that, as much as harm asks.
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
        """True when an SLO bounds gaps, so that ``gaps`` must be called."""

    @property
    def arrival_s(self) -> float:
        """The longest that who arrives may wait for a step that does not yield."""
        return min((loop.target_s * loop.factor for loop in self._ttft), default=math.inf)

    @property
    def gap_share(self) -> float:
        """The part of the time until a decode's deadline that offline work may fill."""
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
            loop.observe([_Value(info.ttft_target_s, ttft_s, alone_s)])

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None]]) -> None:
        """Note gaps that became known together, each as measured and alone. O(gaps)."""
        values = [_Value(info.tpot_target_s, gap_s, alone_s) for info, gap_s, alone_s in gaps]
        for loop in self._tbt:
            loop.observe(values)

    def finished(self, info: RequestInfo, tpot_s: float, alone_s: float | None) -> None:
        """Note the TPOT of a request that has ended, and what it would have been alone."""
        for loop in self._tpot:
            loop.observe([_Value(info.tpot_target_s, tpot_s, alone_s)])


class _Value(NamedTuple):
    own_target_s: float | None
    measured_s: float
    alone_s: float | None


class _Loop:
    """One SLO: its target, and the factor that keeps it."""

    def __init__(self, slo: Slo, prior_s: float) -> None:
        first, most = 1.0, 1.0
        if slo.latency is Latency.TTFT:
            first, most = _FIRST_ARRIVAL, _MOST_ARRIVAL
        self._slo = slo
        self._tail = _TAILS.get(slo.statistic)
        gain = _GAPS_GAIN if slo.latency is Latency.TBT else GAIN
        self._integrator = Integrator(self._tail or 0.0, first=first, most=most, gain=gain)
        is_tbt = slo.latency is Latency.TBT
        self._alone_s: deque[float] = deque(maxlen=_GAPS_WINDOW if is_tbt else _WINDOW)
        self._sampled = _GAPS_SAMPLED if is_tbt else 1
        self._skipped = self._sampled - 1
        self._since_recomputed = 0
        self._mean_count = 1.0
        self.target_s = slo.limit_over_value(prior_s)

    @property
    def factor(self) -> float:
        return self._integrator.factor

    def observe(self, values: Sequence[_Value]) -> None:
        """Take values into account that became known together.

        They count as one observation, or as more or less of one where they are more or fewer
        than usual: a step that is too long makes all its decodes late at once.
        """
        harms = [harm for value in values if (harm := self._harm(value)) is not None]
        if self._slo.tolerance is not None:
            self._follow([value.alone_s for value in values if value.alone_s is not None])
        if harms:
            self._mean_count += (len(harms) - self._mean_count) / _MEAN_OF
            self._integrator.observe(sum(harms) / len(harms), len(harms) / self._mean_count)

    def _harm(self, value: _Value) -> float | None:
        """Return how much of a harm it is; None of a value that would be late alone."""
        target_s = value.own_target_s or self.target_s
        alone_s = value.alone_s or 0.0
        if self._tail is None:
            return min(value.measured_s / max(target_s, alone_s) - 1, 1.0)
        return None if alone_s > target_s else float(value.measured_s > target_s)

    def _follow(self, alone_s: Sequence[float]) -> None:
        sample = alone_s[self._sampled - 1 - self._skipped :: self._sampled]
        self._skipped = (self._skipped + len(alone_s)) % self._sampled
        self._alone_s += sample
        self._since_recomputed += len(sample)
        if self._since_recomputed > _RECOMPUTED_SHARE * len(self._alone_s):
            self._since_recomputed = 0
            limit_s = self._slo.limit_over_value(self._slo.statistic.of(summarize(self._alone_s)))
            self.target_s = limit_s
