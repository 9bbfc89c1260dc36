"""Runs on the simulator: the production scheduler, with step times from the profile."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_coserve.core.control.slo import SloCheck, request_targets
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.metrics import Outcome, SloTargets, latency_report
from sglang_coserve.simulator import SimulationResult, SimulationSetup, simulate
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.slo_search.machine import EngineMachine
from sglang_coserve.slo_search.measurement import SearchRun
from sglang_coserve.slo_search.progress import SearchProgress

__all__ = ["SimulatedBench"]


@dataclass(frozen=True, slots=True)
class SimulatedBench:
    """One load on one modelled engine."""

    model: LatencyModel
    machine: EngineMachine
    load: SearchLoad
    policy: str
    progress: SearchProgress

    def online_only(self) -> SearchRun:
        """Run without offline requests and without targets."""
        return self._run("online_only", SloTargets(), None)

    def under_budget(self, budget_s: float, check: SloCheck) -> SearchRun:
        """Run both classes; as on the server, the scheduler has the SLOs and the budget."""
        targets = request_targets(check.slos, check.online_only)
        return self._run(self.policy, targets, budget_s)

    def _run(self, policy: str, targets: SloTargets, budget_s: float | None) -> SearchRun:
        load = self.load
        setup = SimulationSetup(
            model=self.model,
            executor=self.machine.executor_config(load.seed),
            targets=targets,
            scheduler=SchedulerConfig(
                iteration_budget_s=budget_s,
                # The simulator keeps this many waiting in addition; the server has them in all.
                max_offline_requests=load.offline_concurrency,
                seed=load.seed,
            ),
        )
        workload, chosen = load.simulated(), make_policy(policy)
        result = simulate(workload, setup, chosen, on_progress=self.progress.tick)
        return _measurement(result)


def _measurement(result: SimulationResult) -> SearchRun:
    offline = result.offline_throughput
    outcomes = {timeline.outcome for timeline in result.offline}
    return SearchRun(
        latency_report(result.online),
        offline_tokens_per_s=offline.total_tokens_per_s,
        offline_requests_per_s=offline.requests_per_s,
        offline_ran_out=bool(outcomes) and Outcome.UNFINISHED not in outcomes,
    )
