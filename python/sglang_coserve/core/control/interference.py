"""Compares the latencies of online requests with those of the no-interference baseline."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.control.allowance import Allowance, Alone
from sglang_coserve.core.control.baseline import (
    Baseline,
    BaselineRequest,
    EngineSize,
    shadow_kv,
)
from sglang_coserve.core.control.bill import Bill, Delay, WorkMark
from sglang_coserve.core.control.cache_comparison import CacheComparison
from sglang_coserve.core.control.objective import Objective
from sglang_coserve.core.control.shadow_kv import ShadowKv
from sglang_coserve.core.control.slo import Slo, request_targets
from sglang_coserve.core.control.slo_monitor import SloMonitor, TokenTimes
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import JobTokens
from sglang_coserve.core.step_stats import StepStats

_MOST_LAG_S: Final = 300.0
"""What the baseline is not through with so long after the engine is given up: half of the time for
which requests are reported. A baseline whose model is too slow would keep ever more of them."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Watched(BaselineRequest):
    """An online request that has not been judged yet, with its token times in the baseline."""

    info: RequestInfo
    baseline: Baseline[_Watched] | None
    """That of its micro-batch."""

    arrived_work: WorkMark
    first_work: WorkMark
    """What the bill knew of offline work when it arrived and at its first token."""

    measured: TokenTimes = field(default_factory=TokenTimes)
    computed_tokens: int = 0
    """Prompt tokens that the engine has computed."""


class Interference:
    """Tracks online requests from arrival to end, in the engine and in the baseline.

    A request is judged once it has ended in both. Without a baseline (a server without
    a latency model), or if the baseline has given the request up or is not through with it after
    five minutes, it is judged by its measured latencies alone.
    """

    def __init__(
        self,
        slos: Sequence[Slo],
        model: LatencyModel | None,
        engine: EngineSize | None = None,
        *,
        stream_slowdown: float | None = None,
    ) -> None:
        """Start without requests; ``slos`` and ``stream_slowdown`` come from an ``Objective``.

        Until baseline latencies are known, the TTFT is assumed to be the predicted time of a prompt
        of one token, and the gap the predicted time of a single decode. Both are lower bounds.
        Without a ``model`` to predict them there is no baseline, and the allowance bounds nothing.
        """
        absolute = [slo for slo in slos if slo.limit_s is not None]
        paces = Objective(tuple(slos), stream_slowdown).bounds_streams
        self.monitor: Final = SloMonitor(
            request_targets(absolute), slos, stream_slowdown=stream_slowdown if paces else None
        )
        """Judges the requests that ended."""

        self._baselines: list[Baseline[_Watched]] = []
        """One for each micro-batch, which has an equal part of the engine. That the slowest
        micro-batch delays the others is ignored, so the baseline is a little too fast."""

        self.kv: ShadowKv | None = None
        """KV of the baseline; None without a baseline."""

        self.cache: Final = CacheComparison()
        """Prompt tokens found in the caches of engine and baseline; zeros without a baseline."""

        ttft_s = gap_s = 0.0
        if model is not None:
            engine = engine or EngineSize()
            kv = self.kv = shadow_kv(engine)
            self._baselines = [Baseline(engine.share, kv) for _ in range(engine.micro_batches)]
            ttft_s, gap_s = model.predict(StepStats.of([(1, 0)])), fixed_s(model)
        self.allowance: Final = Allowance(
            slos if self._baselines else (), ttft_prior_s=ttft_s, gap_prior_s=gap_s
        )
        """The bounds on offline work."""

        self._bill = Bill()
        self._live: dict[str, _Watched] = {}
        """By rid: those that have not ended in the engine."""

        self._watched: set[_Watched] = set()
        self._ended: deque[_Watched] = deque()
        """In order: those that the baseline was not through with when they ended in the engine."""

        self._now_s = -math.inf
        self.is_judging = True
        """False once requests are not followed any more."""

    def stop(self) -> None:
        """Follow no request any more."""
        self.is_judging = False

    def judged_s(self, now_s: float) -> float:
        """Return the time up to which requests were followed: now, unless that has stopped."""
        return now_s if self.is_judging else min(now_s, self._now_s)

    @property
    def bill(self) -> Bill | None:
        """How much later than alone requests were; None without a baseline."""
        return self._bill if self._baselines else None

    @property
    def decodes_alone(self) -> int:
        """Online requests that decode in the baseline, which is a little behind; 0 if unknown."""
        if not self.is_judging:
            return 0
        return sum(baseline.num_decodes for baseline in self._baselines)

    def flushed(self) -> None:
        """Empty the prefix cache of the baseline."""
        if self.kv is not None:
            self.kv.flush()

    def __len__(self) -> int:
        return len(self._watched)

    def arrived(
        self, info: RequestInfo, token_ids: bytes = b"", *, beside_offline: bool = False
    ) -> None:
        """Start to track an online request; ignored if it is offline or tracked already.

        ``token_ids`` is its prompt, packed; empty if unknown. ``beside_offline``: the engine has
        offline requests. O(jobs that the bill tells apart).
        """
        if not info.is_online or info.rid in self._live:
            return
        self._now_s = max(self._now_s, info.arrival_s)
        if not self._watched:
            self._bill.period_begins(beside_offline=beside_offline)
        work = self._bill.mark(len(self._watched))
        baseline = min(self._baselines, key=len, default=None)
        watched = self._live[info.rid] = _Watched(
            arrival_s=info.arrival_s,
            prompt_left_tokens=info.prompt_tokens,
            token_ids=token_ids,
            info=info,
            baseline=baseline,
            arrived_work=work,
            first_work=work,
        )
        self._watched.add(watched)
        if baseline is not None:
            baseline.arrived(watched)

    def worked(self, offline_s: float, jobs: Sequence[JobTokens]) -> None:
        """Record the time that a step spent on offline requests, before its tokens. O(jobs)."""
        self._bill.worked(offline_s, jobs)

    def computed(self, rid: str, tokens: int) -> None:
        """Record that the engine computed prompt tokens of a request. O(1)."""
        if rid in self._live:
            self._live[rid].computed_tokens += tokens

    def produced(self, rid: str, now_s: float) -> None:
        """Record a token of a request; ignored if it is not tracked. O(1)."""
        self._now_s = now_s
        watched = self._live.get(rid)
        if watched is None:
            return
        if not watched.measured.tokens:
            watched.first_work = self._bill.mark(len(self._watched), watched.arrived_work)
            if watched.tokens:
                self._count_cached(watched)
        else:
            self.monitor.gap(watched.info, watched.measured.last_s, now_s)
        watched.measured.came(now_s)
        watched.known_tokens += 1

    def ended(self, rid: str, ending: Ending, token_ids: bytes = b"") -> None:
        """Record that a request has ended; ignored if it is not tracked. O(1).

        ``token_ids`` are its prompt and output, packed; empty if unknown.
        """
        watched = self._live.pop(rid, None)
        if watched is None:
            return
        baseline = watched.baseline
        if token_ids:
            watched.token_ids = token_ids
        if ending is Ending.COMPLETE:
            if baseline is None or not watched.is_in:
                self._judge(watched)  # The baseline has given it up, if there is one.
            else:
                baseline.ended(watched)
                if watched.has_all:
                    self._judge(watched, alone=watched)
                else:
                    self._ended.append(watched)
            return
        if baseline is not None:
            baseline.drop(watched)
        self._watched.remove(watched)
        if ending is Ending.REFUSED:
            self.monitor.failed(watched.info, self._now_s, watched.measured)

    def advance(self, predict: Callable[[StepStats], float], now_s: float) -> None:
        """Advance the baseline as far as its tokens are known. O(online requests) per engine step.

        Every request that arrived by ``now_s`` is tracked; ``predict`` returns the duration of a
        step in seconds.
        """
        self._now_s = max(self._now_s, now_s)
        gaps: Counter[Alone] = Counter()
        for baseline in self._baselines:
            for end_s, decoded, before_s, first, complete in baseline.advance(predict, now_s):
                if decoded:
                    own_s = [watched.info.tpot_target_s for watched in decoded]
                    # Almost all of them had their last token in the same step.
                    equal = Counter(zip(own_s, before_s, strict=True))
                    for (target_s, last_s), count in equal.items():
                        gaps[target_s, end_s - last_s] += count
                        has_target = target_s is not None
                        self.monitor.gaps_alone(end_s - last_s, end_s, count, has_target=has_target)
                for watched in first:
                    info = watched.info
                    self.allowance.first_token(info, end_s - info.arrival_s, self._now_s)
                    if watched.measured.tokens:
                        self._count_cached(watched)
                for watched in complete:
                    self._judge(watched, alone=watched)
        if gaps:
            self.allowance.gaps(gaps, self._now_s)
        while self._ended and self._ended[0].measured.last_s < self._now_s - _MOST_LAG_S:
            late = self._ended.popleft()
            if late in self._watched and late.baseline is not None:
                late.baseline.drop(late)
                self._judge(late)

    def _count_cached(self, watched: _Watched) -> None:
        """Compare the caches, once a request has its first token in the engine and alone."""
        if watched.found_tokens is not None:
            prompt_tokens = watched.info.prompt_tokens
            self.cache.add(prompt_tokens, watched.computed_tokens, watched.found_tokens)

    def _judge(self, watched: _Watched, alone: TokenTimes | None = None) -> None:
        self._watched.remove(watched)
        info, measured = watched.info, watched.measured
        if not measured.tokens:
            return
        if alone is not None:
            # Where the baseline gave it up, its delay may have any reason: nothing is learned.
            ttft_s, total_s = measured.first_s - alone.first_s, measured.last_s - alone.last_s
            delay = Delay(ttft_s, total_s, info.rid, measured.last_s)
            found_tokens = watched.found_tokens or 0
            lost_prefix = watched.computed_tokens > info.prompt_tokens - found_tokens
            self._bill.charge(
                delay, watched.arrived_work, watched.first_work, lost_prefix=lost_prefix
            )
            if measured.tokens > 1:
                self.allowance.finished(info, alone.tpot_s, self._now_s)
        self.monitor.finished(info, measured, alone)
