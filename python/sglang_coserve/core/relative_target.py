"""A target that is relative to what online requests would get alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from sglang_coserve.core.recent_values import RecentValues
from sglang_coserve.core.slo import Slo

__all__ = ["Latencies", "RelativeTarget"]

_RENEWED_SHARE: Final = 1 / 128
"""Of the values it goes by: when so many are new, it is computed again."""


class Latencies(NamedTuple):
    """A TTFT, a TPOT or a gap in both engines."""

    own_target_s: float | None
    """That the request brought along."""

    measured_s: float
    alone_s: float | None
    """In the no-interference baseline; None if that is not known."""

    online_s: float = 0.0
    """What the engine did for online requests meanwhile."""


class RelativeTarget:
    """Follows a statistic of the values alone, and of those measured.

    Where the measured statistic is above the limit, for that was higher before or could not be
    kept, deadlines are as much below the limit for now.
    """

    def __init__(self, slo: Slo, prior_s: float, span: int) -> None:
        """Start without values.

        Args:
            slo: Its tolerance.
            prior_s: Taken for the statistic alone until a value is known.
            span: So many values back it looks.
        """
        self._slo = slo
        self._span = span
        self._alone = RecentValues(span)
        self._measured = RecentValues(span)
        self.num_alone = 0
        """Values alone so far."""

        self._renewed_at = 0.0
        self.limit_s = self.deadline_s = slo.limit_over_value(prior_s)
        self.late_alone_share = 0.0
        """Part of the values alone that is above the limit."""

    def observe(self, values: Mapping[Latencies, int]) -> None:
        """Take in values, each so often. O(values), amortized."""
        for (_, measured_s, alone_s, _), count in values.items():
            if alone_s is not None:
                self._measured.add(measured_s, count)
                self._alone.add(alone_s, count)
                self.num_alone += count
        if not self.num_alone or self.num_alone < self._renewed_at:
            return
        known = min(self.num_alone, self._span)
        self._renewed_at = self.num_alone + math.ceil(_RENEWED_SHARE * known)
        statistic = self._slo.statistic
        self.limit_s = self._slo.limit_over_value(self._alone.statistic(statistic))
        self.late_alone_share = self._alone.share_above(self.limit_s)
        excess = self._measured.statistic(statistic) / self.limit_s
        self.deadline_s = self.limit_s / max(excess, 1.0)
