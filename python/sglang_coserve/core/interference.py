"""What online requests got, beside what they would have got alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_coserve.core.baseline import Baseline
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.slo_monitor import SloMonitor, TokenTimes
from sglang_coserve.core.snapshot import RequestInfo

__all__ = ["Interference"]


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


class Interference:
    """Follows online requests from arrival to end, in the engine and in the baseline.

    A request is judged once it has ended in both. Without a baseline (a server that has
    no latency model) it is judged by what was measured.
    """

    def __init__(self, monitor: SloMonitor, baseline: Baseline | None) -> None:
        self._monitor = monitor
        self._baseline = baseline
        self._watched: dict[str, _Watched] = {}

    @property
    def monitor(self) -> SloMonitor:
        """What judges the requests."""
        return self._monitor

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
        if watched.tokens == 0:
            watched.first_s = now_s
        elif self._monitor.needs_gaps:
            self._monitor.gap(watched.info, watched.last_s, now_s)
        watched.last_s = now_s
        watched.tokens += 1
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
        monitor = self._monitor
        for rid, number, at_s in self._baseline.advance(predict, now_s):
            watched = self._watched.get(rid)
            if watched is None:
                continue
            if number == 1:
                watched.alone_first_s = at_s
            elif monitor.needs_gaps:
                monitor.gap_alone(watched.info, watched.alone_last_s, at_s)
            watched.alone_last_s = at_s
            watched.alone_tokens = number
            if watched.is_finished:
                self._judge_if_complete(watched)

    def _judge_if_complete(self, watched: _Watched) -> None:
        if watched.alone_tokens >= watched.tokens:
            self._judge(watched)

    def _judge(self, watched: _Watched) -> None:
        alone = None
        if self._baseline is not None:
            alone = TokenTimes(watched.alone_first_s, watched.alone_last_s, watched.alone_tokens)
        del self._watched[watched.info.rid]
        measured = _times(watched)
        if measured is not None:
            self._monitor.finished(watched.info, measured, alone)

    def _forget(self, rid: str) -> _Watched | None:
        if self._baseline is not None:
            self._baseline.ended(rid)
        return self._watched.pop(rid, None)


def _times(watched: _Watched) -> TokenTimes | None:
    if not watched.tokens:
        return None
    return TokenTimes(watched.first_s, watched.last_s, watched.tokens)
