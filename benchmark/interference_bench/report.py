"""From outcomes to figures and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from interference_bench.outcome import RunOutcome
from interference_bench.systems import ALONE
from sglang_coserve.metrics import Summary, latency_report
from sglang_coserve.terminal import markdown_table, median_and_range


def figures(outcome: RunOutcome) -> dict[str, Any]:
    """Return the figures of one run."""
    found = latency_report(outcome.online)
    return {
        "online": found.ttft.n,
        "unfinished": outcome.num_unfinished,
        **percentiles_ms("ttft", found.ttft),
        **percentiles_ms("itl", found.itl),
        "offline_tokens_per_s": outcome.offline_tokens_per_s,
        "counters": outcome.counters,
    }


def table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return medians over the repeats, latencies also as ratios to online requests alone."""
    lines = []
    for traffic, load in dict.fromkeys((one["traffic"], one["load"]) for one in rows):
        of_load = [one for one in rows if (one["traffic"], one["load"]) == (traffic, load)]
        alone = {one["repeat"]: one for one in of_load if one["system"] == ALONE}
        for name in names:
            runs = [one for one in of_load if one["system"] == name]
            cells = []
            for latency in ("ttft", "itl"):
                p99 = f"{latency}_p99_ms"
                ratios = [one[p99] / alone[one["repeat"]][p99] for one in runs]
                cells += [_median(runs, f"{latency}_p50_ms"), _median(runs, p99)]
                cells.append(f"{np.median(ratios):.2f}")
            tokens = [one["offline_tokens_per_s"] for one in runs]
            head = f"{traffic}, {load:.0%}, {name}"
            lines.append([head, *cells, median_and_range(tokens, "{:,.0f}")])
    columns = ["of CPU time", "TTFT P50, ms", "P99", "÷ alone", "ITL P50, ms", "P99", "÷ alone"]
    return markdown_table([*columns, "offline tokens/s"], lines, equal_widths=True)


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    return f"{np.median([one[name] for one in runs]):.1f}"


def percentiles_ms(name: str, summary: Summary) -> dict[str, float]:
    """Return the figures of a latency: its P50 and P99 in milliseconds."""
    return {f"{name}_p50_ms": in_ms(summary.p50_s), f"{name}_p99_ms": in_ms(summary.p99_s)}


def in_ms(seconds: float | None) -> float:
    """Return seconds in milliseconds, NaN for None."""
    return math.nan if seconds is None else seconds * 1e3
