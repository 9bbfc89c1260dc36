"""The table of simulated fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_coserve.metrics import attainment, latency_report
from sglang_coserve.simulator.fleet_run import FleetResult
from sglang_coserve.simulator.report import ms_text, percent_text, text_table

__all__ = ["FLEET_COLUMNS", "fleet_table_text"]

FLEET_COLUMNS: Final = (
    "engines",
    "TTFT P99 ms",
    "TPOT P99 ms",
    "attainment %",
    "online lost",
    "offline tok/s",
    "of alone %",
    "busiest ÷ mean",
    "cached %",
    "given back",
    "pulled",
    "returned",
)


def fleet_table_text(results: Sequence[FleetResult]) -> str:
    """Return a row for each fleet, the engine alone first, as plain text, marked as simulated."""
    alone_per_s = results[0].offline_throughput.total_tokens_per_s
    return text_table(FLEET_COLUMNS, [_row(result, alone_per_s) for result in results])


def _row(result: FleetResult, alone_per_s: float) -> tuple[str, ...]:
    latency = latency_report(result.online)
    attained = attainment(result.online, result.targets)
    offline_per_s = result.offline_throughput.total_tokens_per_s
    expected_per_s = alone_per_s * result.num_engines
    name = f"{result.num_engines}{', alone' if result.is_alone else ''}"
    return (
        name + ("" if result.is_complete else " (broken off)"),
        ms_text(latency.ttft.p99_s),
        ms_text(latency.tpot.p99_s),
        percent_text(attained),
        str(result.online_lost),
        f"{offline_per_s:,.0f}",
        percent_text(offline_per_s / expected_per_s if expected_per_s else None),
        f"{result.busiest_share:.2f}",
        percent_text(result.cached_share),
        str(result.lines_given_back),
        str(result.lines_pulled),
        str(result.lines_returned),
    )
