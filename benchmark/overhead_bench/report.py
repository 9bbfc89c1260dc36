"""From timed passes to figures, a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from overhead_bench.engine import Pass
from overhead_bench.systems import SYSTEMS

__all__ = ["draw", "print_table", "summary"]

TARGET_MS: Final = 0.5
_PARTS: Final = ("account", "snapshot", "plan", "rest", "plan_again", "around", "load")


def summary(name: str, running: int, num_waiting: int, rounds: list[list[Pass]]) -> dict[str, Any]:
    """Return the figures of one system; times in ms, the spread over the rounds' medians."""
    passes = [one for passes in rounds for one in passes]
    whole_s = [sum(p.spent_s.values()) for p in passes]
    parts = {"pass": whole_s, "iteration": [p.iteration_s for p in passes]}
    if SYSTEMS[name].policy is not None:
        stock_s = [p.spent_s.get("stock", 0.0) for p in passes]
        parts["overhead"] = [
            one_s - of_it_s for one_s, of_it_s in zip(whole_s, stock_s, strict=True)
        ]
        for part in ("account", "snapshot", "plan", "rest"):
            parts[part] = [p.spent_s.get(part, 0.0) for p in passes]
        parts["plan_again"] = [p.again_s for p in passes]
        parts["around"] = [p.around_s["around"] + p.around_s["metrics"] for p in passes]
        parts["load"] = [p.around_s["load"] for p in passes]
    added = parts.get("overhead", parts["pass"])
    round_medians = [
        float(np.median([sum(p.spent_s.values()) for p in one])) * 1e3 for one in rounds
    ]
    return {
        "system": name,
        "running": running,
        "waiting": num_waiting,
        "passes": len(passes),
        "admitting": sum(p.admits for p in passes),
        **{f"{part}_ms": statistics_ms(times_s) for part, times_s in parts.items()},
        "round_medians_ms": round_medians,
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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what grows with the number of waiting requests, and what does not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == name]
        part = "overhead_ms" if "overhead_ms" in own[0] else "pass_ms"
        label = f"{name}: beyond SGLang's own pass" if part == "overhead_ms" else name
        waiting = [row["waiting"] for row in own]
        (line,) = axes.plot(waiting, [row[part]["mean"] for row in own], marker="o", label=label)
        for statistic, style in (("median", "--"), ("p99", ":")):
            values = [row[part][statistic] for row in own]
            axes.plot(waiting, values, style, color=line.get_color(), linewidth=0.8)
    axes.axhline(TARGET_MS, color="grey", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="waiting offline requests",
        ylabel="scheduling pass (ms): mean, -- median, ·· P99",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
