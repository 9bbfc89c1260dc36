"""The comparison as a table, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sglang_coserve import __version__
from sglang_coserve.bench_serving.compare import Comparison, Run
from sglang_coserve.bench_serving.systems import ALONE
from sglang_coserve.metrics import SloTargets

__all__ = ["table", "write"]

_COLUMNS: Final = (
    "system",
    "P50 TTFT ms",
    "P99 TTFT ms",
    "÷ alone",
    "P99 ITL ms",
    "÷ alone",
    "mean TPOT ms",
    "in SLO",
    "goodput /s",
    "offline tokens/s",
    "÷ best stock",
    "failed",
)


def table(comparison: Comparison) -> str:
    """Return a Markdown table with a row for each system, and what is to be known beside it."""
    alone = comparison.runs.get(ALONE)
    best_stock = max(
        (
            run.figures.offline_tokens_per_s or 0.0
            for run in (*comparison.runs.values(), *comparison.tried.values())
            if run.plan.system.startswith("stock")
        ),
        default=0.0,
    )
    rows = [_row(name, run, alone, best_stock) for name, run in comparison.runs.items()]
    return "\n".join([*_markdown([_COLUMNS, *rows]), "", *_notes(comparison)])


def write(comparison: Comparison, out: Path, argv: Sequence[str]) -> None:
    """Write ``table.md`` and ``results.json``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table(comparison) + "\n")
    record = {
        "command": ["python", "-m", "sglang_coserve.bench_serving", *argv],
        "sglang_coserve": __version__,
        "sglang": importlib.metadata.version("sglang"),
        "systems": {name: asdict(run) for name, run in comparison.runs.items()},
        "tried": {name: asdict(run) for name, run in comparison.tried.items()},
        "failed": comparison.failed,
    }
    (out / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _row(name: str, run: Run, alone: Run | None, best_stock: float) -> list[str]:
    figures = run.figures

    def ratio(latency: str) -> str:
        if alone is None:
            return "–"
        base = getattr(alone.figures, latency)
        return f"{getattr(figures, latency) / base:.2f}" if base else "–"

    offline = figures.offline_tokens_per_s
    attained = figures.slo_attainment
    return [
        name + (" *" if figures.offline_ran_out else ""),
        f"{figures.median_ttft_ms:.1f}",
        f"{figures.p99_ttft_ms:.1f}",
        ratio("p99_ttft_ms"),
        f"{figures.p99_itl_ms:.1f}",
        ratio("p99_itl_ms"),
        f"{figures.mean_tpot_ms:.1f}",
        "–" if attained is None else f"{attained:.1%}",
        "–" if figures.request_goodput is None else f"{figures.request_goodput:.2f}",
        "–" if offline is None else f"{offline:,.0f}",
        f"{offline / best_stock:.2f}" if offline is not None and best_stock else "–",
        str(figures.online_failed + (figures.offline_failed or 0)),
    ]


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        "Online latencies as SGLang's bench_serving has them; offline tokens/s: prompts and "
        "outputs, while the online load ran.",
    ]
    if comparison.targets != SloTargets():
        targets = comparison.targets
        parts = (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s))
        said = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in parts if s is not None)
        notes.append(f"SLO: {said}.")
    for name, run in comparison.runs.items():
        if run.plan.system != name:
            setting = run.plan.system.removeprefix(name).strip()
            notes.append(f"{name}: {setting}, the best of {len(comparison.tried)} settings.")
    ran_out = [name for name, run in comparison.runs.items() if run.figures.offline_ran_out]
    if ran_out:
        notes.append(
            f"* The offline load ended before the online one ({', '.join(ran_out)}): its tokens/s "
            "are those of a shorter load. Give --offline a larger --num-prompts."
        )
    return [f"{note}\n" for note in notes]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with columns of equal width: read as it is, too."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = [
        [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(one)
        ]
        for one in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]
