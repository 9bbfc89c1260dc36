"""``timeline.png``: the latency of each request over time, and the offline work below."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sglang_coserve.demo.report import DemoResult, SystemResult, caption
from sglang_coserve.errors import require

__all__ = ["draw"]

_BIN_S: Final = 1.0
_TTFT, _GAP, _OFFLINE = "tab:blue", "tab:red", "tab:orange"


def draw(result: DemoResult, path: Path) -> None:
    """Draw a panel for each system, all with the same axes."""
    require("plot", "timeline.png")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(result.systems)
    figure, axes = pyplot.subplots(
        2,
        count,
        sharex=True,
        sharey="row",
        squeeze=False,
        figsize=(3 + 3.5 * count, 6),
        dpi=120,
        height_ratios=(3, 1),
    )
    end_s = max([1.0, *(t.arrival_s for s in result.systems for t in s.online)])
    for column, system in enumerate(result.systems):
        latency, rate = axes[0][column], axes[1][column]
        _draw_latencies(latency, system)
        _draw_offline(rate, system, end_s)
        latency.set_title(system.label)
        latency.set_yscale("log")
        latency.grid(axis="y", alpha=0.3)
        rate.set_xlim(0, end_s + _BIN_S)
        rate.set_xlabel("seconds")
    for target_s, color in ((result.targets.ttft_s, _TTFT), (result.targets.tpot_s, _GAP)):
        if target_s is not None:
            for latency in axes[0]:
                latency.axhline(target_s * 1e3, color=color, lw=1, ls="--")
    axes[1][0].set_ylim(bottom=0)  # Of all, once everything is drawn.
    axes[0][0].set_ylabel("online latency, ms")
    axes[1][0].set_ylabel("offline\ntokens/s")
    title = None if result.emulated is None else caption(result.emulated)
    figure.tight_layout(rect=(0, 0, 1, 0.94 if title is None else 0.91))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False, title=title)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_latencies(axes: Any, system: SystemResult) -> None:
    timed = [t for t in system.online if t.ttft_s is not None]
    paced = [t for t in timed if t.itls_s]
    for marker, color, label, points in (
        ("o", _TTFT, "TTFT of a request, at its arrival", [(t, t.ttft_s or 0.0) for t in timed]),
        ("x", _GAP, "its longest gap between tokens", [(t, max(t.itls_s)) for t in paced]),
    ):
        times = [t.arrival_s for t, _ in points]
        axes.plot(
            times, [s * 1e3 for _, s in points], marker, ms=4, alpha=0.8, color=color, label=label
        )


def _draw_offline(axes: Any, system: SystemResult, end_s: float) -> None:
    """Prompt and output tokens per second, when a line is done."""
    if system.offline is None:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="gray")
        return
    edges = [i * _BIN_S for i in range(int(end_s / _BIN_S) + 2)]
    rates, previous = [0.0] * (len(edges) - 1), 0
    for time_s, tokens_done in system.offline.finished_at:
        rates[min(int(time_s / _BIN_S), len(rates) - 1)] += (tokens_done - previous) / _BIN_S
        previous = tokens_done
    axes.stairs(rates, edges, fill=True, alpha=0.8, color=_OFFLINE)
