"""The figures: latency and throughput against the load, one repeat over time, and OOCO's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from coserve_bench.rate_search import RateSearch
from coserve_bench.run_record import RunRecord
from coserve_bench.summary import RATIO_TO, Row, Spread
from coserve_bench.systems import BASELINE, SYSTEMS, THROUGHPUT_BOUND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "plot_latency_ratios",
    "plot_offline_throughput",
    "plot_rate_searches",
    "plot_timeline",
]

_RATIOS: Final = {"p99_ttft_ms": "P99 TTFT", "p99_itl_ms": "P99 ITL", "mean_tpot_ms": "mean TPOT"}
_SMOOTH_S: Final = 3

# Okabe and Ito's palette, made to be told apart with any colour vision; without
# its yellow, which is too pale for lines.
_COLORS: Final = ("#000000", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2")
_MARKERS: Final = "osD^vPX*<>"
_LINES: Final = ("-", "--", ":", "-.")
_FILLS: Final = ("full", "none", "left", "top")


def plot_latency_ratios(rows: Sequence[Row], path: Path) -> None:
    """Draw each system's online latencies over those of online-only, against the load."""
    figure, panels = _figure(1, len(_RATIOS), width=11, height=4.2)
    for axes, (name, label) in zip(panels, _RATIOS.items(), strict=True):
        axes.axhline(1, color="black", lw=1)
        _draw_systems(axes, rows, "ratios", name)
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)
        axes.set_title(f"online {label}")
    panels[0].set_ylabel("ratio to online-only (log scale)")
    _save(figure, panels[0], path)


def plot_offline_throughput(rows: Sequence[Row], path: Path) -> None:
    """Draw each system's offline tokens/s against the load; and as a share of non-preemptive."""
    figure, (absolute, relative) = _figure(1, 2, width=10, height=4.2)
    relative.axhline(1, color="black", lw=1)
    for axes, of in ((absolute, "figures"), (relative, "ratios")):
        _draw_systems(axes, rows, of, "offline_tokens_per_s")
        axes.set_ylim(bottom=0)
    absolute.set_ylabel("offline tokens/s (prompt and output)")
    relative.set_ylabel(f"ratio to {THROUGHPUT_BOUND}")
    _save(figure, absolute, path)


def plot_rate_searches(searches: Mapping[str, RateSearch], load: float, path: Path) -> None:
    """Draw the online violations against the offline rate, as OOCO §5.2 does."""
    figure, axes = _figure(1, 1, width=7, height=4.2)
    for system, search in searches.items():
        probes = sorted(search.probes, key=lambda probe: probe.rate_per_s)
        axes.plot(
            [probe.rate_per_s for probe in probes],
            [100 * probe.violations for probe in probes],
            label=system,
            clip_on=False,
            **_look(system),
        )
        axes.axhline(100 * search.limit, color="black", lw=1, ls="--")
    axes.set_xscale("log")
    _plain_log_ticks(axes.xaxis)
    axes.set_yscale("symlog", linthresh=10)
    axes.set(
        xlabel="offline requests/s, Poisson arrivals",
        ylabel="online requests out of SLO (%)",
        title=f"online load {load:.0%} of capacity; dashed: the limit",
        ylim=(0, 110),
        yticks=(0, 2, 4, 6, 8, 10, 30, 100),
        yticklabels=("0", "2", "4", "6", "8", "10", "30", "100"),
    )
    axes.grid(alpha=0.25)
    _save(figure, axes, path)


def plot_timeline(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the runs of one repeat at one load, which all had the same arrivals."""
    figure, panels = _figure(4, 1, width=9, height=9)
    arrivals, ttft, stalls, offline = panels
    counts = Counter(int(timeline.arrival_s) for timeline in records[0].online)
    edges = range(int(records[0].window_s) + 1)
    arrivals.stairs([counts[s] for s in edges[:-1]], list(edges), fill=True, color="#999999")
    drawn: Counter[str] = Counter()
    for record in records:
        system = record.key.system
        look, label = _look(system, drawn[system]), f"{system} {record.key.slo}".strip()
        drawn[system] += 1
        started = [t for t in record.online if t.ttft_s is not None]
        arrived_s = [t.arrival_s for t in started]
        dots = {**look, "linestyle": "", "ms": 4, "alpha": 0.8, "label": label}
        ttft.plot(arrived_s, [1e3 * (t.ttft_s or 0) for t in started], **dots)
        stalls.plot(arrived_s, [1e3 * max(t.itls_s, default=np.nan) for t in started], **dots)
        if record.offline is not None and system != BASELINE:
            middles, rates = _moving_average(record.offline.tokens_by_s)
            offline.plot(middles, rates, color=look["color"], linestyle=look["linestyle"])
    labels = ("online arrivals/s", "TTFT (ms)", "longest ITL of\na request (ms)")
    smoothed = f"offline tokens/s\n(mean of {_SMOOTH_S} s)"
    for axes, label in zip(panels, (*labels, smoothed), strict=True):
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    for axes in (ttft, stalls):
        axes.set_yscale("log")
    offline.set(xlabel="seconds since the first online arrival; requests stand at their arrival")
    offline.set_xlim(0, records[0].window_s)
    offline.set_ylim(bottom=0)
    figure.suptitle(f"Online load {records[0].key.load:.0%} of capacity")
    _save(figure, ttft, path)


def _draw_systems(axes: Axes, rows: Sequence[Row], of: str, name: str) -> None:
    """Draw a figure, or a ratio, of every system but the baseline against the load."""
    systems = [key for key in dict.fromkeys((r.system, r.slo) for r in rows) if key[0] != BASELINE]
    for place, (system, slo) in enumerate(systems):
        own = [row for row in rows if (row.system, row.slo) == (system, slo)]
        points: dict[float, Spread] = {
            row.load: getattr(row, of)[name] for row in own if name in getattr(row, of)
        }
        is_divisor = of == "ratios" and RATIO_TO[name] == system
        if not points or is_divisor:
            continue
        values = [points[load] for load in sorted(points)]
        # Percent of load to the side, so that ranges do not hide each other.
        shift = 1.2 * (place - (len(systems) - 1) / 2)
        slos = [other for name_of, other in systems if name_of == system]
        axes.errorbar(
            [100 * load + shift for load in sorted(points)],
            [value.median for value in values],
            yerr=(
                [value.median - value.low for value in values],
                [value.high - value.median for value in values],
            ),
            capsize=3,
            label=f"{system} {slo}".strip(),
            **_look(system, slos.index(slo)),
        )
    loads = sorted({100 * row.load for row in rows})
    axes.set(
        xlabel="online load (% of capacity)",
        xticks=loads,
        xlim=(loads[0] - 10, loads[-1] + 10),
    )
    axes.grid(axis="y", which="both", alpha=0.25)


def _moving_average(tokens_by_s: Sequence[int]) -> tuple[Any, Any]:
    """Return times and rates: a prompt counts whole when its first token comes."""
    totals = np.concatenate(([0], np.cumsum(tokens_by_s)))
    ends = np.arange(len(totals))
    starts = np.maximum(ends - _SMOOTH_S, 0)
    rates = (totals[ends] - totals[starts])[1:] / (ends - starts)[1:]
    return ((ends + starts) / 2)[1:], rates


def _look(system: str, variant: int = 0) -> dict[str, str]:
    """Return how a system is drawn, whatever else is; its SLOs differ by the line."""
    place = list(SYSTEMS).index(system)
    return {
        "color": _COLORS[place % len(_COLORS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _LINES[variant % len(_LINES)],
        "fillstyle": _FILLS[variant % len(_FILLS)],
    }


def _figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure and its panels: one, or a row or column of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)


def _save(figure: Figure, labelled: Axes, path: Path) -> None:
    handles = labelled.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5)
    figure.savefig(path)


def _plain_log_ticks(axis: Any) -> None:
    """Label 1, 2, 5, 10, … rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
