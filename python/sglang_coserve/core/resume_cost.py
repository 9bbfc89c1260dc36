"""Learns what it costs to suspend and resume a step."""

from __future__ import annotations

from typing import Final

__all__ = ["ResumeCost"]

_WEIGHT: Final = 1 / 64
"""Weight of one step in the moving average: as many as average an error of the latency model of
twice the cost down to a quarter of it."""


class ResumeCost:
    """The mean of what suspended steps took beyond their predicted time, per suspension.

    Without this the latency model would have to learn it, which predicts steps that are not
    suspended, too.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean_s = 0.0

    def observe(self, seconds: float, predicted_s: float, suspensions: int) -> None:
        """Record that a step took ``seconds`` in all, instead of ``predicted_s`` without them."""
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        self._mean_s += weight * ((seconds - predicted_s) / suspensions - self._mean_s)

    def seconds(self, default_s: float) -> float:
        """Return the cost of one suspension, at least 0; ``default_s`` before any was observed."""
        return max(self._mean_s, 0.0) if self._count else default_s
