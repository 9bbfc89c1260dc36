"""From outcomes to figures and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from interference_bench.engine import RunOutcome
from interference_bench.systems import ALONE, SEARCHED, SYSTEMS, EngineSystem
from sglang_coserve.bench_serving.stock import best_setting


def figures(outcome: RunOutcome) -> dict[str, Any]:
    """Return the figures of one run."""
    return {
        "online": len(outcome.ttft_s),
        "unfinished": outcome.num_unfinished,
        "ttft_p50_ms": _percentile_ms(outcome.ttft_s, 50),
        "ttft_p99_ms": _percentile_ms(outcome.ttft_s, 99),
        "itl_p50_ms": _percentile_ms(outcome.gaps_s, 50),
        "itl_p99_ms": _percentile_ms(outcome.gaps_s, 99),
        "offline_tokens_per_s": outcome.offline_tokens / outcome.seconds,
        "busy_share": outcome.busy_s / outcome.seconds,
        "counters": outcome.counters,
    }


def print_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print medians over the repeats, latencies also as ratios to online requests alone."""
    table = Table(title="Latencies of online requests, ms of CPU time: P99 (÷ alone)")
    for heading in ("traffic", "load", "system", "TTFT P50", "TTFT P99", "÷", "ITL P50"):
        table.add_column(heading)
    for heading in ("ITL P99", "÷", "offline tokens/s", "lowest–highest"):
        table.add_column(heading, justify="right")
    kinds = dict.fromkeys((one["traffic"], one["load"]) for one in rows)
    for traffic, load in kinds:
        of_load = [one for one in rows if (one["traffic"], one["load"]) == (traffic, load)]
        alone = {one["repeat"]: one for one in of_load if one["system"] == ALONE}
        for name in names:
            runs = [one for one in of_load if one["system"] == name]
            tokens = [one["offline_tokens_per_s"] for one in runs]
            table.add_row(
                traffic,
                f"{load:.0%}",
                name,
                _median(runs, "ttft_p50_ms"),
                _median(runs, "ttft_p99_ms"),
                _ratio(runs, alone, "ttft_p99_ms"),
                _median(runs, "itl_p50_ms"),
                _median(runs, "itl_p99_ms"),
                _ratio(runs, alone, "itl_p99_ms"),
                f"{statistics.median(tokens):,.0f}",
                f"{min(tokens):,.0f}–{max(tokens):,.0f}",
            )
        table.add_section()
    console = Console(width=150)
    console.print(table)
    for (traffic, load, kind), name in _searched(rows).items():
        console.print(f"{traffic} at {load:.0%}: {kind} is {name!r}", highlight=False)


def held_to_stock(system: EngineSystem, rows: Sequence[Mapping[str, Any]]) -> EngineSystem:
    """Return a system with targets from the rows of its load: see ``EngineSystem.stock_share``.

    They are those of the stock system that has the most offline tokens/s.
    """
    assert system.coserve is not None and system.stock_share is not None
    of_stock: dict[str, list[Mapping[str, Any]]] = {}
    for one in rows:
        if SYSTEMS[one["system"].removesuffix(", again")].coserve is None:
            of_stock.setdefault(one["system"], []).append(one)

    def median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(statistics.median(one[name] for one in runs))

    best = max(of_stock.values(), key=lambda runs: median(runs, "offline_tokens_per_s"))
    slos = tuple(
        f"{latency} p99 <= {system.stock_share * median(best, name):.3f}ms"
        for latency, name in (("ttft", "ttft_p99_ms"), ("tbt", "itl_p99_ms"))
    )
    return replace(system, coserve={**system.coserve, "slo": slos})


def _searched(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float, str], str]:
    """Return which system counts of those of ``SEARCHED`` for each load: see ``stock``."""
    by_system: dict[tuple[str, float], dict[str, list[Mapping[str, Any]]]] = {}
    for one in rows:
        of_load = by_system.setdefault((one["traffic"], one["load"]), {})
        of_load.setdefault(one["system"], []).append(one)
    found = {}
    for (traffic, load), of_load in by_system.items():
        medians = {
            name: (
                statistics.median(one["ttft_p99_ms"] for one in runs),
                statistics.median(one["offline_tokens_per_s"] for one in runs),
            )
            for name, runs in of_load.items()
        }
        ours_per_s = medians.get("coserve", (0.0, 0.0))[1]
        for kind, beginning in SEARCHED.items():
            candidates = {name: c for name, c in medians.items() if name.startswith(beginning)}
            if candidates:
                found[traffic, load, kind] = best_setting(candidates, ours_per_s)
    return found


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    return f"{statistics.median(one[name] for one in runs):.1f}"


def _ratio(
    runs: Sequence[Mapping[str, Any]], alone: Mapping[int, Mapping[str, Any]], name: str
) -> str:
    ratios = [one[name] / alone[one["repeat"]][name] for one in runs]
    return f"{statistics.median(ratios):.2f}"


def _percentile_ms(values_s: Sequence[float], percent: float) -> float:
    return float(np.percentile(values_s, percent)) * 1e3 if values_s else float("nan")
