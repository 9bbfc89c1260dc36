"""From outcomes to figures and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from interference_bench.engine import RunOutcome
from interference_bench.systems import ALONE


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
    Console(width=150).print(table)


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    return f"{statistics.median(one[name] for one in runs):.1f}"


def _ratio(
    runs: Sequence[Mapping[str, Any]], alone: Mapping[int, Mapping[str, Any]], name: str
) -> str:
    ratios = [one[name] / alone[one["repeat"]][name] for one in runs]
    return f"{statistics.median(ratios):.2f}"


def _percentile_ms(values_s: Sequence[float], percent: float) -> float:
    return float(np.percentile(values_s, percent)) * 1e3 if values_s else float("nan")
