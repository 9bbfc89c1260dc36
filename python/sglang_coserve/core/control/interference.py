"""Compares the latencies of online requests with those of the no-interference baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.control.allowance import Allowance
from sglang_coserve.core.control.baseline import Baseline, EngineSize
from sglang_coserve.core.control.bill import Bill, Delay, WorkMark
from sglang_coserve.core.control.pipeline_baseline import PipelineBaseline, baseline_of
from sglang_coserve.core.control.slo import Slo, request_targets
from sglang_coserve.core.control.slo_monitor import SloMonitor, TokenTimes
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import JobTokens
from sglang_coserve.core.step_stats import StepStats

__all__ = ["Interference"]


@dataclass(slots=True)
class _Watched:
    """An online request that has not ended yet, in the engine or in the baseline."""

    info: RequestInfo
    number: int
    """Its name in the baseline: a rid may be used again before the baseline is through with it."""

    arrived_work: WorkMark
    first_work: WorkMark
    """What the bill knew of offline work when it arrived and at its first token."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    alone_first_s: float = 0.0
    alone_last_s: float = 0.0
    alone_tokens: int = 0
    is_finished: bool = False


class Interference:
    """Tracks online requests from arrival to end, in the engine and in the baseline.

    A request is judged once it has ended in both. Without a baseline (a server without
    a latency model), or if the baseline has given the request up, it is judged by its measured
    latencies alone.
    """

    def __init__(
        self,
        monitor: SloMonitor,
        baseline: Baseline | PipelineBaseline | None,
        allowance: Allowance,
    ) -> None:
        """Start without requests; ``allowance`` gets the latencies of the baseline."""
        self._monitor = monitor
        self._baseline = baseline
        self._allowance = allowance
        self._bill = Bill()
        self._live: dict[str, _Watched] = {}
        """By rid: those that have not ended in the engine."""

        self._watched: dict[Hashable, _Watched] = {}
        """By number: those that have not been judged."""

        self._num_arrived = 0
        self._online_s = 0.0
        """Total time that the steps so far spent on online requests."""

        self._now_s = -math.inf

    @classmethod
    def of(
        cls, slos: Sequence[Slo], model: LatencyModel, engine: EngineSize | None = None
    ) -> Interference:
        """Return one that judges by ``slos``, with a baseline engine of the size ``engine``.

        Until baseline latencies are known, the TTFT is assumed to be the predicted time of a prompt
        of one token, and the gap that of a single decode: the least that they can be.
        """
        engine = engine or EngineSize()
        allowance = Allowance(
            slos,
            ttft_prior_s=model.predict(StepStats.of([(1, 0)])),
            gap_prior_s=fixed_s(model),
        )
        return cls(_monitor(slos), baseline_of(engine), allowance)

    @classmethod
    def measured(cls, slos: Sequence[Slo]) -> Interference:
        """Return one without a baseline, for lack of a latency model: it judges by ``slos``, and
        its allowance bounds nothing."""
        steers_nothing = Allowance((), ttft_prior_s=1.0, gap_prior_s=1.0)
        return cls(_monitor(slos), None, steers_nothing)

    @property
    def allowance(self) -> Allowance:
        """The bounds on offline work."""
        return self._allowance

    @property
    def monitor(self) -> SloMonitor:
        """The monitor that judges the requests that ended."""
        return self._monitor

    @property
    def online_s(self) -> float:
        """What all steps so far took for online requests, in seconds."""
        return self._online_s

    @property
    def bill(self) -> Bill | None:
        """How much later than alone requests were; None without a baseline."""
        return None if self._baseline is None else self._bill

    def __len__(self) -> int:
        return len(self._watched)

    def arrived(
        self, info: RequestInfo, cached_tokens: int = 0, *, beside_offline: bool = False
    ) -> None:
        """Start to track an online request; ignored if it is offline or tracked already.

        O(jobs that the bill tells apart).

        Args:
            info: The request.
            cached_tokens: How many tokens of its prompt are in the prefix cache.
            beside_offline: The engine has offline requests.
        """
        if not info.is_online or info.rid in self._live:
            return
        self._now_s = max(self._now_s, info.arrival_s)
        if not self._watched:
            self._bill.period_begins(beside_offline=beside_offline)
        work = self._bill.mark()
        number = self._num_arrived
        self._num_arrived += 1
        self._live[info.rid] = self._watched[number] = _Watched(info, number, work, work)
        if self._baseline is not None:
            self._baseline.arrived(number, info.arrival_s, info.prompt_tokens, cached_tokens)

    def worked(
        self, online_s: float, offline_s: float = 0.0, jobs: Sequence[JobTokens] = ()
    ) -> None:
        """Record the time that a step spent on each class, before its tokens. O(jobs).

        ``jobs`` are those of its offline requests.
        """
        self._online_s += online_s
        self._bill.worked(offline_s, jobs)

    def produced(self, rid: str, now_s: float) -> None:
        """Record a token of a request; ignored if it is not tracked. O(1)."""
        self._now_s = now_s
        watched = self._live.get(rid)
        if watched is None:
            return
        watched.tokens += 1
        if watched.tokens == 1:
            watched.first_s = now_s
            watched.first_work = self._bill.mark()
            if self._baseline is None:
                self._allowance.first_token(watched.info, None, now_s)
        else:
            if self._monitor.needs_gaps:
                self._monitor.gap(watched.info, watched.last_s, now_s)
            if self._baseline is None and self._allowance.needs_gaps:
                self._allowance.gaps([(watched.info, None)], now_s)
        watched.last_s = now_s
        if self._baseline is not None:
            self._baseline.produced(watched.number)

    def ended(self, rid: str, ending: Ending) -> None:
        """Record that a request has ended; ignored if it is not tracked. O(1)."""
        watched = self._live.pop(rid, None)
        if watched is None:
            return
        if ending is Ending.COMPLETE:
            self._finished(watched)
            return
        if self._baseline is not None:
            self._baseline.drop(watched.number)
        del self._watched[watched.number]
        if ending is Ending.REFUSED:
            self._monitor.failed(watched.info, self._now_s, _times(watched))

    def advance(self, predict: Callable[[StepStats], float], now_s: float) -> None:
        """Advance the baseline as far as its tokens are known. O(online requests) per engine step.

        Args:
            predict: Returns the duration of a step in seconds.
            now_s: The current time; every request that arrived by then is tracked.
        """
        self._now_s = max(self._now_s, now_s)
        if self._baseline is None:
            return
        monitor, allowance = self._monitor, self._allowance
        gaps: list[tuple[RequestInfo, float | None]] = []
        get = self._watched.get
        for key, position, at_s in self._baseline.advance(predict, now_s):
            watched = get(key)
            if watched is None:
                continue
            if position == 1:
                watched.alone_first_s = at_s
                allowance.first_token(watched.info, at_s - watched.info.arrival_s, self._now_s)
            else:
                if monitor.needs_gaps:
                    monitor.gap_alone(watched.info, watched.alone_last_s, at_s)
                if allowance.needs_gaps:
                    gaps.append((watched.info, at_s - watched.alone_last_s))
            watched.alone_last_s = at_s
            watched.alone_tokens = position
            if watched.is_finished:
                self._judge_if_complete(watched)
        if gaps:
            allowance.gaps(gaps, self._now_s)

    def _finished(self, watched: _Watched) -> None:
        watched.is_finished = True
        if self._baseline is None or watched.number not in self._baseline:
            self._judge(watched, None)  # The baseline has given it up, if there is one.
        else:
            self._baseline.ended(watched.number)
            self._judge_if_complete(watched)

    def _judge_if_complete(self, watched: _Watched) -> None:
        if watched.alone_tokens >= watched.tokens:
            times = watched.alone_first_s, watched.alone_last_s, watched.alone_tokens
            self._judge(watched, TokenTimes(*times))

    def _judge(self, watched: _Watched, alone: TokenTimes | None) -> None:
        del self._watched[watched.number]
        measured = _times(watched)
        if measured is None:
            return
        if alone is not None:
            delay = Delay(
                measured.first_s - alone.first_s,
                measured.last_s - alone.last_s,
                watched.info.rid,
                measured.last_s,
            )
            self._bill.charge(delay, watched.arrived_work, watched.first_work)
        self._monitor.finished(watched.info, measured, alone)
        if self._baseline is not None and alone is None:
            return  # Its delay may have any reason: nothing is learned from it.
        if measured.tokens > 1:
            tpot_alone_s = None if alone is None else alone.tpot_s
            self._allowance.finished(watched.info, tpot_alone_s, self._now_s)


def _monitor(slos: Sequence[Slo]) -> SloMonitor:
    return SloMonitor(request_targets([slo for slo in slos if slo.limit_s is not None]), slos)


def _times(watched: _Watched) -> TokenTimes | None:
    if not watched.tokens:
        return None
    return TokenTimes(watched.first_s, watched.last_s, watched.tokens)
