"""A whole search: on the simulator, then validated on the engine."""

from __future__ import annotations

from pathlib import Path

from sglang_coserve.core.control.slo import SloCheck
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.errors import InfeasibleError
from sglang_coserve.profiler import load_profile
from sglang_coserve.slo_search.live import LiveBench
from sglang_coserve.slo_search.machine import EngineMachine
from sglang_coserve.slo_search.measurement import Trial
from sglang_coserve.slo_search.options import SearchOptions, ValidationOptions
from sglang_coserve.slo_search.progress import SearchProgress
from sglang_coserve.slo_search.search import BudgetSearch
from sglang_coserve.slo_search.server_flags import budget_flags, policy_flags, slo_flags
from sglang_coserve.slo_search.simulated import SimulatedBench
from sglang_coserve.slo_search.validation import Validation

__all__ = ["SearchSession"]

_ALONE = "online-only"


class SearchSession:
    """One search. Its results so far remain available when it ends early."""

    def __init__(self, options: SearchOptions, work: Path, progress: SearchProgress) -> None:
        """``work`` is a folder for the servers' logs.

        Raises:
            InputFileError: the profile cannot be read.
        """
        self.options = options
        self.profile: LatencyProfile = load_profile(options.profile)
        self.machine: EngineMachine | None = None
        self.search: BudgetSearch | None = None
        self.measured_alone: Trial | None = None
        """The run with online requests alone on the real engine."""

        self.validation: Validation | None = None
        self.problem: str | None = None
        """Why there is no budget; None if there is one, or if the session was interrupted."""

        self._work = work
        self._progress = progress

    def run(self) -> None:
        """Search, and validate if requested; infeasible SLOs are reported in ``problem``.

        Raises:
            CoserveError: a file cannot be used, or the server fails.
        """
        validation = self.options.validation
        try:
            if validation is None:
                self.machine = self.options.machine(EngineMachine())
                self._search(self.machine)
            else:
                self._search_and_validate(validation)
        except InfeasibleError as error:
            self.problem = str(error)

    @property
    def budget_s(self) -> float | None:
        """The budget to serve with: the validated one, if validation was requested."""
        if self.options.validation is not None:
            return None if self.validation is None else self.validation.budget_s
        return None if self.search is None else self.search.budget_s

    @property
    def server_flags(self) -> list[str] | None:
        """The flags of a server with this budget; None without a budget."""
        alone = self.measured_alone or (self.search and self.search.online_only)
        if self.budget_s is None or not alone:
            return None
        options = self.options
        check = SloCheck(options.slos(), alone.measurement.latency)
        return [
            *(options.validation.server_flags if options.validation else ()),
            *policy_flags(options.policy, options.profile),
            *slo_flags(check),
            *budget_flags(self.budget_s),
        ]

    def _search(self, machine: EngineMachine) -> float:
        bench = self._bench(machine, self.options.duration)
        self.search = BudgetSearch(bench, self.options.slos(), max_runs=self.options.max_runs)
        return self.search.run()

    def _search_and_validate(self, validation: ValidationOptions) -> None:
        options = self.options
        live = LiveBench.of(
            validation.model_path, validation.server_flags, self._work, self._progress
        )
        flags = policy_flags(options.policy, options.profile)
        with live.serving(_ALONE, *flags) as base_url:
            self.machine = machine = options.machine(live.machine(base_url))
            bench = self._bench(machine, validation.seconds)
            alone = live.measure(_ALONE, base_url, bench.load)
        check = SloCheck(options.slos(), alone.latency)
        self.measured_alone = Trial.of(None, alone, check)
        if not self.measured_alone.is_met:
            raise InfeasibleError(
                "not even online requests alone meet the SLOs on this machine: "
                f"{self.measured_alone.values()}. The nearest that they keep: "
                f"{self.measured_alone.nearest_slos()}; or lower the online load"
            )
        budget_s = self._search(machine)
        assert self.search is not None
        self.validation = Validation(live, bench, check, flags)
        self.validation.run(budget_s, self.search.least_budget_s, validation.max_runs)

    def _bench(self, machine: EngineMachine, seconds: float | None) -> SimulatedBench:
        load = self.options.load(machine, seconds)
        model = self.profile.latency_model
        return SimulatedBench(model, machine, load, self.options.policy, self._progress)
