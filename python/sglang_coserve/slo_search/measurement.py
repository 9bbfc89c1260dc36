"""What one run gave, simulated or measured, and how the SLOs stand in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_coserve.core.slo import SloCheck, SloResult
from sglang_coserve.metrics import LatencyReport

__all__ = ["Measurement", "Trial"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run."""

    latency: LatencyReport
    """Of the online requests."""

    offline_tokens_per_s: float = 0.0
    """Prompt and output tokens."""

    offline_requests_per_s: float = 0.0
    offline_ran_out: bool = False
    """The offline requests ended before the run did, so that part of it was easier."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run and its verdict."""

    budget_s: float | None
    """None: online requests alone."""

    measurement: Measurement
    results: tuple[SloResult, ...]

    @classmethod
    def of(cls, budget_s: float | None, measurement: Measurement, check: SloCheck) -> Trial:
        """Judge a run.

        Raises:
            ConfigError: a tolerance, and nothing to be relative to.
        """
        return cls(budget_s, measurement, check.results(measurement.latency))

    @property
    def is_met(self) -> bool:
        """True when every SLO held."""
        return all(result.is_met for result in self.results)

    @property
    def excess(self) -> float:
        """How far the SLO that stands worst is exceeded, as a part of it; negative when kept."""
        return max(result.excess for result in self.results)

    def values(self) -> str:
        """Return every value with its limit."""
        return ", ".join(map(str, self.results))

    def nearest_slos(self) -> str:
        """Return the SLOs that were missed, with the limits that this run kept."""
        return " ".join(
            f"'{result.slo.latency.value} {result.slo.statistic.value} <= "
            # Rounded up: what is proposed must hold for the run it is taken from.
            f"{math.ceil((result.measured_s or 0.0) * 1e5) / 100:.10g}ms'"
            for result in self.results
            if not result.is_met
        )
