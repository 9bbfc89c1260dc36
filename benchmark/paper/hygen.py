"""HyGen's experiments: Fig. 3 and 4, 6, 7, 10 and 15, 14.

Llama-2-7B on one A100 of 40 GB, Azure's conversation trace sampled to a rate, arXiv-like offline
requests (§5.1). HyGen runs under a latency budget of a step that is searched for each target.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

from paper.experiment import Cell, Claim, Conditions, Experiment, Findings
from paper.testbed import (
    Lengths,
    Requests,
    Testbed,
    azure_online,
    gamma_arriving,
    offline_backlog,
    offline_per_s,
    p99_itl_ms,
    run,
)
from sglang_coserve.core.budget_search import search_budget
from sglang_coserve.core.control.slo import Latency, Slo, SloCheck, parse_slo
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy, SarathiPolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InfeasibleError
from sglang_coserve.metrics import LatencyReport, SloTargets, latency_report
from sglang_coserve.simulator import SimulationResult, SimulationSetup, Workload
from sglang_coserve.simulator.assemble import SimulatedMachine
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.workload import TraceRequest

__all__ = ["EXPERIMENTS"]

MACHINE: Final = SimulatedMachine.named("llama-2-7b", "a100")
TESTBED: Final = Testbed(MACHINE, kv_tokens=42_000)
"""KV of 40 GB: 90% less 13.5 GB of weights, at 512 KiB a token."""

ARXIV: Final = Lengths(2800, 3600, 200, 300)
"""arXiv summarization, cut to Llama-2's context; the text gives no lengths."""

METRICS: Final = ("tbt mean", "tbt p99", "ttft mean", "ttft p99")
QPS: Final = 1.5
CHUNK_TOKENS: Final = 512
"""Of all systems; the default of our HyGen policy."""

SEARCH_RUNS: Final = 9
NOT_KEPT: Final = ("no budget keeps it", 0.0)


@dataclass(frozen=True, slots=True)
class HygenBench:
    """One online load beside endless offline requests, and its latencies alone."""

    workload: Workload
    alone: SimulationResult
    setup: SimulationSetup

    @classmethod
    def at(
        cls, qps: float, conditions: Conditions, believed: LatencyModel | None = None
    ) -> HygenBench:
        """Measure online requests alone; ``believed`` is the scheduler's latency model."""
        seconds = conditions.seconds
        online = azure_online(conditions.trace, qps, seconds)
        setup = TESTBED.setup(SloTargets(), believed)
        workload = Workload(online, offline_backlog(lambda: ARXIV.draws(2)), 64, interval_s=seconds)
        return cls(workload, run(workload, setup, OnlineOnlyPolicy(CHUNK_TOKENS)), setup)

    def limit_s(self, slo: Slo) -> float:
        """Return the latency that a target allows, which may be relative to Online-Only."""
        return self._measured(slo, self.alone)[1]

    def percent_over(self, slo: Slo, result: SimulationResult) -> float:
        """Return by how many percent a latency exceeds that of online requests alone."""
        measured_s, limit_s = self._measured(slo, result)
        return 100 * (measured_s / (limit_s / (1 + (slo.tolerance or 0))) - 1)

    def cells(self, slo: Slo, result: SimulationResult | None) -> tuple[Cell, Cell]:
        """Return the percentage and offline tokens/s, or that there is no result."""
        if result is None:
            return NOT_KEPT
        return self.percent_over(slo, result), offline_per_s(result)

    def under_budget(self, budget_s: float) -> SimulationResult:
        """Run HyGen with this latency budget of a step."""
        scheduler = replace(self.setup.scheduler, iteration_budget_s=budget_s)
        return run(self.workload, replace(self.setup, scheduler=scheduler), "hygen")

    def searched(self, slo: Slo) -> SimulationResult | None:
        """Run HyGen with the largest budget that keeps the target (§4.2); None if none does."""
        # The budget bounds online prefills too, and what is less than they need by
        # themselves delays first tokens instead of sparing them.
        low_s = p99_itl_ms(self.alone) / 1e3 if slo.latency is Latency.TTFT else 1e-3
        return self.largest(self.under_budget, slo, low_s, 0.5)

    def largest(
        self, run_with: Callable[[float], SimulationResult], slo: Slo, low: float, high: float
    ) -> SimulationResult | None:
        """Run with the largest setting found that keeps the target; None if none does."""
        results: dict[float, SimulationResult] = {}

        def report(setting: float) -> LatencyReport:
            results[setting] = run_with(setting)
            return latency_report(results[setting].online)

        check = SloCheck((slo,), latency_report(self.alone.online))
        try:
            found = search_budget(report, check, low, high, max_runs=SEARCH_RUNS)
        except InfeasibleError:
            return None
        return results[found.budget_s]

    def _measured(self, slo: Slo, result: SimulationResult) -> tuple[float, float]:
        check = SloCheck((slo,), latency_report(self.alone.online))
        (found,) = check.results(latency_report(result.online))
        assert found.measured_s is not None
        return found.measured_s, found.limit_s


def tolerance(metric: str, part: float) -> Slo:
    """Return the target that allows this part more than online requests alone."""
    return parse_slo(f"{metric} <= +{100 * part:g}%")


def fig3_4(conditions: Conditions) -> Iterator[Findings]:
    """Interference kept within tolerances; HyGen* has offline requests at a fixed rate."""
    bench = HygenBench.at(QPS, conditions)

    def at_offline_rate(rate_per_s: float) -> SimulationResult:
        offline = gamma_arriving(
            rate_per_s, 1.0, ARXIV, conditions.seconds, request_class=RequestClass.OFFLINE
        )
        load = replace(bench.workload, offline=offline, backlog_depth=0)
        return run(load, bench.setup, SarathiPolicy(CHUNK_TOKENS))

    alone = bench.alone.online_throughput.total_tokens_per_s
    sarathi = run(bench.workload, bench.setup, SarathiPolicy(CHUNK_TOKENS))
    rows: list[tuple[Cell, ...]] = []
    total, gain, kept = [], [], []
    for metric in METRICS:
        rows.append((f"{metric}, Sarathi++", "-", *bench.cells(tolerance(metric, 0.05), sarathi)))
        for part in (0.05, 0.1, 0.2, 0.3):
            slo = tolerance(metric, part)
            limited = bench.searched(slo)
            star = bench.largest(at_offline_rate, slo, 0.01, 10.0)
            for system, result in (("HyGen", limited), ("HyGen*", star)):
                name = f"{metric} +{100 * part:g}%, {system}"
                rows.append((name, 100 * part, *bench.cells(slo, result)))
            kept.append(limited is not None)
            if limited is not None:
                total.append((offline_per_s(limited) + alone) / alone)
                if star is not None and offline_per_s(star):
                    gain.append(offline_per_s(limited) / offline_per_s(star))
    yield Findings(
        "Fig. 3 and 4",
        ("metric, system", "tolerance %", "above online-only %", "offline tok/s"),
        rows,
        [
            Claim(
                "targets that some budget keeps",
                "all",
                f"{sum(kept)} of {len(kept)}",
                "an arrival waits for the step that runs, which a budget cannot make shorter "
                "than online prefills need",
            ),
            Claim("total throughput against online alone, up to", "3.87x", f"{max(total):.2f}x"),
            Claim(
                "offline throughput against HyGen*, up to",
                "5.84x",
                f"{max(gain):.2f}x",
                "depends on the share of the capacity that the online load takes",
            ),
        ],
    )


SUBJECTS, SHARED_TOKENS, QUESTION_TOKENS = 57, 512, (64, 192)


def mmlu_like() -> Requests:
    """Return 100,000 shuffled questions of 57 subjects, each with the subject's five examples."""
    rng = random.Random(3)
    trace = [
        TraceRequest(
            index, 0.0, SHARED_TOKENS + rng.randint(*QUESTION_TOKENS), 2, (rng.randrange(SUBJECTS),)
        )
        for index in range(100_000)
    ]
    return partial(from_trace, trace, RequestClass.OFFLINE)


def fig6(conditions: Conditions) -> Iterator[Findings]:
    """Prefix sharing maximization (PSM) on MMLU-like offline requests.

    The paper computed its figure too: it deducts from each prompt what it shares with the one
    before it. So PSM is compared with arrival order under that rule (here: no prefix cache, for
    neighbours hardly ever share), and, beyond the paper, with arrival order under a real one.
    """
    orders = {
        "arrival order, nothing shared": (False, 0.0),
        "arrival order, prefix cache": (True, 0.0),
        "PSM with freshness (0.95)": (True, 0.95),
        "PSM": (True, 1.0),
    }
    rows: list[tuple[Cell, ...]] = []
    gains = []
    for qps in (0.5, 1.0, 2.0):
        seconds = conditions.seconds
        online = azure_online(conditions.trace, qps, seconds)
        load = Workload(online, mmlu_like(), 5_000, interval_s=seconds)
        alone = run(load, TESTBED.setup(SloTargets()), "online_only")
        targets = SloTargets(tpot_s=1.5 * p99_itl_ms(alone) / 1e3)
        per_s: list[float] = []
        for name, (is_shared, utility) in orders.items():
            setup = replace(TESTBED, prefix_cache=is_shared).setup(targets)
            result = run(load, setup, HygenPolicy(utility_ratio=utility))
            per_s.append(result.offline_throughput.requests_per_s)
            gain = per_s[-1] / per_s[0] if per_s[0] else math.nan
            rows.append((f"{qps:g} QPS, {name}", per_s[-1], f"{gain:.2f}x", p99_itl_ms(result)))
        gains.append(gain)
    yield Findings(
        "Fig. 6",
        ("online, order", "offline req/s", "gain", "P99 TBT ms"),
        rows,
        [
            Claim(
                "offline throughput by PSM, up to",
                "4x",
                f"{max(gains):.2f}x",
                "the questions' share of a prompt sets the bound: (512 + 128) / 128 = 5 here",
            )
        ],
    )


def fig7(conditions: Conditions) -> Iterator[Findings]:
    """The mean TBT that is allowed as the budget of a step, against the budget found by runs."""
    bench = HygenBench.at(QPS, conditions)
    rows: list[tuple[Cell, ...]] = []
    gaps, gains = [], []
    for part in (0.05, 0.1, 0.2, 0.3, 0.5):
        slo = tolerance("tbt mean", part)
        simple = bench.under_budget(bench.limit_s(slo))
        profiled = bench.searched(slo)
        if profiled is None:
            continue
        for name, result in (("simple", simple), ("profiler", profiled)):
            rows.append((f"+{100 * part:g}%, {name}", 100 * part, *bench.cells(slo, result)))
        gaps.append(bench.percent_over(slo, simple) - 100 * part)
        gains.append(offline_per_s(profiled) / max(offline_per_s(simple), 1.0))
    yield Findings(
        "Fig. 7",
        ("tolerance, budget", "allowed %", "above online-only %", "offline tok/s"),
        rows,
        [
            Claim(
                "mean TBT under the simple strategy",
                "misses the target's value",
                f"{min(gaps):+.0f} to {max(gaps):+.0f} percentage points off",
                "below it: steps are as long as the budget at most, shorter without work",
            ),
            Claim("offline throughput by the profiler", "higher", f"up to {max(gains):.2f}x"),
        ],
    )


def fig10_15(conditions: Conditions) -> Iterator[Findings]:
    """Targets and offline throughput over the online load, 5% tolerance."""
    rates = (0.5, 1.0, 1.5, 2.0, 2.5)
    rows: list[tuple[Cell, ...]] = []
    kept = 0
    by_rate: list[float] = []
    for rate in rates:
        bench = HygenBench.at(rate, conditions)
        for metric in METRICS:
            slo = tolerance(metric, 0.05)
            result = bench.searched(slo)
            rows.append((f"{rate:g} QPS, {metric}", *bench.cells(slo, result)))
            kept += result is not None
            if result is not None and metric == "tbt p99":
                by_rate.append(offline_per_s(result))
    falls = all(a >= b for a, b in pairwise(by_rate))
    yield Findings(
        "Fig. 10 and 15",
        ("load, metric", "above online-only %", "offline tok/s"),
        rows,
        [
            Claim(
                "Fig. 10: targets kept at 5%",
                "all",
                f"{kept} of {len(rates) * len(METRICS)}",
                "TTFT: an arrival waits for the step that runs; see Fig. 3 and 4",
            ),
            Claim(
                "Fig. 15: offline throughput as the load grows, P99 TBT +5%",
                "adjusts to what is left",
                f"{by_rate[0]:,.0f} to {by_rate[-1]:,.0f} tokens/s"
                f"{', falling all the way' if falls else ''}",
            ),
        ],
    )


def wrong(model: LatencyModel, spread: float) -> LatencyModel:
    """Return the model with every coefficient off by a seeded lognormal factor."""
    rng = random.Random(5)
    return model.with_coefficients(
        {name: value * math.exp(rng.gauss(0, spread)) for name, value in model.coefficients.items()}
    )


def fig14(conditions: Conditions) -> Iterator[Findings]:
    """Offline throughput under the same P99 TBT target with worse latency predictors."""
    true = MACHINE.roofline()
    slo = tolerance("tbt p99", 0.05)
    batches = [
        StepStats.of([(tokens, context)] if tokens else [], [context] * requests)
        for tokens in (0, 64, 256, 512)
        for context in (256, 1024, 3000)
        for requests in (1, 8, 24)
    ]
    rows: list[tuple[Cell, ...]] = []
    throughputs = []
    for spread in (0.0, 0.05, 0.1, 0.2, 0.4):
        believed = wrong(true, spread)
        errors = [abs(believed.predict(b) / true.predict(b) - 1) for b in batches]
        bench = HygenBench.at(QPS, conditions, believed)
        result = bench.searched(slo)
        mape = 100 * sum(errors) / len(errors)
        rows.append((f"MAPE {mape:.1f}%", *bench.cells(slo, result)))
        throughputs.append(0.0 if result is None else offline_per_s(result))
    yield Findings(
        "Fig. 14",
        ("predictor", "P99 TBT above online-only %", "offline tok/s"),
        rows,
        [
            Claim(
                "offline throughput with the worst predictor, of the best one's",
                "robust",
                f"{min(throughputs) / throughputs[0]:.0%}",
            )
        ],
    )


EXPERIMENTS: Final = {
    "hygen_fig3_4": Experiment("HyGen Fig. 3 and 4: interference within tolerances", fig3_4),
    "hygen_fig6": Experiment("HyGen Fig. 6: prefix sharing maximization", fig6),
    "hygen_fig7": Experiment("HyGen Fig. 7: the searched budget", fig7),
    "hygen_fig10_15": Experiment("HyGen Fig. 10 and 15: over the online load", fig10_15),
    "hygen_fig14": Experiment("HyGen Fig. 14: worse latency predictors", fig14),
}
