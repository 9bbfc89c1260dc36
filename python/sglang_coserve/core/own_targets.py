"""How long who arrives may wait, by the TTFT targets that requests bring along."""

from __future__ import annotations

from sglang_coserve.core.integrator import Integrator
from sglang_coserve.core.recent_values import RecentValues
from sglang_coserve.core.relative_target import Latencies
from sglang_coserve.core.slo import Statistic

__all__ = ["OwnTargets"]

_TAIL = 0.01


class OwnTargets:
    """Bounds the steps that run when a request arrives whose target only it knows.

    A hundredth of all requests may be harmed, as with an SLO for P99. So the bound goes by the
    target that a hundredth of them have or are stricter than: once more than that bring a
    strict one along, it counts. A target that could not be kept without offline work does
    not.
    """

    def __init__(self, span: int, *, first: float, most: float) -> None:
        """Start without requests.

        Args:
            span: So many requests back it looks.
            first: Part of a target that an arrival may wait at first.
            most: The largest part.
        """
        self._targets_per_s = RecentValues(span)
        self._integrator = Integrator(_TAIL, first=first, most=most)
        self._target_s = float("inf")

    @property
    def arrival_s(self) -> float:
        """The longest that who arrives may wait for a step that is not suspended for it."""
        return self._target_s * self._integrator.factor

    def observe(self, value: Latencies) -> None:
        """Take in a TTFT, also of a request without a target of its own. O(bins)."""
        own_s, measured_s, alone_s, online_s = value
        if own_s is not None and max(alone_s or 0.0, online_s) > own_s:
            own_s = None
        if own_s is not None:
            self._integrator.observe(float(measured_s > own_s))
        # The strictest have the largest inverse; that of no target is 0.
        self._targets_per_s.add(0.0 if own_s is None else 1 / own_s)
        if own_s is not None or self._target_s < float("inf"):
            self._target_s = 1 / self._targets_per_s.statistic(Statistic.P99)
