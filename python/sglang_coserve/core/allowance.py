"""How long offline work may keep online requests waiting: learned from the harm it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sglang_coserve.core.integrator import GAIN, Integrator
from sglang_coserve.core.own_targets import OwnTargets
from sglang_coserve.core.relative_target import Latencies, RelativeTarget
from sglang_coserve.core.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

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

_SPAN: Final = 1 << 12
_GAPS_SPAN: Final = 1 << 19
"""Requests, and gaps, that a relative target goes by. Simulated as below, prompts of 2,048 and
outputs of 64 tokens: from 8,192 gaps the P99 alone was known to 20%."""

_MEAN_OF: Final = 64


class Allowance:
    """One integrator for each SLO, on the share of requests or gaps that were harmed.

    A request, or a gap between two tokens, is harmed when it misses its target and would
    not have in the no-interference baseline. An SLO on a percentile allows as many as its
    tail; for one on a mean, harm is how far it is exceeded. The target of a relative SLO follows
    the baseline (``RelativeTarget``).

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
        self._own_ttft = OwnTargets(_SPAN, first=_FIRST_ARRIVAL, most=_MOST_ARRIVAL)
        self._in_time, self._in_pace = (
            Integrator(_TAILS[Statistic.P99], first=1.0) for _ in range(2)
        )
        self.needs_gaps: Final = bool(self._tbt)
        """True when an SLO bounds gaps, so that ``gaps`` must be called."""

    @property
    def arrival_s(self) -> float:
        """The longest that who arrives may wait for a step that does not yield."""
        bounds_s = [loop.target_s * loop.factor for loop in self._ttft]
        return min([*bounds_s, self._own_ttft.arrival_s])

    @property
    def shed_share(self) -> float:
        """The part of the time until its deadline that a first token may be predicted to take,
        or its request is refused (``Overload.SHED``): where every request is served as late as it
        can be, a hundredth may be late because a step took longer than predicted."""
        return self._in_time.factor

    @property
    def shed_pace(self) -> float:
        """The same of TPOT: the part of the time until a decode misses its target that a step may
        take for new prompts."""
        return self._in_pace.factor

    @property
    def gap_share(self) -> float:
        """The part of what a decode leaves of the time until its deadline that offline work may
        fill."""
        return min((loop.factor for loop in self._tpot + self._tbt), default=1.0)

    @property
    def targets(self) -> SloTargets:
        """The deadlines of a request that has none of its own."""
        ttft_s = min((loop.target_s for loop in self._ttft), default=None)
        tpot_s = min((loop.target_s for loop in self._tpot + self._tbt), default=None)
        return SloTargets(ttft_s, tpot_s)

    @property
    def tpot_target_s(self) -> float | None:
        """What a request's mean gap is promised to be; None: nothing is promised of means."""
        return min((loop.target_s for loop in self._tpot), default=None)

    def first_token(
        self, info: RequestInfo, ttft_s: float, alone_s: float | None, online_s: float = 0.0
    ) -> None:
        """Note a TTFT, and what it would have been alone; None if that is not known.

        ``online_s``, here and below, is what the engine did for online requests meanwhile.
        """
        value = Latencies(info.ttft_target_s, ttft_s, alone_s, online_s)
        self._own_ttft.observe(value)
        target_s = info.ttft_target_s or self.targets.ttft_s
        if target_s is not None:
            self._in_time.observe(float(ttft_s > target_s))
        for loop in self._ttft:
            loop.observe({value: 1})

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None, float]]) -> None:
        """Note gaps that became known together, each as measured, alone, and its online work.

        O(gaps).
        """
        # Those that end with one step are mostly equal.
        values = Counter(
            [
                Latencies(info.tpot_target_s, gap_s, alone_s, online_s)
                for info, gap_s, alone_s, online_s in gaps
            ]
        )
        for loop in self._tbt:
            loop.observe(values)

    def finished(
        self, info: RequestInfo, tpot_s: float, alone_s: float | None, online_s: float = 0.0
    ) -> None:
        """Note the TPOT of a request that has ended, and what it would have been alone."""
        target_s = info.tpot_target_s or self.targets.tpot_s
        if target_s is not None:
            self._in_pace.observe(float(tpot_s > target_s))
        for loop in self._tpot:
            loop.observe({Latencies(info.tpot_target_s, tpot_s, alone_s, online_s): 1})


class _Loop:
    """One SLO: its target, and the factor that keeps it."""

    def __init__(self, slo: Slo, prior_s: float) -> None:
        first, most = 1.0, 1.0
        if slo.latency is Latency.TTFT:
            first, most = _FIRST_ARRIVAL, _MOST_ARRIVAL
        gain, span = GAIN, _SPAN
        if slo.latency is Latency.TBT:
            gain, span = _GAPS_GAIN, _GAPS_SPAN
        self._tail = _TAILS.get(slo.statistic)
        self._integrator = Integrator(self._tail or 0.0, first=first, most=most, gain=gain)
        self._limit_s = slo.limit_s
        self._relative = RelativeTarget(slo, prior_s, span)
        self._mean_count = 1.0

    @property
    def target_s(self) -> float:
        return self._limit_s or self._relative.deadline_s

    @property
    def factor(self) -> float:
        return self._integrator.factor

    def observe(self, values: Mapping[Latencies, int]) -> None:
        """Take values into account that became known together, each so often.

        They count as one observation, or as more or less of one where they are more or fewer
        than usual: a step that is too long makes all its decodes late at once.
        """
        harmed, judged = 0.0, 0
        for value, count in values.items():
            if (harm := self._harm(value)) is not None:
                harmed += count * harm
                judged += count
        if self._limit_s is None:
            self._relative.observe(values)
        if judged:
            self._mean_count += (judged - self._mean_count) / _MEAN_OF
            self._integrator.observe(harmed / judged, judged / self._mean_count)

    def _harm(self, value: Latencies) -> float | None:
        """Return how much of a harm it is; None of a value that would be late alone.

        Whatever the baseline says, without offline work it would have taken as long as what
        the engine did for online requests meanwhile. Not so for a relative target: that holds
        what the baseline promises, also where prompts that had to wait come in larger groups.

        A relative target follows what comes of the values alone, so some are late alone. Which
        ones cannot be told by pairs: both engines delay decodes for a prompt, but other ones.
        So what is late alone counts against what is late, and may be as often as on average.
        Until as many values alone are known as its tail takes, nothing counts as harmed: the
        limit is too low, and 1,000 requests later the factor still was. Simulated
        (``bound.py --requests 1000 --lengths 256x512 --loads 0.2 --seed`` 1 to 4): 13,571 offline
        tokens/s at +10% on average with this, 7,037 without.
        """
        target_s = value.own_target_s or self._limit_s or self._relative.limit_s
        alone_s = value.alone_s or 0.0
        if self._limit_s is None and value.own_target_s is None and self._tail is not None:
            if self._relative.num_alone * self._tail < 1:
                return None
            is_late, is_late_alone = value.measured_s > target_s, alone_s > target_s
            return is_late - is_late_alone + self._relative.late_alone_share
        alone_s = max(alone_s, value.online_s)
        if self._tail is None:
            return min(value.measured_s / max(target_s, alone_s) - 1, 1.0)
        return None if alone_s > target_s else float(value.measured_s > target_s)
