"""HyGen Fig. 5, 8, 11 and 14: time, several targets, and the latency predictor.

Llama-2-7B on an A100 of 40 GB, and for Fig. 5 Qwen-14B on an A40: ``hygen_settings``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import correlation
from typing import Final

from paper.experiment import Cell, Findings
from paper.hygen_budgets import METRICS
from paper.hygen_predictor import HygenModel
from paper.hygen_settings import LLAMA, Setting, Tried, serve, tokens_per_s
from paper.testbed import Testbed
from sglang_coserve.core.latency_model.model import FitReport, LatencyModel, Sample, SampleTable
from sglang_coserve.core.planning.offline_phase import serve_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.profiler.shapes import ExecutorLimits, plan_grid

# 90% of 48 GB less 28.3 GB, at 800 KiB a token.
QWEN: Final = Setting(
    Testbed(model="qwen-14b", hardware="a40", kv_capacity_tokens=18_000), qps=0.25
)
WINDOW_S: Final = 20.0


class WholePromptsPolicy(HygenPolicy):
    """HyGen with a budget that bounds offline work alone: online prompts have the chunk size."""

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        decode_online(batch)
        batch.limit_tokens(self.step_prefill_tokens + len(batch.offline_decodes))
        prefill_online(batch, math.inf)
        budget_s = batch.context.config.iteration_budget_s or math.inf
        batch.offline_budget_s = min(batch.offline_budget_s, budget_s)
        serve_offline(batch)


def control(seconds: float) -> Iterator[Findings]:
    """Try budgets once for Fig. 8 and 11, and again under each predictor of Fig. 14."""
    part = (0.0, seconds)
    tried = Tried.budgets(LLAMA, part)
    yield over_time(tried, 3 * seconds)
    yield together(
        {"HyGen": tried, "prompts whole": Tried.budgets(LLAMA, part, policy=WholePromptsPolicy)}
    )
    yield accuracy((seconds, seconds))
    yield robustness(tried, (seconds, seconds))


def over_time(tried: Tried, seconds: float) -> Findings:
    """Serve a longer part under two budgets."""
    found = [tried.best(f"tbt mean <= +{part}%") for part in (20, 50)]
    runs = [serve(LLAMA, (0.0, seconds), HygenPolicy, run.tried) for run in found if run]
    rows: list[tuple[Cell, ...]] = []
    columns: list[Sequence[float]] = []
    for number in range(int(seconds / WINDOW_S)):
        begin_s, end_s = WINDOW_S * number, WINDOW_S * (number + 1)
        sides = (runs[0].online, *(run.offline for run in runs))
        columns.append([tokens_per_s(side, begin_s, end_s) for side in sides])
        rows.append((f"{begin_s:g} s", *columns[-1]))
    online, *offline = zip(*columns, strict=True)
    found_r = ", ".join(f"{correlation(online, each):.2f}" for each in offline)
    return Findings(
        "Fig. 8",
        ("from", "online tok/s", *(f"offline, budget {1e3 * run.tried:.1f} ms" for run in runs)),
        rows,
        [("offline falls where online rises: correlation", "yes", found_r)],
    )


def together(systems: dict[str, Tried]) -> Findings:
    """Find budgets for two targets at once, and count the single ones that have one."""
    rows: list[tuple[Cell, ...]] = []
    for name, tried in systems.items():
        for percent in (10, 20, 30, 40, 50):
            slos = (f"tbt mean <= +{percent}%", "ttft p99 <= +8%")
            label, run = f"{name}, mean TBT +{percent}%", tried.best(*slos)
            if run is None:
                rows.append((label, "none", "-", "-", "-"))
                continue
            over = [tried.above(slo, run) for slo in slos]
            rows.append((label, 1e3 * run.tried, *over, run.offline_per_s))
    single = [f"{metric} <= +{percent}%" for metric in METRICS for percent in (10, 20, 50)]
    return Findings(
        "Fig. 11, P99 TTFT +8%",
        ("system, target", "budget ms", "mean TBT: +%", "P99 TTFT: +%", "offline tok/s"),
        rows,
        [
            (
                f"single targets for which there is a budget, {name}",
                "all",
                f"{sum(tried.best(slo) is not None for slo in single)} of {len(single)}",
            )
            for name, tried in systems.items()
        ],
    )


def error(model: LatencyModel, steps: Sequence[Sample]) -> FitReport:
    """Return the error of predictions of steps."""
    table = SampleTable.of(steps)
    predicted = model.contributions(table).sum(axis=1)
    return FitReport.measure(predicted, table.seconds, fitted_samples=0, seed=0)


def budget_s(setting: Setting) -> float:
    """Return a budget of twice the shortest step."""
    return 2 * setting.testbed.machine.roofline().predict(StepStats.of([], [1]))


def fits(setting: Setting, part: tuple[float, float]) -> dict[str, LatencyModel]:
    """Return HyGen's model, fitted on the steps of three kinds of work."""
    real = setting.testbed.machine.roofline()
    limits = ExecutorLimits(
        512, setting.context_tokens, 64, setting.testbed.kv_capacity_tokens or 0
    )
    grid = [Sample(shape.stats, real.predict(shape.stats)) for shape in plan_grid(limits)]
    short = replace(setting, offline=(500, 64))
    works = {
        "the same work at another time": serve(setting, part, HygenPolicy, budget_s(setting)).steps,
        "shorter work": serve(short, part, HygenPolicy, budget_s(setting)).steps,
        "the shapes of `coserve profile`": grid,
    }
    return {name: HygenModel().fitted(SampleTable.of(steps)) for name, steps in works.items()}


def accuracy(part: tuple[float, float]) -> Findings:
    """Predict the steps of co-serving; step times vary by 2% around the roofline."""
    rows: list[tuple[Cell, ...]] = []
    best = []
    for name, setting in (("Llama-2-7B, A100", LLAMA), ("Qwen-14B, A40", QWEN)):
        seen = serve(setting, (0.0, part[1]), HygenPolicy, budget_s(setting)).steps
        reports = {work: error(model, seen) for work, model in fits(setting, part).items()}
        for work, report in reports.items():
            figures = (100 * report.mape, 100 * report.p99_ape, 100 * report.bias)
            rows.append((f"{name}, {work}", *figures))
        best.append(f"{100 * min(report.mape for report in reports.values()):.2f}%")
    return Findings(
        "Fig. 5",
        ("machine, fitted on", "MAPE %", "P99 error %", "bias %"),
        rows,
        [("mean absolute percentage error", "1.78; 1.07%", "; ".join(best))],
    )


def robustness(tried: Tried, part: tuple[float, float]) -> Findings:
    """Try budgets again under worse predictors."""
    real = LLAMA.testbed.machine.roofline()
    models = {"exact": real, **fits(LLAMA, part)}
    for spread in (0.2, 0.4):
        rng = random.Random(5)
        off = {name: x * math.exp(rng.gauss(0, spread)) for name, x in real.coefficients.items()}
        models[f"coefficients off by {100 * spread:g}%"] = real.with_coefficients(off)
    slos = ("tbt p99 <= +5%", "tbt mean <= +20%")
    rows: list[tuple[Cell, ...]] = []
    for name, model in models.items():
        runs = Tried.budgets(LLAMA, (0.0, part[1]), model)
        found = [runs.best(slo) for slo in slos]
        mape = 100 * error(model, tried.runs[len(tried.runs) // 2].steps).mape
        rows.append((name, mape, *(run.offline_per_s if run else 0.0 for run in found)))
    share = min(float(row[place]) / float(rows[0][place]) for row in rows for place in (2, 3))
    return Findings(
        "Fig. 14",
        ("predictor", "MAPE %", *(f"{slo}: offline tok/s" for slo in slos)),
        rows,
        [("offline throughput with the worst predictor", "robust", f"{share:.0%} of the best")],
    )
