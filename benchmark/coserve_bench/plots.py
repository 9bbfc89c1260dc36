"""The figures: latency and throughput against load, and OOCO's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coserve_bench.rate_search import RateSearch
from coserve_bench.style import Style, new_figure, style_of
from coserve_bench.summary import Row, Spread
from coserve_bench.systems import BASELINE, THROUGHPUT_BOUND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_latency_ratios", "plot_offline_throughput", "plot_rate_searches"]

_RATIOS: Final = {"p99_ttft_ms": "P99 TTFT", "p99_itl_ms": "P99 ITL", "mean_tpot_ms": "mean TPOT"}


def plot_latency_ratios(rows: Sequence[Row], path: Path) -> None:
    """Draw each system's online latencies over those of online-only, against the load."""
    figure, panels = new_figure(1, len(_RATIOS), width=11, height=4.2)
    systems = [name for name in _systems(rows) if name[0] != BASELINE]
    for axes, (name, label) in zip(panels, _RATIOS.items(), strict=True):
        axes.axhline(1, color="black", lw=1)
        for place, system in enumerate(systems):
            points = {row.load: row.ratios.get(name) for row in rows if _system(row) == system}
            _line(
                axes, points, _style(system, systems), _label(system), _shift(place, len(systems))
            )
        axes.set_yscale("log")
        _plain_log_ticks(axes)
        _load_axis(axes, rows)
        axes.set_title(f"online {label}")
        axes.grid(axis="y", which="both", alpha=0.25)
    panels[0].set_ylabel("ratio to online-only (log scale)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)


def plot_offline_throughput(rows: Sequence[Row], path: Path) -> None:
    """Draw each system's offline tokens/s against the load; and as a share of non-preemptive."""
    figure, (absolute, relative) = new_figure(1, 2, width=10, height=4.2)
    systems = [name for name in _systems(rows) if name[0] != BASELINE]
    relative.axhline(1, color="black", lw=1)
    for place, system in enumerate(systems):
        own = [row for row in rows if _system(row) == system]
        shift, style = _shift(place, len(systems)), _style(system, systems)
        tokens = {row.load: row.figures.get("offline_tokens_per_s") for row in own}
        _line(absolute, tokens, style, _label(system), shift)
        ratios = {row.load: row.ratios.get("offline_tokens_per_s") for row in own}
        if system[0] != THROUGHPUT_BOUND:
            _line(relative, ratios, style, _label(system), shift)
    for axes in (absolute, relative):
        _load_axis(axes, rows)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.25)
    absolute.set_ylabel("offline tokens/s (prompt and output)")
    relative.set_ylabel(f"ratio to {THROUGHPUT_BOUND}")
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path)


def plot_rate_searches(searches: Mapping[str, RateSearch], load: float, path: Path) -> None:
    """Draw the online violations against the offline rate, as OOCO §5.2 does."""
    figure, axes = new_figure(1, 1, width=7, height=4.2)
    for system, search in searches.items():
        probes = sorted(search.probes, key=lambda probe: probe.rate_per_s)
        style = style_of(system)
        axes.plot(
            [probe.rate_per_s for probe in probes],
            [100 * probe.violations for probe in probes],
            color=style.color,
            marker=style.marker,
            label=system,
            clip_on=False,
        )
        axes.axhline(100 * search.limit, color="black", lw=1, ls="--")
    axes.set_xscale("log")
    _plain_log_ticks(axes, along_x=True)
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
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path)


def _systems(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(_system(row) for row in rows))


def _system(row: Row) -> tuple[str, str]:
    return row.system, row.slo


def _style(system: tuple[str, str], systems: Sequence[tuple[str, str]]) -> Style:
    """Return the style of a system; its SLOs differ by the line."""
    slos = [slo for name, slo in systems if name == system[0]]
    return style_of(system[0], slos.index(system[1]))


def _label(system: tuple[str, str]) -> str:
    return " ".join(filter(None, system))


def _shift(place: int, count: int) -> float:
    """Percent of load to the side, so that ranges do not hide each other."""
    return 1.2 * (place - (count - 1) / 2)


def _line(
    axes: Axes, points: Mapping[float, Spread | None], style: Style, label: str, shift: float
) -> None:
    """Draw medians, and the ranges as bars."""
    defined = sorted((load, value) for load, value in points.items() if value is not None)
    if not defined:
        return
    values = [value for _, value in defined]
    axes.errorbar(
        [100 * load + shift for load, _ in defined],
        [value.median for value in values],
        yerr=(
            [value.median - value.low for value in values],
            [value.high - value.median for value in values],
        ),
        color=style.color,
        marker=style.marker,
        linestyle=style.line,
        capsize=3,
        label=label,
    )


def _load_axis(axes: Axes, rows: Sequence[Row]) -> None:
    loads = sorted({100 * row.load for row in rows})
    axes.set(
        xlabel="online load (% of capacity)",
        xticks=loads,
        xlim=(loads[0] - 10, loads[-1] + 10),
    )


def _plain_log_ticks(axes: Axes, *, along_x: bool = False) -> None:
    """Label 1, 2, 5, 10, … rather than powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if along_x else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
