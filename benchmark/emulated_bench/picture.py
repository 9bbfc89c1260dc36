"""The picture of one load: what each setting costs online requests, and brings offline ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from emulated_bench.compared import TOKENS, ComparedLoad, short
from emulated_bench.contenders import (
    DEFAULT,
    FRONTIER_PACES_MS,
    FRONTIER_SLOWDOWNS,
    OURS,
    PACES_MS,
    PLAIN,
)
from sglang_coserve.errors import ConfigError

PICTURED: Final = "azure-conversation, 50%"
"""Name of the load that the README shows."""

_MEASURES: Final = {"ttft_p99_ms": "P99 TTFT, ms", "itl_p99_ms": "P99 gap between tokens, ms"}
_DEFAULT_OFFSET: Final = (-16, -24)
"""Place of the default's text, in points from its point: below the texts of its neighbours."""

_OUR_COLOR, _PACE_COLOR, _STOCK_COLOR = "#1f77b4", "#2a9d8f", "#d1495b"


class Series(NamedTuple):
    """Systems that differ in one setting, in its order."""

    label: str
    systems: Mapping[str, str]
    """Text at the point of each system."""

    style: Mapping[str, Any]
    offset: tuple[int, int]
    """Place of the text, in points from its point."""


def draw(loads: Sequence[ComparedLoad], name: str, path: Path) -> None:
    """Draw P99 TTFT and P99 gap against offline tokens/s for one load, as an SVG file.

    Args:
        loads: Stored loads.
        name: Name of the load.
        path: File to write; an earlier one is replaced.

    Raises:
        ConfigError: no load has the name, or it has no figures of online requests alone.
    """
    import matplotlib.pyplot as plt

    load = next((one for one in loads if one.name == name and one.has_alone), None)
    if load is None:
        known = ", ".join(one.name for one in loads if one.has_alone)
        raise ConfigError(f"no load {name!r} with online requests alone, there are: {known}")
    settings = {"svg.hashsalt": "coserve", "svg.fonttype": "none", "font.size": 10}
    spines = {"axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context({**settings, **spines}):
        figure, panels = plt.subplots(1, 2, figsize=(8.6, 4.0), layout="constrained")
        for axes, (key, label) in zip(panels, _MEASURES.items(), strict=True):
            _draw_panel(axes, load, key)
            axes.set(xlabel="offline tokens/s", ylabel=label)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        seeds = len(load.rows[PLAIN])
        figure.supxlabel(
            f"{load.kind}: no GPU was measured. {load.device}, {load.name} load, medians of "
            f"{seeds} seeds; lower and further right is better",
            fontsize=8,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)


def series_of(load: ComparedLoad) -> Iterator[Series]:
    """Yield the series of a load, without systems that have no figures."""
    slowdowns = sorted([*FRONTIER_SLOWDOWNS, "100%"], key=lambda text: float(text.rstrip("%")))
    ours = {
        DEFAULT if slowdown == "100%" else f"{OURS}, streams +{slowdown}": (
            "default" if slowdown == "100%" else f"+{slowdown}"
        )
        for slowdown in slowdowns
    }
    paces = {
        f"{OURS}, gaps of {ms} ms": f"{ms} ms" for ms in sorted([*PACES_MS, *FRONTIER_PACES_MS])
    }
    mixed = {name: short(name).rpartition(" ")[2] for name in load.stock if "mixed" in name}
    between = {name: "" for name in load.stock if name not in mixed}
    filled = {"marker": "o", "linewidth": 1}
    crossed = {"color": _STOCK_COLOR, "marker": "x", "linewidth": 1, "linestyle": ":"}
    plus = {"color": _STOCK_COLOR, "marker": "+", "markersize": 10, "linestyle": ""}
    for series in (
        Series("ours, slowdown of streams", ours, {"color": _OUR_COLOR, **filled}, (-4, -13)),
        Series("ours, target for gaps", paces, {"color": _PACE_COLOR, **filled}, (-8, 7)),
        Series("stock SGLang, mixed chunks", mixed, crossed, (4, 5)),
        Series("stock SGLang, decodes between chunks", between, plus, (0, 0)),
    ):
        known = {name: text for name, text in series.systems.items() if name in load.rows}
        if known:
            yield series._replace(systems=known)


def _draw_panel(axes: Any, load: ComparedLoad, key: str) -> None:
    alone = load.median(PLAIN, key)
    axes.axhline(alone, color="k", linestyle="--", linewidth=1, label="online requests alone")
    for series in series_of(load):
        tokens = [load.median(name, TOKENS) for name in series.systems]
        latencies_ms = [load.median(name, key) for name in series.systems]
        axes.plot(tokens, latencies_ms, label=series.label, **series.style)
        for x, y, text in zip(tokens, latencies_ms, series.systems.values(), strict=True):
            is_default = text == "default"
            if is_default:
                axes.plot(x, y, marker="o", markersize=10, color=series.style["color"])
            axes.annotate(
                text,
                (x, y),
                _DEFAULT_OFFSET if is_default else series.offset,
                textcoords="offset points",
                fontsize=8,
                color=series.style["color"],
                weight="bold" if is_default else "normal",
            )
    tokens = [x for line in axes.lines[1:] for x in line.get_xdata()]
    axes.set_xlim(0.85 * min(tokens, default=0.0), 1.08 * max(tokens, default=1.0))
    axes.locator_params(axis="x", nbins=6)
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
