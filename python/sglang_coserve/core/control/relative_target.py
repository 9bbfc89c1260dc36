"""Latency targets relative to the no-interference baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Slo

__all__ = ["LEAST_VALUES", "WINDOW_S", "LatencyPair", "RelativeTarget"]

_RENEWED_SHARE: Final = 1 / 128
"""A relative target is recomputed when this share of its values is new."""

WINDOW_S: Final = 300.0
LEAST_VALUES: Final = 400
"""A target is computed from the baseline's values of the last five minutes, and at least from so
many, four of which are in the tail of a P99. A longer memory has quiet hours pay for busy ones: see
docs/benchmarks.md, "Changing traffic", also for what shorter ones cost."""


class LatencyPair(NamedTuple):
    """A TTFT, a TPOT or a gap, as measured and in the baseline, in seconds."""

    own_target_s: float | None
    """The target that the request brought along, if any."""

    measured_s: float
    alone_s: float | None
    """The latency in the no-interference baseline; None if unknown."""


class RelativeTarget:
    """Computes the limit of a relative SLO from a statistic of the baseline's values."""

    def __init__(self, slo: Slo, prior_s: float) -> None:
        """Start without values.

        Args:
            slo: The SLO; an absolute one keeps its limit.
            prior_s: Value of the statistic in the baseline that is assumed until one is known.
        """
        self._slo = slo
        self._alone = RecentValues(WINDOW_S, at_least=LEAST_VALUES)
        self._num_new = 0
        self.limit_s = slo.limit_over_value(prior_s)
        self.late_alone_share = 0.0
        """Share of the baseline's values above the limit."""

    @property
    def num_alone(self) -> int:
        """Number of baseline values that the limit is computed from."""
        return self._alone.count

    def observe(self, values: Mapping[LatencyPair, int], now_s: float) -> None:
        """Add values, each with its count. Amortized O(values)."""
        for (_, _, alone_s), count in values.items():
            if alone_s is not None:
                self._alone.add(alone_s, now_s, count)
                self._num_new += count
        if self._num_new <= _RENEWED_SHARE * self.num_alone:
            return
        self._num_new = 0
        self.limit_s = self._slo.limit_over_value(self._alone.statistic(self._slo.statistic))
        self.late_alone_share = self._alone.share_above(self.limit_s)
