"""From outcomes to figures and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from interference_bench.outcome import RunOutcome
from interference_bench.systems import ALONE
from sglang_coserve.terminal import markdown_table, median_and_range


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


def _percentile_ms(values_s: Sequence[float], percent: float) -> float:
    return float(np.percentile(values_s, percent)) * 1e3 if values_s else float("nan")
