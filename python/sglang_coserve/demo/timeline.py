"""The demo's picture: first tokens, gaps and offline tokens over time, a column for each system."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from sglang_coserve.demo.result import (
    GAP,
    PERCENTILES,
    TTFT,
    DemoResult,
    Latencies,
    Metric,
    SystemResult,
)
from sglang_coserve.metrics import RequestTimeline

_BIN_S: Final = 1.0
_COLORS: Final = {TTFT: "tab:blue", GAP: "tab:red"}
_OFFLINE: Final = "tab:orange"
_LABELS: Final = {
    TTFT: "first token of each\nonline request, ms",
    GAP: "each gap of online\nstreams, ms",
}
_LINES: Final = {"P50": "-", "P99": "--"}


def draw(result: DemoResult, path: Path) -> None:
    """Draw three panels for each system, in each row with the same axes; needs the extra ``plot``.

    Lines are the percentiles of a panel's points; gray ones those of online requests alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(result.systems)
    figure, axes = pyplot.subplots(
        3,
        count,
        sharex=True,
        sharey="row",
        squeeze=False,
        figsize=(3 + 3.5 * count, 8),
        dpi=120,
        height_ratios=(3, 3, 2),
    )
    alone = None if result.alone is None else result.alone.latencies_ms()
    end_s = max([1.0, *(t.arrival_s for system in result.systems for t in system.online)])
    for column, system in enumerate(result.systems):
        found = system.latencies_ms()
        axes[0][column].set_title(system.label)
        for row, (metric, points) in enumerate(
            ((TTFT, _first_tokens(system)), (GAP, _gaps(system)))
        ):
            _draw_points(axes[row][column], metric, points)
            if alone is not None and system is not result.alone:
                _draw_lines(axes[row][column], metric, alone, "gray")
            _draw_lines(axes[row][column], metric, found, _COLORS[metric])
            _tell(axes[row][column], _words(metric, found))
        _draw_offline(axes[2][column], system, end_s)
        axes[2][column].set_xlim(0, end_s + _BIN_S)
        axes[2][column].set_xlabel("seconds")
        axes[2][column].locator_params(axis="x", nbins=5, integer=True)
    targets = ((TTFT, result.targets.ttft_s), (GAP, result.targets.tpot_s))
    for row, (metric, target_s) in enumerate(targets):
        axes[row][0].set_ylabel(_LABELS[metric])
        for panel in axes[row] if target_s is not None else ():
            panel.axhline((target_s or 0.0) * 1e3, color="black", lw=1, ls=":", label="target")
    axes[2][0].set_ylabel("offline\ntokens/s")
    axes[2][0].set_ylim(bottom=0)  # For all, once everything is drawn.
    figure.suptitle(
        f"{result.kind}: points are online requests and gaps; lines are their P50 (solid) and P99 "
        "(dashed),\ngray those of online requests alone",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


Points = Sequence[tuple[float, float]]
"""Seconds of the window, and milliseconds."""


def _first_tokens(system: SystemResult) -> Points:
    """Return each request's TTFT at its arrival."""
    return [(t.arrival_s, t.ttft_s * 1e3) for t in system.online if t.ttft_s is not None]


def _gaps(system: SystemResult) -> Points:
    """Return each gap at its end."""
    return [point for request in system.online for point in _gaps_of(request)]


def _gaps_of(request: RequestTimeline) -> Points:
    pairs = pairwise(request.token_times_s)
    return [(later, (later - earlier) * 1e3) for earlier, later in pairs if later > earlier]


def _draw_points(axes: Any, metric: Metric, points: Points) -> None:
    times_s, values_ms = zip(*points, strict=True) if points else ((), ())
    axes.plot(times_s, values_ms, "o", ms=3, mew=0, alpha=0.5, color=_COLORS[metric])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", alpha=0.3)


def _draw_lines(axes: Any, metric: Metric, found: Latencies, color: str) -> None:
    for name in PERCENTILES:
        value = found[metric, name]
        if value is not None:
            axes.axhline(value, color=color, lw=1.2, ls=_LINES[name])


def _words(metric: Metric, found: Latencies) -> str:
    values = [(name, found[metric, name]) for name in PERCENTILES]
    return ", ".join(f"{name} {value:,.1f}" for name, value in values if value is not None)


def _tell(axes: Any, text: str) -> None:
    """Write into the upper left corner of a panel."""
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5}
    axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", fontsize=9, bbox=box)


def _draw_offline(axes: Any, system: SystemResult, end_s: float) -> None:
    """Draw output tokens per second as they come, and prompts with the first of them."""
    if system.offline is None:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="gray")
        return
    came = [(s, 1) for t in system.offline for s in t.token_times_s]
    came += [(t.token_times_s[0], t.prompt_tokens) for t in system.offline if t.token_times_s]
    edges = [i * _BIN_S for i in range(int(end_s / _BIN_S) + 2)]
    rates = [0.0] * (len(edges) - 1)
    for time_s, tokens in came:
        if 0 <= time_s < edges[-1]:
            rates[int(time_s / _BIN_S)] += tokens / _BIN_S
    axes.stairs(rates, edges, fill=True, alpha=0.8, color=_OFFLINE)
    _tell(axes, f"mean {system.offline_tokens_per_s:,.0f}")
