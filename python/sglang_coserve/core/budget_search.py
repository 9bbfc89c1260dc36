"""The per-iteration latency budget that just meets the SLO, by test runs (HyGen §4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_coserve.core.slo import SloCheck, SloResult, format_slo
from sglang_coserve.errors import ConfigError, InfeasibleError
from sglang_coserve.metrics import LatencyReport

__all__ = ["BudgetRun", "FoundBudget", "Runner", "search_budget"]

Runner = Callable[[float], LatencyReport]
"""Serves the workload under an iteration budget in seconds; returns the online latencies."""


@dataclass(frozen=True, slots=True)
class BudgetRun:
    """One test run."""

    budget_s: float
    results: tuple[SloResult, ...]

    @property
    def is_met(self) -> bool:
        """True when every target held."""
        return all(result.is_met for result in self.results)

    @property
    def worst(self) -> SloResult:
        """The target that was exceeded most, or kept least."""
        return max(self.results, key=lambda result: result.excess)


@dataclass(frozen=True, slots=True)
class FoundBudget:
    """What a search found."""

    budget_s: float
    """The largest budget that met every target in its run."""

    runs: tuple[BudgetRun, ...]
    """Every test run, in order."""

    is_limit: bool
    """True when the upper bound met the targets: more might, too."""


def search_budget(
    run: Runner,
    check: SloCheck,
    low_s: float,
    high_s: float,
    *,
    relative_precision: float = 0.02,
    max_runs: int = 12,
) -> FoundBudget:
    """Find the largest iteration budget whose run meets every target.

    Bisection of log(budget), at most ``max_runs`` runs: first the bounds, then
    halves, until neighbours differ by less than ``relative_precision``. Choose
    ``low_s`` so small that next to no offline work fits.

    Bisection takes for granted that a larger budget never helps. With noise,
    or where a larger budget ends a queue sooner, that is not quite so: the result
    then met the targets in its own run, but need not be the largest that would.

    Raises:
        ConfigError: the bounds or the number of runs make no search.
        InfeasibleError: ``low_s`` misses a target; the message names the nearest
            targets that it meets.
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
        # Rounded up: what the message proposes must hold for the run it is taken from.
        f"{math.ceil((result.measured_s or 0.0) * 100_000) / 100:.10g}ms'"
        for result in missed
    )
    return (
        f"no budget meets {', '.join(repr(format_slo(result.slo)) for result in missed)}: with "
        f"{run.budget_s * 1000:.4g} ms an iteration, the least allowed, {run.worst}. "
        f"The nearest feasible SLO is {nearest}; or lower the online load"
    )
