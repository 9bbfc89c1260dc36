"""Writes a directory with the results: numbers, a table, plots, and a page with all of them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sglang_coserve.errors import MissingExtraError, require
from sglang_coserve.metrics import attainment, latency_report
from sglang_coserve.simulator.plots import latency_cdfs, load_over_time
from sglang_coserve.simulator.result import LABEL, SimulationResult, write_results
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
) -> Path:
    """Write ``report.json``, ``table.txt``, the plots and ``index.html``; return the page.

    Files of the same names are replaced. Without matplotlib there are no plots, and the page
    says how to get them.

    Raises:
        OSError: the directory cannot be written.
    """
    assert results, "nothing to report"
    figures, note = {}, ""
    try:
        require("plot", "A report with plots")
    except MissingExtraError as error:
        note = f"<p>{html.escape(str(error))}</p>"
    else:
        figures = {"latency": latency_cdfs(results)}
        figures |= {f"load-{result.policy}": load_over_time(result) for result in results}
    directory.mkdir(parents=True, exist_ok=True)
    write_results(results, directory / "report.json", settings)
    _write(directory / "table.txt", table_text(results))
    for name, svg in figures.items():
        _write(directory / f"{name}.svg", svg)
    page = directory / "index.html"
    _write(page, _page(results, "\n".join(figures.values()) or note, settings))
    return page


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _row(result: SimulationResult) -> tuple[str, ...]:
    latency = latency_report(result.online)
    attained = attainment(result.online, result.targets)
    engine = result.counters
    computed = engine.online_tokens + engine.offline_tokens
    return (
        result.policy + ("" if result.is_complete else " (broken off)"),
        ms_text(latency.ttft.p50_s),
        ms_text(latency.ttft.p99_s),
        ms_text(latency.tpot.p50_s),
        ms_text(latency.tpot.p99_s),
        ms_text(latency.itl.p99_s),
        percent_text(attained),
        f"{result.online_throughput.total_tokens_per_s:,.0f}",
        f"{result.offline_throughput.total_tokens_per_s:,.0f}",
        percent_text(result.recomputed_tokens / computed if computed else None),
        str(engine.suspensions),
    )


def ms_text(value_s: float | None) -> str:
    """Return seconds as milliseconds in a table, "-" for None."""
    return "-" if value_s is None else f"{value_s * 1e3:,.1f}"


def percent_text(share: float | None) -> str:
    """Return a share as a percentage in a table, "-" for None."""
    return "-" if share is None else f"{100 * share:.1f}"


_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px } svg { width: 100%; height: auto }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } .mark { color: #a40 }
"""


def _page(results: Sequence[SimulationResult], figures: str, settings: Mapping[str, object]) -> str:
    cells = [_COLUMNS, *map(_row, results)]
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(("th", *["td"] * len(results)), cells, strict=True)
    )
    used = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in settings.items()
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>Co-serving, {LABEL}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Co-serving <span class='mark'>({LABEL})</span></h1>\n"
        "<p>Computed by a latency model, not measured on a device. Latencies are of online "
        "requests; rates count prompt and output tokens delivered within the interval.</p>\n"
        f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>\n"
        f"{figures}\n<h2>Settings</h2><table><tbody>{used}</tbody></table>\n</body></html>\n"
    )
