"""The comparison as a table, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from sglang_coserve import __version__
from sglang_coserve.bench_serving.compare import Comparison, Run
from sglang_coserve.bench_serving.one_run import Figures
from sglang_coserve.bench_serving.options import ALONE
from sglang_coserve.metrics import SloTargets
from sglang_coserve.terminal import markdown_table, median_and_range

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
    return "\n".join((_table(comparison), "", *_notes(comparison)))


def write(comparison: Comparison, out: Path, argv: Sequence[str]) -> None:
    """Write ``table.md`` and ``results.json``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table(comparison) + "\n")
    record = {
        "command": ["python", "-m", "sglang_coserve.bench_serving", *argv],
        "sglang_coserve": __version__,
        "sglang": importlib.metadata.version("sglang"),
        "systems": {name: run.to_dict() for name, run in comparison.runs.items()},
        "tried": {name: run.to_dict() for name, run in comparison.tried.items()},
        "failed": comparison.failed,
    }
    (out / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _table(comparison: Comparison) -> str:
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
    return markdown_table(_COLUMNS, rows, equal_widths=True)


def _row(name: str, run: Run, alone: Run | None, best_stock: float) -> list[str]:
    figures = run.figures
    found = {f.name: [getattr(r.figures, f.name) for r in run.repeats] for f in fields(Figures)}

    def ratio(latency: str) -> str:
        bases = [] if alone is None else [getattr(r.figures, latency) for r in alone.repeats]
        if not all(bases) or len(bases) != len(found[latency]):
            return "–"
        # Repeats of the same number have the same requests.
        return _cell(
            [one / base for one, base in zip(found[latency], bases, strict=True)], "{:.2f}"
        )

    offline = found["offline_tokens_per_s"]
    of_best = [value / best_stock for value in offline if value is not None and best_stock]
    return [
        name + (" *" if figures.offline_ran_out else ""),
        _cell(found["median_ttft_ms"], "{:.1f}"),
        _cell(found["p99_ttft_ms"], "{:.1f}"),
        ratio("p99_ttft_ms"),
        _cell(found["p99_itl_ms"], "{:.1f}"),
        ratio("p99_itl_ms"),
        _cell(found["mean_tpot_ms"], "{:.1f}"),
        _cell(found["slo_attainment"], "{:.1%}"),
        _cell(found["request_goodput"], "{:.2f}"),
        _cell(offline, "{:,.0f}"),
        _cell(of_best, "{:.2f}"),
        str(figures.online_failed + (figures.offline_failed or 0)),
    ]


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return median_and_range(known, form) if known else "–"


def _notes(comparison: Comparison) -> Iterator[str]:
    yield (
        "Online latencies as SGLang's bench_serving has them; offline tokens/s: prompts and "
        "outputs, while the online load ran.\n"
    )
    repeats = max((len(run.repeats) for run in comparison.runs.values()), default=1)
    if repeats > 1:
        yield f"Medians of {repeats} repeats (lowest–highest).\n"
    if comparison.targets != SloTargets():
        targets = comparison.targets
        parts = (("TTFT", targets.ttft_s), ("TPOT", targets.tpot_s))
        said = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in parts if s is not None)
        yield f"SLO: {said}.\n"
    for name, run in comparison.runs.items():
        if run.plan.system != name:
            setting = run.plan.system.removeprefix(name).strip()
            yield f"{name}: {setting}, the best of {len(comparison.tried)} settings.\n"
    ran_out = [name for name, run in comparison.runs.items() if run.figures.offline_ran_out]
    if ran_out:
        yield (
            f"* The offline load ended before the online one ({', '.join(ran_out)}): its tokens/s "
            "are those of a shorter load. Give --offline a larger --num-prompts.\n"
        )
