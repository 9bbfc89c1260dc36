"""Searches for the largest step latency budget that meets the SLOs, by test runs (HyGen §4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_coserve.core.control.slo import Slo, format_slo
from sglang_coserve.errors import ConfigError, InfeasibleError
from sglang_coserve.metrics import LatencyReport

__all__ = ["BudgetRun", "FoundBudget", "Runner", "SloCheck", "SloResult", "search_budget"]

Runner = Callable[[float], LatencyReport]
"""Serves the workload under a step budget in seconds; returns the online latencies."""


@dataclass(frozen=True, slots=True)
class SloResult:
    """The measured value of one SLO beside its limit."""

    slo: Slo
    limit_s: float
    measured_s: float | None
    """``None`` if nothing was measured; the SLO then counts as met."""

    @property
    def is_met(self) -> bool:
        """True when the limit was not exceeded."""
        return self.measured_s is None or self.measured_s <= self.limit_s

    @property
    def excess(self) -> float:
        """measured / limit - 1: negative if the SLO is met, -1 without measurements."""
        return -1.0 if self.measured_s is None else self.measured_s / self.limit_s - 1

    def __str__(self) -> str:
        measured = "-" if self.measured_s is None else f"{self.measured_s * 1000:.3g}ms"
        limit = f"{self.limit_s * 1000:.3g}ms"
        name = f"{self.slo.latency.value} {self.slo.statistic.value}"
        return f"{name} {measured} {'<=' if self.is_met else '>'} {limit}"


@dataclass(frozen=True, slots=True)
class SloCheck:
    """Several SLOs, all of which must be met (HyGen §5.4, Fig. 11)."""

    slos: tuple[Slo, ...]
    online_only: LatencyReport | None = None
    """Latencies of online requests alone, to which tolerances are relative."""

    def results(self, measured: LatencyReport) -> tuple[SloResult, ...]:
        """Compare the measured online latencies with each SLO.

        Raises:
            ConfigError: an SLO is a tolerance, and ``online_only`` has no measurement for it.
        """
        return tuple(
            SloResult(
                slo,
                slo.limit_over(self.online_only),
                slo.statistic.of(slo.latency.summary(measured)),
            )
            for slo in self.slos
        )

    def is_met(self, measured: LatencyReport) -> bool:
        """Return whether every SLO is met."""
        return all(result.is_met for result in self.results(measured))


@dataclass(frozen=True, slots=True)
class BudgetRun:
    """The results of one test run."""

    budget_s: float
    results: tuple[SloResult, ...]

    @property
    def is_met(self) -> bool:
        """True when every SLO was met."""
        return all(result.is_met for result in self.results)

    @property
    def worst(self) -> SloResult:
        """The SLO that was exceeded most, or met by the smallest margin."""
        return max(self.results, key=lambda result: result.excess)


@dataclass(frozen=True, slots=True)
class FoundBudget:
    """The result of a search."""

    budget_s: float
    """The largest budget that met every SLO in its run, in seconds."""

    runs: tuple[BudgetRun, ...]
    """All test runs, in order."""

    is_limit: bool
    """True when the upper bound itself met every SLO, so a larger budget might as well."""


def search_budget(
    run: Runner,
    check: SloCheck,
    low_s: float,
    high_s: float,
    *,
    relative_precision: float = 0.02,
    max_runs: int = 12,
) -> FoundBudget:
    """Find the largest step budget whose run meets every SLO.

    Bisects log(budget) in at most ``max_runs`` runs: first both bounds, then midpoints,
    until the interval is narrower than ``relative_precision``. Choose ``low_s`` so small
    that next to no offline work fits.

    Bisection assumes that a larger budget never lowers online latency. With noise, or where a
    larger budget empties a queue sooner, this does not quite hold: the result then met the SLOs
    in its own run, but may not be the largest budget that would.

    Raises:
        ConfigError: the bounds or the number of runs are invalid, or there is no SLO.
        InfeasibleError: ``low_s`` misses an SLO; the message names the nearest SLOs that it
            meets.
    """
    if not 0 < low_s < high_s:
        raise ConfigError(f"budget search: bounds {low_s} s to {high_s} s: use 0 < low < high")
    if max_runs < 2:
        raise ConfigError(f"budget search: max_runs is {max_runs}: both bounds need a run")
    if not check.slos:
        raise ConfigError("budget search: no SLO given: any budget would do")
    runs: list[BudgetRun] = []

    def is_met(budget_s: float) -> bool:
        runs.append(BudgetRun(budget_s, check.results(run(budget_s))))
        return runs[-1].is_met

    if not is_met(low_s):
        raise InfeasibleError(_nearest(runs[-1]))
    if is_met(high_s):
        return FoundBudget(high_s, tuple(runs), is_limit=True)
    while high_s > low_s * (1 + relative_precision) and len(runs) < max_runs:
        middle_s = (low_s * high_s) ** 0.5
        if is_met(middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return FoundBudget(low_s, tuple(runs), is_limit=False)


def _nearest(run: BudgetRun) -> str:
    missed = [result for result in run.results if not result.is_met]
    nearest = " and ".join(
        f"'{result.slo.latency.value} {result.slo.statistic.value} <= "
        # Rounded up: the run that it is taken from must meet the SLO that the message proposes.
        f"{math.ceil((result.measured_s or 0.0) * 100_000) / 100:.10g}ms'"
        for result in missed
    )
    return (
        f"no budget meets {', '.join(repr(format_slo(result.slo)) for result in missed)}: with "
        f"{run.budget_s * 1000:.4g} ms per step, the smallest budget tried, {run.worst}. "
        f"The nearest feasible SLO is {nearest}; or lower the online load"
    )
