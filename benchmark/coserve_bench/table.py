"""The comparison as a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.table import Table

from common.results import markdown_table
from coserve_bench.summary import Row, Spread, searched
from sglang_coserve.metrics import SloTargets

__all__ = ["markdown", "overview"]

_COLUMNS: Final = (
    "system",
    "SLO: TTFT / TPOT (ms)",
    "P99 TTFT (ms)",
    "÷ online-only",
    "P99 ITL (ms)",
    "÷ online-only",
    "mean TPOT (ms)",
    "÷ online-only",
    "within SLO",
    "offline tokens/s",
    "÷ non-preemptive",
    "÷ bound",
    "all tokens/s",
    "÷ online-only",
)
_NOTES: Final = """\
Median of the runs (lowest–highest). Ratios are taken repeat by repeat, then their median.
*within SLO*: online requests that finished with TTFT and mean TPOT within the targets in the second
column; a system that takes none is judged by those of the first rule. Tokens/s are prompt and
output tokens over the window. *÷ bound*: of the most that was possible with these targets, computed
from the profile; a system that misses the targets may have more."""


def markdown(title: str, rows: Sequence[Row]) -> str:
    """Return the whole comparison, a table for each load."""
    parts, best = [f"# {title}", _NOTES], searched(rows)
    for load, group in groupby(rows, key=lambda row: row.load):
        parts.append(f"## Online load: {load:.0%} of capacity")
        parts.append(markdown_table(_COLUMNS, [_cells(row) for row in group]))
        parts += [
            f"*{kind}* is `{name}` here: the best P99 TTFT at coserve's offline tokens/s or more, "
            "else the most offline tokens/s."
            for (at, kind), name in best.items()
            if at == load
        ]
    return "\n\n".join(parts) + "\n"


def overview(rows: Sequence[Row]) -> Table:
    """Return what fits a terminal: the medians of what matters most."""
    table = Table(title="Medians; the ranges are in table.md", title_justify="left")
    for column in ("load", "system", "P99 TTFT", "P99 ITL", "within SLO", "offline tokens/s", ""):
        table.add_column(column, justify="left" if column == "system" else "right")
    previous = None
    for row in rows:
        if previous not in (None, row.load):
            table.add_section()
        previous = row.load
        table.add_row(
            f"{row.load:.0%}",
            f"{row.system} {row.slo}".strip(),
            _median(row.ratios.get("p99_ttft_ms"), "{:.2f}×"),
            _median(row.ratios.get("p99_itl_ms"), "{:.2f}×"),
            _median(row.figures.get("attainment"), "{:.1%}"),
            _median(row.figures.get("offline_tokens_per_s"), "{:.0f}"),
            _median(row.ratios.get("offline_tokens_per_s"), "{:.2f}×"),
        )
    return table


def _cells(row: Row) -> list[str]:
    def figure(name: str, digits: int) -> str:
        return _spread(row.figures.get(name), digits)

    def ratio(name: str) -> str:
        return _spread(row.ratios.get(name), 2)

    return [
        f"{row.system} {row.slo}".strip(),
        _targets(row.targets),
        figure("p99_ttft_ms", 0),
        ratio("p99_ttft_ms"),
        figure("p99_itl_ms", 1),
        ratio("p99_itl_ms"),
        figure("mean_tpot_ms", 1),
        ratio("mean_tpot_ms"),
        _percent(row.figures.get("attainment")),
        figure("offline_tokens_per_s", 0),
        ratio("offline_tokens_per_s"),
        figure("offline_share_of_bound", 2),
        figure("total_tokens_per_s", 0),
        ratio("total_tokens_per_s"),
    ]


def _spread(value: Spread | None, digits: int, unit: str = "") -> str:
    if value is None:
        return "–"
    median, low, high = (f"{x:.{digits}f}" for x in (value.median, value.low, value.high))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}–{high})"


def _median(value: Spread | None, form: str) -> str:
    return "–" if value is None else form.format(value.median)


def _percent(value: Spread | None) -> str:
    if value is None:
        return "–"
    percent = Spread(100 * value.median, 100 * value.low, 100 * value.high, value.n)
    return _spread(percent, 1, "%")


def _targets(targets: SloTargets | None) -> str:
    if targets is None:
        return "–"
    return f"{_target(targets.ttft_s)} / {_target(targets.tpot_s)}"


def _target(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"
