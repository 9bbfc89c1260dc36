"""Latency targets relative to the no-interference baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.control.slo import Slo

__all__ = ["Latencies", "RelativeTarget"]

_RENEWED_SHARE: Final = 1 / 128
"""A relative target is recomputed when this share of the values in its span is new."""


class Latencies(NamedTuple):
    """A TTFT, a TPOT or a gap, as measured and in the baseline, in seconds."""

    own_target_s: float | None
    """The target that the request brought along, if any."""

    measured_s: float
    alone_s: float | None
    """The latency in the no-interference baseline; None if unknown."""


class RelativeTarget:
    """Computes the limit of a relative SLO from a statistic of the baseline's values."""

    def __init__(self, slo: Slo, prior_s: float, span: int) -> None:
        """Start without values.

        Args:
            slo: The SLO; an absolute one keeps its limit.
            prior_s: Value of the statistic in the baseline that is assumed until one is known.
            span: Number of recent values to consider.
        """
        self._slo = slo
        self._span = span
        self._alone = RecentValues(span)
        self.num_alone = 0
        """Number of baseline values so far."""

        self._renewed_at = 0.0
        self.limit_s = slo.limit_over_value(prior_s)
        self.late_alone_share = 0.0
        """Share of the baseline's values above the limit."""

    def observe(self, values: Mapping[Latencies, int]) -> None:
        """Add values, each with its count. Amortized O(values)."""
        for (_, _, alone_s), count in values.items():
            if alone_s is not None:
                self._alone.add(alone_s, count)
                self.num_alone += count
        if not self.num_alone or self.num_alone < self._renewed_at:
            return
        known = min(self.num_alone, self._span)
        self._renewed_at = self.num_alone + math.ceil(_RENEWED_SHARE * known)
        self.limit_s = self._slo.limit_over_value(self._alone.statistic(self._slo.statistic))
        self.late_alone_share = self._alone.share_above(self.limit_s)
