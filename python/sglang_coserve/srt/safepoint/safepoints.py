"""The safepoints of one scheduler: arms and disarms batches of the offline lane, and counts."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, num_decodes
from sglang_coserve.srt.safepoint.gates import batch_id
from sglang_coserve.srt.safepoint.ingress import ArrivalWatch, StopRequest
from sglang_coserve.srt.safepoint.placement import SafepointPlacement

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
        self._awaited: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Arrivals for which a step was suspended, with the times of arrival and suspension; the
        last ones, as some are refused before they become requests."""

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
            "delays_ms": {name: _summary(values) for name, values in self._delays.items()},
        }


def _summary(values: deque[float]) -> Mapping[str, float | int | None]:
    if not values:
        return {"n": 0, **{f"p{q}": None for q in _PERCENTILES}}
    points = np.percentile(np.array(values) * 1e3, _PERCENTILES).tolist()
    names = (f"p{q}" for q in _PERCENTILES)
    return {"n": len(values), **dict(zip(names, points, strict=True))}


ScheduleBatch = Any


def why_batch_must_end(batch: ScheduleBatch, num_prefills: int) -> str | None:
    """Return why this batch cannot be suspended; None if it can. O(requests)."""
    if batch.hicache_consumer_index != -1:
        return "KV is being loaded from the host layer by layer"
    for place, req in enumerate(batch.reqs):
        if req.session is not None:
            return "a session shares its KV"
        if place < num_prefills and req.multimodal_inputs is not None:
            return "images are dropped once they are embedded"
        if place < num_prefills and req.input_embeds is not None:
            return "embeddings are given instead of tokens"
    return None


class Safepoints:
    """Arms batches of the offline lane, and counts those that were suspended.

    All ranks arm the same batches; the rank that receives requests decides when they stop.
    """

    def __init__(
        self,
        placement: SafepointPlacement,
        watch: ArrivalWatch | None,
        *,
        num_layers: int,
        interval: int,
    ) -> None:
        """``watch`` is None on ranks that do not receive requests."""
        self.stats = SafepointStats()
        self.gate = placement.gate
        self.resumption = placement.resumption
        self.num_layers = num_layers
        self._no_safepoints = placement.no_safepoints
        self._watch = watch
        self._interval = interval
        self.stop_share = min(1.0, placement.outstanding_groups * interval / num_layers)
        """Largest share of a batch that still runs after a stop was requested."""

        self._request: StopRequest | None = None

    @property
    def decodes_stop(self) -> bool:
        """Whether batches of decodes can be suspended, too; if not they run to their end."""
        return ForwardKind.DECODE not in self._no_safepoints

    def why_it_must_end(self, batch: ScheduleBatch) -> str | None:
        """Return why a batch cannot stop at a safepoint; None if it can. O(requests)."""
        kind = kind_of(batch)
        if kind is None:
            return "neither a prefill nor a decode"
        if kind in self._no_safepoints:
            return self._no_safepoints[kind]
        return why_batch_must_end(batch, len(batch.reqs) - num_decodes(batch, kind))

    @contextmanager
    def armed(self, forward_count: int, until_s: float) -> Iterator[None]:
        """Let a pass in this context be stopped, for an arrival or at ``until_s``.

        The pass then raises ``ForwardPreempted``. ``forward_count`` identifies the batch;
        ``until_s`` is on the clock that all ranks share.
        """
        name = batch_id(forward_count)
        self.gate.arm(name, until_s)
        if self._watch is not None:
            self._watch.open(name)
        try:
            yield
        finally:
            self.gate.disarm()
            if self._watch is not None:
                self._request = self._watch.close()

    def suspended(self, kind: ForwardKind, now_s: float) -> None:
        """Record that the batch armed last was suspended; ``now_s`` is ``time.perf_counter``."""
        self.stats.suspended(kind, self._request, now_s)

    def report(self) -> dict[str, Any]:
        """Return the settings and statistics as plain values."""
        return {
            "enabled": True,
            "interval_layers": self._interval,
            "layers": self.num_layers,
            **self.stats.report(),
        }
