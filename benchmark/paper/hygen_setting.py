"""What the HyGen experiments share: the workload of §5.1 and runs under a searched budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness import Lengths, Testbed, azure_online, offline_backlog, p99_itl_ms, run

from sglang_coserve.core.budget_search import search_budget
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.policies.online_only import OnlineOnlyPolicy
from sglang_coserve.core.slo import Latency, Slo, SloCheck, parse_slo
from sglang_coserve.errors import InfeasibleError
from sglang_coserve.metrics import LatencyReport, SloTargets, latency_report
from sglang_coserve.simulator import Setup, SimulationResult, Workload
from sglang_coserve.simulator.assemble import Machine

__all__ = [
    "ARXIV",
    "CHUNK_TOKENS",
    "MACHINE",
    "METRICS",
    "Bench",
    "offline_per_s",
    "percent_over",
    "tolerance",
]

MACHINE = Machine.named("llama-2-7b", "a100")
KV_TOKENS = 42_000
"""Of 40 GB: 90% less 13.5 GB of weights, at 512 KiB a token."""

ARXIV = Lengths(2800, 3600, 200, 300)
"""arXiv summarization, cut to Llama-2's context; the text gives no lengths."""

METRICS = ("tbt mean", "tbt p99", "ttft mean", "ttft p99")
SEARCH_RUNS = 9
CHUNK_TOKENS = 512
"""Of all systems; the default of our HyGen policy."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One online load beside endless offline requests, and its latencies alone."""

    workload: Workload
    alone: SimulationResult
    setup: Setup

    @classmethod
    def at(
        cls, qps: float, seconds: float, trace: str | None, believed: LatencyModel | None = None
    ) -> Bench:
        """Measure online requests alone; ``believed`` is the scheduler's latency model."""
        online = azure_online(trace, qps, seconds)
        testbed = Testbed(MACHINE, kv_tokens=KV_TOKENS)
        setup = testbed.setup(SloTargets(), believed)
        workload = Workload(online, offline_backlog(lambda: ARXIV.draws(2)), 64, interval_s=seconds)
        return cls(workload, run(workload, setup, OnlineOnlyPolicy(CHUNK_TOKENS)), setup)

    def check(self, slo: Slo) -> SloCheck:
        """Return the check of one target, which may be relative to online requests alone."""
        return SloCheck((slo,), self.alone_report)

    @property
    def alone_report(self) -> LatencyReport:
        """The latencies of online requests alone."""
        return latency_report(self.alone.online)

    def under_budget(self, budget_s: float) -> SimulationResult:
        """Run HyGen with this latency budget of an iteration."""
        scheduler = replace(self.setup.scheduler, iteration_budget_s=budget_s)
        return run(self.workload, replace(self.setup, scheduler=scheduler), "hygen")

    def searched(self, slo: Slo) -> SimulationResult | None:
        """Run HyGen with the largest budget that keeps the target (§4.2); None if none does."""
        # The budget bounds online prefills too, and what is less than they need by
        # themselves delays first tokens instead of sparing them.
        low_s = 1e-3
        if slo.latency is Latency.TTFT:
            low_s = p99_itl_ms(self.alone) / 1e3
        return self.largest(self.under_budget, slo, low_s, 0.5)

    def largest(
        self, run_with: Callable[[float], SimulationResult], slo: Slo, low: float, high: float
    ) -> SimulationResult | None:
        """Run with the largest setting found that keeps the target; None if none does."""
        results: dict[float, SimulationResult] = {}

        def report(setting: float) -> LatencyReport:
            results[setting] = run_with(setting)
            return latency_report(results[setting].online)

        try:
            found = search_budget(report, self.check(slo), low, high, max_runs=SEARCH_RUNS)
        except InfeasibleError:
            return None
        return results[found.budget_s]


def tolerance(metric: str, part: float) -> Slo:
    """Return the target that allows this part more than online requests alone."""
    return parse_slo(f"{metric} <= +{100 * part:g}%")


def percent_over(bench: Bench, slo: Slo, result: SimulationResult) -> float:
    """Return by how many percent the target's latency exceeds that of online requests alone."""
    (measured,) = bench.check(slo).results(latency_report(result.online))
    assert measured.measured_s is not None
    return 100 * (measured.measured_s / (measured.limit_s / (1 + (slo.tolerance or 0))) - 1)


def offline_per_s(result: SimulationResult) -> float:
    """Return prompt and output tokens a second of the offline requests."""
    return result.offline_throughput.total_tokens_per_s
