"""Bounds the wait of arriving requests by the TTFT targets that requests bring along."""

from __future__ import annotations

from sglang_coserve.core.control.integrator import Integrator
from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.relative_target import LEAST_VALUES, WINDOW_S, LatencyPair
from sglang_coserve.core.control.slo import Statistic

__all__ = ["OwnTargets"]

_TAIL = 0.01

_LEAST_S = 1e-6
"""A shorter target counts as this one: its inverse may be no number."""


class OwnTargets:
    """Bounds the length of steps for requests that may arrive with a strict TTFT target.

    As with an SLO on P99, 1% of the requests may be harmed. So the bound follows the target at
    the strictest 1% of all requests: a strict target counts once more than 1% of the requests
    bring one. A target that could not be met without offline work does not count.
    """

    def __init__(self, *, first: float, most: float) -> None:
        """Start without requests.

        Args:
            first: Initial share of the target that an arriving request may wait.
            most: Largest such share.
        """
        self._targets_per_s = RecentValues(WINDOW_S, at_least=LEAST_VALUES)
        self._integrator = Integrator(_TAIL, first=first, most=most)
        self._target_s = float("inf")

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that an arriving request may wait for a step that cannot be
        suspended; infinite without own targets."""
        return self._target_s * self._integrator.factor

    def observe(self, value: LatencyPair, now_s: float) -> None:
        """Record a TTFT; to be called for requests without an own target, too. O(bins)."""
        own_s, measured_s, alone_s = value
        if own_s is not None and (alone_s or 0.0) > own_s:
            own_s = None
        if own_s is not None:
            self._integrator.observe(float(measured_s > own_s))
        # Inverse targets: the strictest is the largest, and no target is 0.
        self._targets_per_s.add(0.0 if own_s is None else 1 / max(own_s, _LEAST_S), now_s)
        if own_s is not None or self._target_s < float("inf"):
            self._target_s = 1 / self._targets_per_s.statistic(Statistic.P99)
