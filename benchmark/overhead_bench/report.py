"""From timed passes to figures and a table."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from overhead_bench.engine import SYSTEMS, Pass

__all__ = ["print_table", "summary"]

_PARTS: Final = ("account", "snapshot", "plan", "rest", "around", "load")


def summary(name: str, running: int, num_waiting: int, passes: list[Pass]) -> dict[str, Any]:
    """Return the figures of one system; times in ms."""
    whole_s = [sum(p.spent_s.values()) for p in passes]
    parts = {"pass": whole_s, "iteration": [p.iteration_s for p in passes]}
    if SYSTEMS[name].policy is not None:
        stock_s = [p.spent_s.get("stock", 0.0) for p in passes]
        parts["overhead"] = [
            one_s - of_it_s for one_s, of_it_s in zip(whole_s, stock_s, strict=True)
        ]
        for part in ("account", "snapshot", "plan", "rest"):
            parts[part] = [p.spent_s.get(part, 0.0) for p in passes]
        parts["around"] = [p.around_s["around"] + p.around_s["metrics"] for p in passes]
        parts["load"] = [p.around_s["load"] for p in passes]
    added = parts.get("overhead", parts["pass"])
    return {
        "system": name,
        "running": running,
        "waiting": num_waiting,
        "passes": len(passes),
        **{f"{part}_ms": statistics_ms(times_s) for part, times_s in parts.items()},
        "metrics_share": sum(p.around_s["metrics"] for p in passes) / sum(parts["iteration"]),
        "share": sum(added) / sum(parts["iteration"]),
    }


def statistics_ms(times_s: list[float]) -> dict[str, float]:
    """Return the median, the P99 and the mean."""
    times_ms = np.array(times_s) * 1e3
    return {
        "median": float(np.median(times_ms)),
        "p99": float(np.percentile(times_ms, 99)),
        "mean": float(times_ms.mean()),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures in ms, the share in percent."""
    table = Table(title="Scheduling pass, ms")
    headings = ["system", "running", "waiting", "passes", "median", "P99", "mean", "ours: median"]
    headings += ["P99", "mean", *_PARTS, "iteration", "share %", "metrics %"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        whole, ours = row["pass_ms"], row.get("overhead_ms")
        names = ("median", "p99", "mean")
        table.add_row(
            row["system"],
            f"{row['running']}",
            f"{row['waiting']:,}",
            str(row["passes"]),
            *(f"{whole[name]:.3f}" for name in names),
            *(f"{ours[name]:.3f}" if ours else "" for name in names),
            *(f"{row[f'{part}_ms']['median']:.3f}" if ours else "" for part in _PARTS),
            f"{row['iteration_ms']['median']:.1f}",
            f"{100 * row['share']:.2f}",
            f"{100 * row['metrics_share']:.2f}",
        )
    Console(width=180).print(table)
