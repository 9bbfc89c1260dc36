"""What online requests got, beside what they would have got alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_coserve.core.allowance import Allowance
from sglang_coserve.core.baseline import Baseline, EngineSize
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.bottleneck import fixed_s
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.slo import Slo
from sglang_coserve.core.slo_monitor import SloMonitor, TokenTimes
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

__all__ = ["Interference"]


_FEW_REQUESTS: Final = 64


@dataclass(slots=True)
class _Watched:
    """An online request that has not ended, or has not ended in the baseline."""

    info: RequestInfo
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    alone_first_s: float = 0.0
    alone_last_s: float = 0.0
    alone_tokens: int = 0
    is_finished: bool = False
    gaps_s: deque[float] = field(default_factory=deque)
    """Of the engine, those that are not known in the baseline yet."""


class Interference:
    """Follows online requests from arrival to end, in the engine and in the baseline.

    A request is judged once it has ended in both. Without a baseline (a server that has
    no latency model) it is judged by what was measured.
    """

    def __init__(
        self,
        monitor: SloMonitor,
        baseline: Baseline | None,
        allowance: Allowance,
    ) -> None:
        """``allowance`` is told of each latency once it is known in both."""
        self._monitor = monitor
        self._baseline = baseline
        self._allowance = allowance
        self._watched: dict[str, _Watched] = {}
        self._ended = 0
        self._gaps_per_request = 0.0

    @classmethod
    def of(
        cls, slos: Sequence[Slo], model: LatencyModel, engine: EngineSize | None = None
    ) -> Interference:
        """Judge by SLOs, beside an engine of this size that has only online requests.

        What requests get alone is taken, until that is known, for what ``model`` says of one
        step: with a whole chunk of prompts, and of one decode.
        """
        engine = engine or EngineSize()
        allowance = Allowance(
            slos,
            ttft_prior_s=model.predict(BatchStats.of([(engine.chunk_tokens, 0)])),
            gap_prior_s=fixed_s(model),
        )
        return cls(SloMonitor(SloTargets(), slos), engine.baseline(), allowance)

    @property
    def allowance(self) -> Allowance:
        """What learns from the harm."""
        return self._allowance

    @property
    def monitor(self) -> SloMonitor:
        """What judges the requests."""
        return self._monitor

    @property
    def gaps_per_request(self) -> float:
        """Mean gaps between the tokens of the requests that ended lately, at least 1."""
        return max(self._gaps_per_request, 1.0)

    def __len__(self) -> int:
        return len(self._watched)

    def arrived(self, info: RequestInfo, cached_tokens: int = 0) -> None:
        """Follow a request from now on; one that is offline, or is followed, is left alone. O(1).

        ``cached_tokens`` of its prompt need not be computed.
        """
        if not info.is_online or info.rid in self._watched:
            return
        self._watched[info.rid] = _Watched(info)
        if self._baseline is not None:
            self._baseline.arrived(info.rid, info.arrival_s, info.prompt_tokens, cached_tokens)

    def produced(self, rid: str, now_s: float) -> None:
        """Note that a token came out; of a request that is not followed it says nothing. O(1)."""
        watched = self._watched.get(rid)
        if watched is None:
            return
        watched.tokens += 1
        if watched.tokens == 1:
            watched.first_s = now_s
            self._learn_first_token(watched)
        else:
            self._measure_gap(watched, now_s)
        watched.last_s = now_s
        if self._baseline is not None:
            self._baseline.produced(rid)

    def finished(self, rid: str) -> None:
        """Note that a request has all its tokens. O(1)."""
        watched = self._watched.get(rid)
        if watched is None:
            return
        watched.is_finished = True
        if self._baseline is None:
            self._judge(watched)
        else:
            self._baseline.ended(rid)
            self._judge_if_complete(watched)

    def refused(self, rid: str, now_s: float) -> None:
        """Note that the server gave a request up. O(1)."""
        watched = self._forget(rid)
        if watched is not None:
            self._monitor.failed(watched.info, now_s, _times(watched))

    def forget(self, rid: str) -> None:
        """Follow a request no longer that has not finished: its client took it back. O(1)."""
        watched = self._watched.get(rid)
        if watched is not None and not watched.is_finished:
            self._forget(rid)

    def advance(self, predict: Callable[[BatchStats], float], now_s: float) -> None:
        """Run the baseline on as far as it is known; O(online rows) a step of the engine.

        Args:
            predict: Seconds of a step.
            now_s: Every request that arrived by now is followed.
        """
        if self._baseline is None:
            return
        monitor, allowance = self._monitor, self._allowance
        gaps: list[tuple[RequestInfo, float, float | None]] = []
        get = self._watched.get
        for rid, number, at_s in self._baseline.advance(predict, now_s):
            watched = get(rid)
            if watched is None:
                continue
            if number == 1:
                watched.alone_first_s = at_s
                watched.alone_tokens = 1
                self._learn_first_token(watched)
            else:
                if monitor.needs_gaps:
                    monitor.gap_alone(watched.info, watched.alone_last_s, at_s)
                if watched.gaps_s:
                    alone_s = at_s - watched.alone_last_s
                    gaps.append((watched.info, watched.gaps_s.popleft(), alone_s))
            watched.alone_last_s = at_s
            watched.alone_tokens = number
            if watched.is_finished:
                self._judge_if_complete(watched)
        if gaps:
            allowance.gaps(gaps)

    def _learn_first_token(self, watched: _Watched) -> None:
        """Tell of a first token once it is known in both."""
        if not watched.tokens:
            return
        arrival_s = watched.info.arrival_s
        if self._baseline is None:
            self._allowance.first_token(watched.info, watched.first_s - arrival_s, None)
        elif watched.alone_tokens:
            ttft_s, alone_s = watched.first_s - arrival_s, watched.alone_first_s - arrival_s
            self._allowance.first_token(watched.info, ttft_s, alone_s)

    def _measure_gap(self, watched: _Watched, now_s: float) -> None:
        if self._monitor.needs_gaps:
            self._monitor.gap(watched.info, watched.last_s, now_s)
        if not self._allowance.needs_gaps:
            return
        gap_s = now_s - watched.last_s
        if self._baseline is None:
            self._allowance.gaps([(watched.info, gap_s, None)])
        else:
            watched.gaps_s.append(gap_s)

    def _judge_if_complete(self, watched: _Watched) -> None:
        if watched.alone_tokens >= watched.tokens:
            self._judge(watched)

    def _judge(self, watched: _Watched) -> None:
        alone = None
        if self._baseline is not None:
            alone = TokenTimes(watched.alone_first_s, watched.alone_last_s, watched.alone_tokens)
        del self._watched[watched.info.rid]
        measured = _times(watched)
        if measured is None:
            return
        self._ended += 1
        gaps = measured.tokens - 1
        weight = 1 / min(self._ended, _FEW_REQUESTS)
        self._gaps_per_request += weight * (gaps - self._gaps_per_request)
        self._monitor.finished(watched.info, measured, alone)
        if measured.tokens > 1:
            tpot_alone_s = None if alone is None else alone.tpot_s
            self._allowance.finished(watched.info, measured.tpot_s, tpot_alone_s)

    def _forget(self, rid: str) -> _Watched | None:
        if self._baseline is not None:
            self._baseline.ended(rid)
        return self._watched.pop(rid, None)


def _times(watched: _Watched) -> TokenTimes | None:
    if not watched.tokens:
        return None
    return TokenTimes(watched.first_s, watched.last_s, watched.tokens)
