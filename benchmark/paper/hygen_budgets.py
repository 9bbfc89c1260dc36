"""HyGen Fig. 3, 4, 7 and 10: budgets searched beside half of a trace, tried beside the other.

Llama-2-7B on an A100 of 40 GB, the bundled trace at a rate, offline requests of 2,000 + 128 tokens.
The search is that of ``coserve simulate --find-budget``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from paper.experiment import Cell, Findings
from paper.hygen import TESTBED
from paper.testbed import Testbed, offline_per_s
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.metrics import LatencyReport, latency_report
from sglang_coserve.simulator.find_budget import BudgetSearch
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.result import SimulationResult
from sglang_coserve.simulator.run import simulate
from sglang_coserve.workload.shape import fit_to_context, scale_rate, until
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path

METRICS: Final = ("tbt mean", "tbt p99", "ttft mean", "ttft p99")


@dataclass(frozen=True)
class Half(Testbed):
    """The flags of a search, with ``duration`` seconds of the trace from ``begin_s`` on."""

    begin_s: float = 0.0

    def online_trace(self) -> Sequence[TraceRequest]:
        """See ``SimulationOptions``."""
        end_s = self.begin_s + (self.duration or math.inf)
        whole = until(scale_rate(read_trace(sample_path("online")), self.rate), end_s)
        part = (replace(one, arrival_s=one.arrival_s - self.begin_s) for one in whole)
        return fit_to_context((o for o in part if o.arrival_s >= 0), self.max_context_tokens)[0]

    def run(self, policy: Policy, budget_s: float | None = None) -> SimulationResult:
        """Run a new policy under a budget."""
        setup = self.setup(policy.name)
        scheduler = replace(setup.scheduler, iteration_budget_s=budget_s)
        return simulate(self.workload(), replace(setup, slos=(), scheduler=scheduler), policy)


def half(slo: str, qps: float, seconds: float) -> Half:
    """Return what the search gets."""
    return Half(
        model="llama-2-7b",
        hardware="a100",
        kv_capacity_tokens=TESTBED.kv_capacity_tokens,
        max_context_tokens=4096,
        offline="2000x128",
        policy="hygen",
        slo=[slo],
        rate=qps,
        duration=seconds,
    )


def above(slo: str, alone: LatencyReport, beside: LatencyReport) -> float:
    """Return by how many percent a latency is above that of online requests alone."""
    parsed = parse_slo(slo)
    before, after = (parsed.statistic.of(parsed.latency.summary(r)) for r in (alone, beside))
    assert before is not None and after is not None
    return 100 * (after / before - 1)


def tried(asked: Half, slo: str, budget_s: float) -> tuple[float, float]:
    """Return by how many percent a budget exceeds online requests alone beside the other half, and
    the offline tokens/s there."""
    other = replace(asked, begin_s=asked.duration or 0.0)
    alone, beside = other.run(OnlineOnlyPolicy()), other.run(HygenPolicy(), budget_s)
    over = above(slo, latency_report(alone.online), latency_report(beside.online))
    return over, offline_per_s(beside)


def searched(slo: str, qps: float, seconds: float) -> tuple[tuple[Cell, ...], bool | None]:
    """Return a row; whether the budget keeps the target beside the other half, None without one."""
    asked = half(slo, qps, seconds)
    search = BudgetSearch(asked, RunControl(show=False))
    search.run()
    assert search.online_only is not None
    best = min(search.trials, key=lambda one: one.excess)
    if search.budget_s is not None:
        best = next(one for one in search.trials if one.budget_s == search.budget_s)
    assert best.budget_s is not None
    over, per_s = tried(asked, slo, best.budget_s)
    limit = 100 * (parse_slo(slo).tolerance or 0.0)
    is_kept = None if search.budget_s is None else over <= limit
    verdict = {None: "no budget; best:", True: "yes", False: "no"}[is_kept]
    first = above(slo, search.online_only.latency, best.latency)
    return (f"{qps:g} QPS, {slo}", verdict, 1e3 * best.budget_s, first, over, per_s), is_kept


def simple(percent: int, qps: float, seconds: float) -> tuple[Cell, ...]:
    """Return a row of Fig. 7: the mean TBT that is allowed is the budget."""
    slo = f"tbt mean <= +{percent}%"
    asked = half(slo, qps, seconds)
    alone_s = latency_report(asked.run(OnlineOnlyPolicy()).online).itl.mean_s
    assert alone_s is not None
    budget_s = parse_slo(slo).limit_over_value(alone_s)
    return f"{qps:g} QPS, {slo}", 1e3 * budget_s, *tried(asked, slo, budget_s)


def budgets(seconds: float) -> Iterator[Findings]:
    """Fig. 3 and 4: tolerances; Fig. 10: loads."""
    targets = [(1.5, metric, percent) for metric in METRICS for percent in (5, 20, 50)]
    targets += [(qps, metric, 5) for qps in (0.75, 2.5) for metric in METRICS]
    found = [searched(f"{metric} <= +{part}%", qps, seconds) for qps, metric, part in targets]
    kept = [is_kept for _, is_kept in found if is_kept is not None]
    yield Findings(
        "Fig. 3, 4 and 10",
        ("target", "kept", "budget ms", "searched: +%", "other half: +%", "offline tok/s"),
        [row for row, _ in found],
        [
            ("targets for which there is a budget", "all", f"{len(kept)} of {len(found)}"),
            ("of these, kept beside the other half", "all", f"{sum(kept)}"),
        ],
    )
    yield Findings(
        "Fig. 7: the simple strategy",
        ("target", "budget ms", "other half: +%", "offline tok/s"),
        [simple(percent, 1.5, seconds) for percent in (5, 20, 50)],
    )
    yield Findings("Why mean TTFT is out of reach, 1.5 QPS", *why(seconds))


def why(seconds: float) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    """Return a table: mean TTFT above that of online requests alone, under budgets."""
    slo = "ttft mean <= +5%"
    plain = half(slo, 1.5, seconds)
    suspending = replace(plain, safepoint_layers=4)
    idle = replace(plain, offline="none", backlog=0)
    alone = latency_report(plain.run(OnlineOnlyPolicy()).online)
    rows: list[tuple[Cell, ...]] = []
    for budget_ms in (11.0, 15.0, 20.0, 40.0):
        results = [one.run(HygenPolicy(), budget_ms / 1e3) for one in (idle, plain, suspending)]
        cells = [above(slo, alone, latency_report(one.online)) for one in results]
        rows.append((f"{budget_ms:g} ms", *cells, offline_per_s(results[-1])))
    columns = ("budget", "no offline work: +%", "HyGen: +%", "and safepoints: +%", "offline tok/s")
    return columns, rows
