"""Validates the budget on the real engine, and lowers it until the SLOs are met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.core.control.slo import Latency, SloCheck
from sglang_coserve.errors import InfeasibleError
from sglang_coserve.slo_search.live import LiveBench
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.slo_search.measurement import SearchRun, Trial
from sglang_coserve.slo_search.offline_file import offline_file
from sglang_coserve.slo_search.server_flags import budget_flags, slo_flags
from sglang_coserve.slo_search.simulated import SimulatedBench

__all__ = ["Validation", "ValidationRun"]

_SMALLEST_CUT: Final = 0.95
"""A budget that misses the SLOs is lowered at least by this factor; less would be lost in noise."""

_LINES_FACTOR: Final = 4
_EXTRA_SECONDS: Final = 120.0
"""Margins for the number of offline lines, for a longer run and a faster engine than simulated."""


@dataclass(frozen=True, slots=True)
class ValidationRun:
    """Results for the same load and budget, measured and simulated."""

    measured: Trial
    simulated: Trial


class Validation:
    """Makes the real runs; completed ones remain available when it is interrupted."""

    def __init__(
        self,
        live: LiveBench,
        simulated: SimulatedBench,
        check: SloCheck,
        flags: Sequence[str],
    ) -> None:
        """Simulate online requests alone, for comparison.

        Args:
            live: Starts the servers.
            simulated: The same load and machine on the simulator.
            check: The SLOs, and the latencies of online requests alone on the real engine.
            flags: Flags of the server for policy and profile, added to those of ``live``.
        """
        self._live = live
        self._simulated = simulated
        self._check = check
        self._flags = tuple(flags)
        alone = simulated.online_only()
        self._simulated_check = SloCheck(check.slos, alone.latency)
        self.simulated_alone = Trial.of(None, alone, self._simulated_check)
        """The simulated run with online requests alone, for the same load."""

        self.runs: list[ValidationRun] = []

    @property
    def seconds(self) -> float:
        """Duration of a run."""
        return self._simulated.load.seconds

    @property
    def budget_s(self) -> float | None:
        """The budget with which the engine met every SLO; None so far."""
        met = [run.measured.budget_s for run in self.runs if run.measured.is_met]
        return met[-1] if met else None

    def run(self, budget_s: float, least_budget_s: float, max_runs: int) -> float:
        """Try a budget, then smaller ones until all SLOs are met; return that budget.

        Raises:
            InfeasibleError: every run missed an SLO; the message names the nearest feasible SLOs.
            StartupError, ServerError: the engine fails.
        """
        assert max_runs >= 1 and budget_s >= least_budget_s
        for _ in range(max_runs):
            trial = self._try(budget_s)
            if trial.is_met:
                return budget_s
            if budget_s == least_budget_s:
                break
            budget_s = max(_smaller(budget_s, trial), least_budget_s)
        best = min((run.measured for run in self.runs), key=lambda trial: trial.excess)
        assert best.budget_s is not None
        raise InfeasibleError(
            f"none of {len(self.runs)} real runs met the SLOs; the best was "
            f"{best.budget_s * 1e3:.4g} ms with {best.values()}. The nearest SLO that one kept: "
            f"{best.nearest_slos()}; or allow more runs, or lower the online load"
        )

    def _try(self, budget_s: float) -> Trial:
        live, load = self._live, self._simulated.load
        name = f"validation-{len(self.runs) + 1}"
        live.progress.begin(f"{name}: simulating", load.seconds)
        expected = self._simulated.under_budget(budget_s, self._simulated_check)
        lines = self._lines(load, expected)
        flags = [*self._flags, *slo_flags(self._check), *budget_flags(budget_s)]
        with live.serving(name, *flags) as base_url:
            measured = live.measure(name, base_url, load, lines)
        run = ValidationRun(
            Trial.of(budget_s, measured, self._check),
            Trial.of(budget_s, expected, self._simulated_check),
        )
        self.runs.append(run)
        return run.measured

    def _lines(self, load: SearchLoad, expected: SearchRun) -> Path:
        seconds = _LINES_FACTOR * (load.seconds + _EXTRA_SECONDS)
        num_lines = math.ceil(expected.offline_requests_per_s * seconds) + load.offline_concurrency
        path = self._live.logs / "offline.jsonl"
        return offline_file(load, path, num_lines=num_lines, vocab_size=self._live.vocab_size)


def _smaller(budget_s: float, trial: Trial) -> float:
    """Return the next budget: smaller by the ratio by which the worst SLO was missed.

    It is at most the longest step that this SLO allows, as a larger budget has no effect. For a
    first token two steps must fit: the one in which the request arrives, and its own.
    """
    worst = max(trial.results, key=lambda result: result.excess)
    most_s = worst.limit_s / 2 if worst.slo.latency is Latency.TTFT else worst.limit_s
    return min(budget_s * min(1 / (1 + worst.excess), _SMALLEST_CUT), most_s)
