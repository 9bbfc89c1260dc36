"""Writes a directory with the results: numbers and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sglang_coserve.metrics import attainment, latency_report
from sglang_coserve.simulator.result import LABEL, SimulationResult
from sglang_coserve.terminal import markdown_table

_COLUMNS: Final = (
    "policy",
    "TTFT P50 ms",
    "TTFT P99 ms",
    "TPOT P50 ms",
    "TPOT P99 ms",
    "ITL P99 ms",
    "attainment %",
    "online tok/s",
    "offline tok/s",
    "recomputed %",
    "suspensions",
)
"""Headings of the table, which has a row for each policy; "-" where something is not defined."""


def table_text(results: Sequence[SimulationResult]) -> str:
    """Return the table as plain text, marked as simulated."""
    return text_table(_COLUMNS, [_row(result) for result in results])


def text_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table with a heading as plain text, marked as simulated."""
    return f"({LABEL})\n{markdown_table(columns, cells, equal_widths=True)}\n"


def write_report(
    results: Sequence[SimulationResult], directory: Path, settings: Mapping[str, object]
) -> None:
    """Write ``report.json`` and ``table.txt``; files of the same names are replaced.

    Raises:
        OSError: the directory cannot be written.
    """
    assert results, "nothing to report"
    numbers = {
        "label": LABEL,
        "settings": dict(settings),
        "results": [result.to_dict() for result in results],
    }
    text = json.dumps(numbers, indent=2, allow_nan=False) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(text, encoding="utf-8")
    (directory / "table.txt").write_text(table_text(results), encoding="utf-8")


def _row(result: SimulationResult) -> tuple[str, ...]:
    latency = latency_report(result.online)
    attained = attainment(result.online, result.targets)
    engine = result.counters
    computed = engine.online_tokens + engine.offline_tokens
    return (
        result.policy + ("" if result.is_complete else " (broken off)"),
        _ms(latency.ttft.p50_s),
        _ms(latency.ttft.p99_s),
        _ms(latency.tpot.p50_s),
        _ms(latency.tpot.p99_s),
        _ms(latency.itl.p99_s),
        _percent(attained),
        f"{result.online_throughput.total_tokens_per_s:,.0f}",
        f"{result.offline_throughput.total_tokens_per_s:,.0f}",
        _percent(result.recomputed_tokens / computed if computed else None),
        str(engine.suspensions),
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
