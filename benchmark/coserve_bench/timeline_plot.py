"""One repeat over time: arrivals, the TTFT of each request, offline tokens/s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coserve_bench.run_record import RunRecord
from coserve_bench.style import Style, new_figure, style_of
from coserve_bench.systems import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_timeline"]

_SMOOTH_S = 3


def plot_timeline(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the runs of one repeat at one load, which all had the same arrivals."""
    figure, (arrivals, ttft, stalls, offline) = new_figure(4, 1, width=9, height=9)
    _draw_arrivals(arrivals, records[0])
    drawn: Counter[str] = Counter()
    for record in records:
        system = record.key.system
        style, label = style_of(system, drawn[system]), f"{system} {record.key.slo}".strip()
        drawn[system] += 1
        started = [t for t in record.online if t.ttft_s is not None]
        for axes, values_ms in (
            (ttft, [1e3 * (t.ttft_s or 0) for t in started]),
            (stalls, [1e3 * max(t.itls_s, default=np.nan) for t in started]),
        ):
            axes.plot(
                [t.arrival_s for t in started],
                values_ms,
                style.marker,
                ms=4,
                alpha=0.8,
                color=style.color,
                fillstyle=style.fill,
                label=label,
            )
        if record.offline is not None and record.key.system != BASELINE:
            _draw_tokens(offline, record, style)
    for axes, label in (
        (arrivals, "online arrivals/s"),
        (ttft, "TTFT (ms)"),
        (stalls, "longest ITL of\na request (ms)"),
        (offline, f"offline tokens/s\n(mean of {_SMOOTH_S} s)"),
    ):
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    for axes in (ttft, stalls):
        axes.set_yscale("log")
    offline.set(xlabel="seconds since the first online arrival; requests stand at their arrival")
    offline.set_xlim(0, records[0].window_s)
    offline.set_ylim(bottom=0)
    figure.suptitle(f"Online load {records[0].key.load:.0%} of capacity")
    figure.legend(*ttft.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)


def _draw_arrivals(axes: Axes, record: RunRecord) -> None:
    counts = Counter(int(timeline.arrival_s) for timeline in record.online)
    edges = range(int(record.window_s) + 1)
    axes.stairs([counts[second] for second in edges[:-1]], list(edges), fill=True, color="#999999")


def _draw_tokens(axes: Axes, record: RunRecord, style: Style) -> None:
    """Draw a moving average: a prompt counts whole when its first token comes."""
    assert record.offline is not None
    totals = np.concatenate(([0], np.cumsum(record.offline.tokens_by_s)))
    ends = np.arange(len(totals))
    starts = np.maximum(ends - _SMOOTH_S, 0)
    rates = (totals[ends] - totals[starts])[1:] / (ends - starts)[1:]
    middles = ((ends + starts) / 2)[1:]
    assert all(a <= b for a, b in pairwise(middles))
    axes.plot(middles, rates, color=style.color, linestyle=style.line)
