"""The demo's table: a row for each system, a column for each metric, ratios under the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table

from sglang_coserve.demo.result import COLUMNS, DemoResult, Latencies, SystemResult
from sglang_coserve.metrics import Outcome

_NONE: Final = "–"

_WHOLE_FROM_MS: Final = 99.95
"""From so many milliseconds on, tenths are left out."""


def as_table(result: DemoResult) -> Table:
    """Return the table that the demo prints; 100 columns of a terminal are enough."""
    table = Table(
        title=_title(result), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, leading=1
    )
    table.add_column("")
    for metric, percentile in COLUMNS:
        table.add_column(f"{metric.short}\n{percentile}", justify="right")
    table.add_column("offline\ntokens/s", justify="right")
    table.add_column("online\nfinished", justify="right")
    for system in result.systems:
        found, base = system.latencies_ms(), _base_of(system, result)
        cells = [
            _cell(_milliseconds(found[column]), found[column], base.get(column))
            for column in COLUMNS
        ]
        table.add_row(system.label, *cells, _offline(system, result), _finished(system))
    return table


def _title(result: DemoResult) -> str:
    lines = [f"Milliseconds, {result.kind}"]
    if result.alone is not None:
        lines.append("Under each latency: ÷ alone; under tokens/s: ÷ stock")
    return "\n".join(lines)


def _base_of(system: SystemResult, result: DemoResult) -> Latencies:
    """Return the latencies alone; nothing for online requests alone themselves."""
    alone = result.alone
    return {} if alone is None or alone is system else alone.latencies_ms()


def _cell(text: str, value: float | None, base: float | None) -> str:
    """Return a value, and below it its ratio to a base if there is one."""
    return f"{text}\n{value / base:.2f} ×" if value and base else text


def _milliseconds(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= _WHOLE_FROM_MS else f"{value:.1f}"


def _offline(system: SystemResult, result: DemoResult) -> str:
    if system.offline is None:
        return _NONE
    failed = sum(t.outcome is Outcome.FAILED for t in system.offline)
    stock, rate = result.stock, system.offline_tokens_per_s
    base = None if stock is None or stock is system else stock.offline_tokens_per_s
    text = _cell(f"{rate:,.0f}", rate, base)
    return f"{text}\n{failed:,} failed" if failed else text


def _finished(system: SystemResult) -> str:
    return f"{system.finished}/{len(system.online)}"


def cpu_line(system: SystemResult) -> str | None:
    """Return how many cores the processes used while a system was measured, as a line of text."""
    if system.cpu is None:
        return None
    parts = [
        f"{role.replace('_', ' ')} {cores:.2f}"
        for role, cores in sorted(system.cpu.by_role.items(), key=lambda item: -item[1])
    ]
    return f"cores in use, {system.label}: {', '.join(parts)}"


def cpu_lines(systems: Sequence[SystemResult]) -> list[str]:
    """Return such a line for each system that has one."""
    return [line for line in map(cpu_line, systems) if line is not None]
