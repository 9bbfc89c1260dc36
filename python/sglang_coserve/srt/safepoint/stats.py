"""Statistics of safepoints: counts of suspensions, costs and delays."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint.arrival_watch import StopRequest

__all__ = ["SafepointStats"]

_SAMPLES: Final = 1024
_PERCENTILES: Final = (50, 90, 99)

_DELAYS: Final = (
    *("arrival_to_flag", "flag_to_stop", "arrival_to_stop"),
    *("stop_to_first_token", "arrival_to_first_token"),
)


class SafepointStats:
    """Counts suspensions, and measures the delays from an arrival to its first token.

    Delays are in seconds, of the last thousand steps that were suspended for an arrival. An
    arrival counts from when the server received the request.
    """

    def __init__(self) -> None:
        self.suspensions: Counter[ForwardKind] = Counter()
        self.resumed = 0
        self.ran_to_end: Counter[str] = Counter()
        """Steps of the offline lane that had to run to their end, by reason."""

        self._delays: dict[str, deque[float]] = {name: deque(maxlen=_SAMPLES) for name in _DELAYS}
        self._arming_s: deque[float] = deque(maxlen=_SAMPLES)
        self._batch_s: deque[float] = deque(maxlen=_SAMPLES)
        self._awaited: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Arrivals for which a step was suspended, with the times of arrival and suspension; the
        last ones, as some are refused before they become requests."""

    def ran(self, arming_s: float, batch_s: float) -> None:
        """Record the time to arm and disarm a step, and the time that it ran in between."""
        self._arming_s.append(arming_s)
        self._batch_s.append(batch_s)

    def suspended(self, kind: ForwardKind, request: StopRequest | None, now_s: float) -> None:
        """Record that a step was suspended.

        ``request`` is None if it was suspended at its deadline, and on ranks that do not receive
        requests.
        """
        self.suspensions[kind] += 1
        if request is None:
            return
        first_s = min(arrival.arrival_s for arrival in request.arrivals)
        self._delays["arrival_to_flag"].append(request.raised_s - first_s)
        self._delays["flag_to_stop"].append(now_s - request.raised_s)
        self._delays["arrival_to_stop"].append(now_s - first_s)
        for arrival in request.arrivals:
            self._awaited.setdefault(arrival.rid, (arrival.arrival_s, now_s))
        while len(self._awaited) > _SAMPLES:
            self._awaited.popitem(last=False)

    def results(self, reqs: Iterable[Any], now_s: float) -> None:
        """Record requests that may have got a first token. O(1) if no such arrival is pending."""
        if not self._awaited:
            return
        for req in reqs:
            if req.output_ids and (times := self._awaited.pop(req.rid, None)) is not None:
                arrival_s, stopped_s = times
                self._delays["stop_to_first_token"].append(now_s - stopped_s)
                self._delays["arrival_to_first_token"].append(now_s - arrival_s)

    def forget(self, rid: str) -> None:
        """Discard a pending arrival that has ended."""
        self._awaited.pop(rid, None)

    def report(self) -> dict[str, Any]:
        """Return all statistics as plain values."""
        return {
            "suspended": {kind.value: self.suspensions[kind] for kind in ForwardKind},
            "resumed": self.resumed,
            "kept": dict(self.ran_to_end),
            "arming_ms": _summary(self._arming_s),
            "armed_batch_ms": _summary(self._batch_s),
            "delays_ms": {name: _summary(values) for name, values in self._delays.items()},
        }


def _summary(values: deque[float]) -> Mapping[str, float | int | None]:
    if not values:
        return {"n": 0, **{f"p{q}": None for q in _PERCENTILES}}
    points = np.percentile(np.array(values) * 1e3, _PERCENTILES).tolist()
    names = (f"p{q}" for q in _PERCENTILES)
    return {"n": len(values), **dict(zip(names, points, strict=True))}
