"""From runs to figures: medians with their range, and ratios pair by pair."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.stock import best_setting
from coserve_bench.offline_bounds import OfflineBounds
from coserve_bench.run_record import RunRecord
from coserve_bench.slo import SloRule, targets_of
from coserve_bench.systems import BASELINE, SEARCHED, THROUGHPUT_BOUND
from sglang_coserve.metrics import (
    Outcome,
    SloTargets,
    attainment,
    latency_report,
    throughput,
    token_attainment,
)

__all__ = [
    "RATIO_TO",
    "Row",
    "Spread",
    "figures_of",
    "pair_ratios",
    "searched",
    "spread",
    "summarize_runs",
]

RATIO_TO: Final[Mapping[str, str]] = {
    "p50_ttft_ms": BASELINE,
    "p99_ttft_ms": BASELINE,
    "p99_itl_ms": BASELINE,
    "mean_tpot_ms": BASELINE,
    "total_tokens_per_s": BASELINE,
    "offline_tokens_per_s": THROUGHPUT_BOUND,
    "offline_output_tokens_per_s": THROUGHPUT_BOUND,
}
"""The system that each figure is divided by."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repeats."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one load, under one SLO."""

    load: float
    system: str
    slo: str
    targets: SloTargets | None
    """What its attainment is judged by: what the server was told in the last
    repeat, else the first rule's targets at this load."""

    figures: Mapping[str, Spread]
    ratios: Mapping[str, Spread]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return median and range of what is defined; None when nothing is."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    return Spread(statistics.median(defined), min(defined), max(defined), len(defined))


def pair_ratios(
    values: Mapping[int, float | None], base: Mapping[int, float | None]
) -> list[float]:
    """Return ``values[repeat] / base[repeat]`` for every repeat that has both.

    Pairs of one repeat were measured minutes apart, so that what the machine
    does over hours cancels out.
    """
    ratios = []
    for repeat, value in values.items():
        divisor = base.get(repeat)
        if value is not None and divisor:
            ratios.append(value / divisor)
    return ratios


def figures_of(
    record: RunRecord, targets: SloTargets | None, bounds: OfflineBounds | None = None
) -> dict[str, float | None]:
    """Return the figures of one run, named as in docs/metrics.md with their unit."""
    report = latency_report(record.online)
    online = throughput(record.online, 0.0, record.window_s)
    offline = None if record.offline is None else record.offline.throughput
    offline_tokens_per_s = 0.0 if offline is None else offline.total_tokens_per_s
    bound_tokens_per_s = None
    if bounds is not None and offline is not None and targets is not None:
        bound_tokens_per_s = bounds.tokens_per_s(record, targets)
    return {
        "p50_ttft_ms": _ms(report.ttft.p50_s),
        "p99_ttft_ms": _ms(report.ttft.p99_s),
        "p50_itl_ms": _ms(report.itl.p50_s),
        "p99_itl_ms": _ms(report.itl.p99_s),
        "mean_tpot_ms": _ms(report.tpot.mean_s),
        "attainment": None if targets is None else attainment(record.online, targets),
        "token_attainment": None if targets is None else token_attainment(record.online, targets),
        "online_tokens_per_s": online.total_tokens_per_s,
        "offline_tokens_per_s": None if offline is None else offline_tokens_per_s,
        "offline_bound_tokens_per_s": bound_tokens_per_s,
        "offline_share_of_bound": (
            offline_tokens_per_s / bound_tokens_per_s if bound_tokens_per_s else None
        ),
        "offline_output_tokens_per_s": None if offline is None else offline.output_tokens_per_s,
        "total_tokens_per_s": online.total_tokens_per_s + offline_tokens_per_s,
        "online_failed": sum(t.outcome is Outcome.FAILED for t in record.online),
        "offline_failed": None if record.offline is None else record.offline.failed,
    }


def summarize_runs(
    records: Sequence[RunRecord],
    rules: Sequence[SloRule],
    bounds: OfflineBounds | None = None,
) -> list[Row]:
    """Return one row for each load, system and SLO, loads ascending, else in order of first run.

    With ``bounds``, runs with targets have the most offline tokens/s that were possible, too.

    Raises:
        ConfigError: the bounds' model is not convex.
    """
    groups: dict[tuple[float, str, str], list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.key.repeat):
        groups[record.key.load, record.key.system, record.key.slo].append(record)

    figures: dict[tuple[float, str, str], dict[int, dict[str, float | None]]] = {}
    targets: dict[tuple[float, str, str], SloTargets | None] = {}
    for group, runs in groups.items():
        baseline = [run.online for run in groups.get((group[0], BASELINE, ""), ())]
        default = targets_of(rules[0], baseline) if rules else None
        targets[group] = runs[-1].targets or default
        figures[group] = {
            run.key.repeat: figures_of(run, run.targets or default, bounds) for run in runs
        }
    return [
        _row(group, figures, targets[group]) for group in sorted(groups, key=lambda group: group[0])
    ]


def searched(rows: Sequence[Row]) -> dict[tuple[float, str], str]:
    """Return which system counts of those of ``SEARCHED`` at each load: see ``stock``.

    Where ``coserve`` was not measured, the one with the best P99 TTFT.
    """
    found = {}
    for load in dict.fromkeys(row.load for row in rows):
        at_load = [row for row in rows if row.load == load]
        ours = [_tokens(row) for row in at_load if row.system == "coserve"]
        for kind, names in SEARCHED.items():
            candidates = {
                row.system: (row.figures["p99_ttft_ms"].median, _tokens(row))
                for row in at_load
                if row.system in names and "p99_ttft_ms" in row.figures
            }
            if candidates:
                found[load, kind] = best_setting(candidates, ours[0] if ours else 0.0)
    return found


def _tokens(row: Row) -> float:
    spread_over_repeats = row.figures.get("offline_tokens_per_s")
    return spread_over_repeats.median if spread_over_repeats else 0.0


def _row(
    group: tuple[float, str, str],
    figures: Mapping[tuple[float, str, str], Mapping[int, Mapping[str, float | None]]],
    targets: SloTargets | None,
) -> Row:
    load, system, slo = group
    own = figures[group]
    names = next(iter(own.values())).keys()
    spreads, ratios = {}, {}
    for name in names:
        values = {repeat: run[name] for repeat, run in own.items()}
        if found := spread(values.values()):
            spreads[name] = found
        base = figures.get((load, RATIO_TO[name], ""), {}) if name in RATIO_TO else {}
        divisors = {repeat: run[name] for repeat, run in base.items()}
        if found := spread(pair_ratios(values, divisors)):
            ratios[name] = found
    return Row(load, system, slo, targets, spreads, ratios)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
