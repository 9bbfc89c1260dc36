"""By how much the batches of a gateway delay the online requests of all its engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sglang_coserve.http_lines.messages import EngineDelays


class FleetDelays:
    """Sums since this gateway began. Pure.

    An engine counts from its own start, and outlives gateways: the gateway before has counted what
    the engine says first. An engine that was started again counts from 0.
    """

    def __init__(self) -> None:
        self._latest: dict[str, EngineDelays] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, engine: str, delays: EngineDelays) -> None:
        """Take what an engine, by its address, says now."""
        before = self._latest.get(engine, delays)
        counted_s = before.online_delays_s or {}
        if before.run != delays.run:
            counted_s = {}
        for batch_id, seconds in (delays.online_delays_s or {}).items():
            added_s = seconds - counted_s.get(batch_id, 0.0)
            self._sums_s[batch_id] = self._sums_s.get(batch_id, 0.0) + added_s
        self._latest[engine] = delays

    def keep(self, engines: Collection[str]) -> None:
        """Forget all other engines, and batches of which none that is left says anything."""
        self._latest = {name: delays for name, delays in self._latest.items() if name in engines}
        named = {
            batch_id
            for delays in self._latest.values()
            for batch_id in delays.online_delays_s or ()
        }
        self._sums_s = {name: sum_s for name, sum_s in self._sums_s.items() if name in named}

    def sums_s(self) -> Mapping[str, float] | None:
        """Return the seconds by batch; None while no engine knows."""
        is_known = any(delays.online_delays_s is not None for delays in self._latest.values())
        return dict(self._sums_s) if is_known else None
