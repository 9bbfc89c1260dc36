"""Finds the largest budget that meets every SLO in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_coserve.core.budget_search import search_budget
from sglang_coserve.core.control.slo import Slo, SloCheck
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InfeasibleError
from sglang_coserve.metrics import LatencyReport
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.slo_search.measurement import Trial
from sglang_coserve.slo_search.simulated import SimulatedBench

__all__ = ["BudgetSearch"]

_HIGHEST: Final = 2.0
"""Highest budget to try, relative to the largest limit of the SLOs: a statistic allows some steps
to be longer than itself. Smaller limits do not count, since without running online requests they do
not bound a step."""

_LADDER_STEP: Final = 2.0
"""Least ratio between budgets of the ladder; larger if the ladder would need more than half of the
runs."""


class BudgetSearch:
    """Finds the budget; completed runs remain available when it is interrupted.

    A budget bounds online prefills as well, so a budget that is too small also misses TTFT
    targets: the SLOs may be met only in the middle of the range, which
    bisection of the whole range would miss. So budgets are first lowered step by step from the
    top, until one meets the SLOs; then ``search_budget`` searches between that one
    and the one above it.
    """

    def __init__(self, bench: SimulatedBench, slos: Sequence[Slo], *, max_runs: int = 16) -> None:
        """``max_runs`` is at least 2."""
        assert max_runs >= 2, f"{max_runs} runs make no search"
        self._bench = bench
        self._slos = tuple(slos)
        self._max_runs = max_runs
        self._trials: dict[float, Trial] = {}
        self.online_only: Trial | None = None
        """The run with online requests alone."""

        self.budget_s: float | None = None
        """The budget found."""

        self.is_limit = False
        """True if the largest budget tried met the SLOs, so a larger one might as well."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All runs with a budget so far, in order."""
        return tuple(self._trials.values())

    @property
    def load(self) -> SearchLoad:
        """The load of the runs."""
        return self._bench.load

    @property
    def least_budget_s(self) -> float:
        """The smallest useful budget: the time of an online decode and an offline chunk."""
        online = self._bench.load.online
        context_tokens = sum(r.prompt_tokens for r in online) // len(online)
        batch = StepStats.of([(SchedulerConfig().min_chunk_tokens, 0)], [context_tokens])
        return self._bench.model.predict(batch)

    def run(self) -> float:
        """Return the budget in seconds, after at most ``max_runs`` runs and the online-only one.

        Raises:
            InfeasibleError: no budget meets the SLOs; the message names the nearest feasible SLOs.
            ConfigError: an SLO is a tolerance, and its latency was not measured.
        """
        bench = self._bench
        bench.progress.begin("simulating online requests alone", bench.load.seconds)
        alone = bench.online_only()
        check = SloCheck(self._slos, alone.latency)
        self.online_only = Trial.of(None, alone, check)

        def latency_under(budget_s: float) -> LatencyReport:
            return self._trial(budget_s, check).measurement.latency

        ladder = self._ladder(check)
        met = next((place for place, b in enumerate(ladder) if self._trial(b, check).is_met), None)
        if met == 0:
            self.budget_s, self.is_limit = ladder[0], True
            return ladder[0]
        if met is None:
            raise InfeasibleError(self._problem())
        # Both bounds were run already, so they need no new run.
        left = self._max_runs - len(self._trials)
        bounds = ladder[met], ladder[met - 1]
        self.budget_s = search_budget(latency_under, check, *bounds, max_runs=2 + left).budget_s
        return self.budget_s

    def _problem(self) -> str:
        best = min(self.trials, key=lambda trial: trial.excess)
        assert best.budget_s is not None and self.online_only is not None
        alone = self.online_only
        if alone.is_met:
            online = f"online requests alone meet them: {alone.values()}"
        else:
            online = f"not even online requests alone meet them: {alone.values()}"
        return (
            f"the best was {best.budget_s * 1e3:.4g} ms with {best.values()}; {online}. "
            f"The nearest SLO that a run kept: {best.nearest_slos()}; or lower the online load"
        )

    def _ladder(self, check: SloCheck) -> list[float]:
        limits_s = [slo.limit_over(check.online_only) for slo in self._slos]
        least_s = self.least_budget_s
        budget_s = max(_HIGHEST * max(limits_s), least_s)
        step = max(_LADDER_STEP, (budget_s / least_s) ** (1 / (self._max_runs // 2)))
        ladder = []
        # The factor avoids a budget that equals the last one but for rounding.
        while budget_s > least_s * 1.001:
            ladder.append(budget_s)
            budget_s /= step
        return [*ladder, least_s]

    def _trial(self, budget_s: float, check: SloCheck) -> Trial:
        if budget_s not in self._trials:
            bench, number = self._bench, len(self._trials) + 1
            bench.progress.begin(
                f"run {number} of at most {self._max_runs}: simulating {budget_s * 1e3:.3g} ms",
                bench.load.seconds,
            )
            measurement = bench.under_budget(budget_s, check)
            self._trials[budget_s] = Trial.of(budget_s, measurement, check)
        return self._trials[budget_s]
