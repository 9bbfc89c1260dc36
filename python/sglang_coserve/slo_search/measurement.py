"""The results of a run, simulated or measured, and its judgement by the SLOs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_coserve.core.control.slo import SloCheck, SloResult
from sglang_coserve.metrics import LatencyReport

__all__ = ["SearchRun", "Trial"]


@dataclass(frozen=True, slots=True)
class SearchRun:
    """The results of one run."""

    latency: LatencyReport
    """Latencies of the online requests."""

    offline_tokens_per_s: float = 0.0
    """Prompt and output tokens of offline requests per second."""

    offline_requests_per_s: float = 0.0
    offline_ran_out: bool = False
    """The offline requests ended before the run did, so a part of it had less load."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run, judged by the SLOs."""

    budget_s: float | None
    """Step budget of the run; None for online requests alone."""

    measurement: SearchRun
    results: tuple[SloResult, ...]

    @classmethod
    def of(cls, budget_s: float | None, measurement: SearchRun, check: SloCheck) -> Trial:
        """Judge a run.

        Raises:
            ConfigError: an SLO is a tolerance, and ``check`` has no measurement for it.
        """
        return cls(budget_s, measurement, check.results(measurement.latency))

    @property
    def is_met(self) -> bool:
        """True when every SLO was met."""
        return all(result.is_met for result in self.results)

    @property
    def excess(self) -> float:
        """measured / limit - 1 of the worst SLO; negative if all are met."""
        return max(result.excess for result in self.results)

    def values(self) -> str:
        """Return the text of every measured value with its limit."""
        return ", ".join(map(str, self.results))

    def nearest_slos(self) -> str:
        """Return the text of the missed SLOs, with limits that this run would have met."""
        return " ".join(
            f"'{result.slo.latency.value} {result.slo.statistic.value} <= "
            # Rounded up, so that this run meets the proposed SLO.
            f"{math.ceil((result.measured_s or 0.0) * 1e5) / 100:.10g}ms'"
            for result in self.results
            if not result.is_met
        )
