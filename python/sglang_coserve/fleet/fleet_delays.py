"""Adds up by how much each engine says that batches have delayed its online requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sglang_coserve.http_lines import EngineDelays

__all__ = ["FleetDelays"]


class FleetDelays:
    """Sums since this gateway began. Pure.

    An engine counts from its own start, and outlives gateways: what it says first has been counted
    by the gateway before. One that was started again counts from 0.
    """

    def __init__(self) -> None:
        self._told: dict[str, EngineDelays] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, engine: str, told: EngineDelays) -> None:
        """Take what an engine, by its address, says now."""
        before = self._told.get(engine, told)
        counted_s = before.online_delays_s or {}
        if before.run != told.run:
            counted_s = {}
        for batch_id, seconds in (told.online_delays_s or {}).items():
            added_s = seconds - counted_s.get(batch_id, 0.0)
            self._sums_s[batch_id] = self._sums_s.get(batch_id, 0.0) + added_s
        self._told[engine] = told

    def keep(self, engines: Collection[str]) -> None:
        """Forget all other engines, and batches of which none that is left says anything."""
        self._told = {name: told for name, told in self._told.items() if name in engines}
        named = {
            batch_id for told in self._told.values() for batch_id in told.online_delays_s or ()
        }
        self._sums_s = {name: sum_s for name, sum_s in self._sums_s.items() if name in named}

    def sums_s(self) -> Mapping[str, float] | None:
        """Return the seconds by batch; None while no engine knows."""
        is_known = any(told.online_delays_s is not None for told in self._told.values())
        return dict(self._sums_s) if is_known else None
