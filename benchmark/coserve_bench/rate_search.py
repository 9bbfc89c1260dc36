"""OOCO's figure: the largest offline rate before online requests miss their targets too often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Probe", "RateSearch"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One run at one offline rate."""

    rate_per_s: float
    violations: float
    """Fraction of the online requests that missed their targets."""

    served_tokens_per_s: float
    """Offline tokens, prompt and output, that came back."""

    is_saturated: bool
    """The server did not keep up with the offline requests."""


@dataclass(slots=True)
class RateSearch:
    """Doubles the rate until it is too much, then halves the interval, on a logarithmic scale.

    OOCO §5.2 raises the offline rate until 3% of the online requests violate
    their SLO. A rate beyond what the server can serve says nothing more: the
    search ends there.
    """

    first_rate_per_s: float
    max_runs: int
    limit: float = 0.03
    resolution: float = 1.15
    """The search ends when the least bad rate is within this factor of the best good one."""

    probes: list[Probe] = field(default_factory=list)

    @property
    def best(self) -> Probe | None:
        """The probe of the largest rate below every bad one; None when none is good."""
        good = [probe for probe in self.probes if probe.rate_per_s < self._least_bad]
        return max(good, key=lambda probe: probe.rate_per_s, default=None)

    def next_rate(self) -> float | None:
        """Return the rate to try; None when the search has ended."""
        best, bad = self.best, self._least_bad
        if len(self.probes) >= self.max_runs:
            return None
        if not self.probes:
            return _short(self.first_rate_per_s)
        if best is None:
            return _short(bad / 4)
        if math.isinf(bad):
            return None if best.is_saturated else _short(2 * best.rate_per_s)
        if bad / best.rate_per_s <= self.resolution:
            return None
        return _short(math.sqrt(bad * best.rate_per_s))

    def record(self, probe: Probe) -> None:
        """Take note of a run at ``next_rate``."""
        self.probes.append(probe)

    @property
    def _least_bad(self) -> float:
        bad = (probe.rate_per_s for probe in self.probes if probe.violations > self.limit)
        return min(bad, default=math.inf)


def _short(rate_per_s: float) -> float:
    """Round to four digits, with which a run's name tells rates apart."""
    return float(f"{rate_per_s:.4g}")
