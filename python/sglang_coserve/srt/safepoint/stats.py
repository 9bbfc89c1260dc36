"""What safepoints did, and what they cost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.srt.safepoint.arrival_watch import AbortRequest
from sglang_coserve.srt.safepoint.in_flight import BatchKind

__all__ = ["SafepointStats"]

_SAMPLES: Final = 1024
_PERCENTILES: Final = (50, 90, 99)

_DELAYS: Final = (
    *("arrival_to_flag", "flag_to_abort", "arrival_to_abort", "rollback"),
    *("abort_to_first_token", "arrival_to_first_token"),
)


class SafepointStats:
    """Counts aborts, and times the way from an arrival to its first token.

    Delays are of the last thousand aborts, in seconds of ``time.perf_counter``. An
    arrival counts from when the server got the request.
    """

    def __init__(self) -> None:
        self.aborts: Counter[BatchKind] = Counter()
        self.shrunk: Counter[BatchKind] = Counter()
        """Those of the aborted batches whose online rows went on."""

        self.kept: Counter[str] = Counter()
        """Batches with offline rows that were not to be aborted, by reason."""

        self.wasted_s = 0.0
        self.wasted_tokens = 0.0
        self._delays: dict[str, deque[float]] = {name: deque(maxlen=_SAMPLES) for name in _DELAYS}
        self._arming_s: deque[float] = deque(maxlen=_SAMPLES)
        self._batch_s: deque[float] = deque(maxlen=_SAMPLES)
        # Arrivals that a batch was aborted for, with the times of arrival and abort.
        self._awaited: dict[str, tuple[float, float]] = {}

    def ran(self, arming_s: float, batch_s: float) -> None:
        """Note what it took to arm a batch and to disarm it, and how long it ran between."""
        self._arming_s.append(arming_s)
        self._batch_s.append(batch_s)

    def aborted(
        self,
        kind: BatchKind,
        request: AbortRequest | None,
        aborted_s: float,
        rolled_back_s: float,
    ) -> None:
        """Note an abort, when the pass ended, and when its batch was rolled back.

        ``request`` is None on ranks that follow another.
        """
        self.aborts[kind] += 1
        self._delays["rollback"].append(rolled_back_s - aborted_s)
        if request is None:
            return
        self._delays["flag_to_abort"].append(aborted_s - request.raised_s)
        first = min(request.arrivals, key=lambda arrival: arrival.arrival_s)
        self._delays["arrival_to_flag"].append(request.raised_s - first.arrival_s)
        self._delays["arrival_to_abort"].append(aborted_s - first.arrival_s)
        for arrival in request.arrivals:
            self._awaited.setdefault(arrival.rid, (arrival.arrival_s, aborted_s))

    def wasted(self, seconds: float, offline: BatchStats, layers_share: float) -> None:
        """Note what an abort threw away: time, and offline tokens by the share of their layers."""
        self.wasted_s += seconds
        self.wasted_tokens += offline.compute_tokens * layers_share

    def results(self, reqs: Iterable[Any], now_s: float) -> None:
        """Note who got a token. O(1) unless someone is awaited."""
        if not self._awaited:
            return
        for req in reqs:
            if req.output_ids and (times := self._awaited.pop(req.rid, None)) is not None:
                arrival_s, aborted_s = times
                self._delays["abort_to_first_token"].append(now_s - aborted_s)
                self._delays["arrival_to_first_token"].append(now_s - arrival_s)

    def forget(self, rid: str) -> None:
        """Wait for a request no longer."""
        self._awaited.pop(rid, None)

    def report(self) -> dict[str, Any]:
        """Return all of it in plain values."""
        return {
            "aborts": {kind.value: self.aborts[kind] for kind in BatchKind},
            "shrunk": {kind.value: self.shrunk[kind] for kind in BatchKind},
            "kept": dict(self.kept),
            "arming_ms": _summary(self._arming_s),
            "armed_batch_ms": _summary(self._batch_s),
            "wasted_ms": self.wasted_s * 1e3,
            "wasted_tokens": round(self.wasted_tokens),
            "delays_ms": {name: _summary(values) for name, values in self._delays.items()},
        }


def _summary(values: deque[float]) -> Mapping[str, float | int | None]:
    if not values:
        return {"n": 0, **{f"p{q}": None for q in _PERCENTILES}}
    points = np.percentile(np.array(values) * 1e3, _PERCENTILES).tolist()
    names = (f"p{q}" for q in _PERCENTILES)
    return {"n": len(values), **dict(zip(names, points, strict=True))}
