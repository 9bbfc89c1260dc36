"""Time series of a run in bins, for the plots of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_coserve.simulator.observer import SimulationObserver, StepRecord

__all__ = ["LoadBin", "LoadCurve"]


@dataclass(slots=True)
class LoadBin:
    """Token sums over the steps that ended in one bin, and gauges at the last of them."""

    online_tokens: int = 0
    offline_tokens: int = 0
    online_running: int = 0
    offline_running: int = 0
    online_waiting: int = 0
    held_kv_tokens: int = 0
    cached_kv_tokens: int = 0


class LoadCurve(SimulationObserver):
    """Collects bins of equal width, which is doubled whenever there would be too many."""

    MAX_BINS: Final = 1200

    def __init__(self) -> None:
        self.bin_s = 0.25
        self.bins: list[LoadBin] = []

    def on_step(self, record: StepRecord) -> None:
        """See ``SimulationObserver``."""
        while (index := int(record.end_s / self.bin_s)) >= self.MAX_BINS:
            self._widen()
        while len(self.bins) <= index:
            self.bins.append(LoadBin())
        last = self.bins[index]
        last.online_tokens += record.online_tokens
        last.offline_tokens += record.offline_tokens
        last.online_running = record.online_running
        last.offline_running = record.offline_running
        last.online_waiting = record.online_waiting
        last.held_kv_tokens = record.held_kv_tokens
        last.cached_kv_tokens = record.cached_kv_tokens

    def _widen(self) -> None:
        self.bin_s *= 2
        pairs = zip(self.bins[::2], [*self.bins[1::2], LoadBin()], strict=False)
        merged: list[LoadBin] = []
        for first, second in pairs:
            second.online_tokens += first.online_tokens
            second.offline_tokens += first.offline_tokens
            merged.append(second)
        self.bins = merged
