"""Tables and pictures of the loads in a folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emulated_bench.contenders import PLAIN, STOCK
from sglang_coserve.terminal import markdown_table

Loaded = Mapping[str, Any]
_COLUMNS: Final = (
    "traffic, load",
    "system",
    "TTFT P50, P99 ms",
    "÷ alone",
    "ITL P50, P99 ms",
    "÷ alone",
    "in 1.2 × alone",
    "in given",
    "offline tokens/s",
    "÷ best stock",
    "÷ bound",
    "host ms a step",
    "÷ stock",
    "suspended",
    "preempted ÷ online",
    "from prefixes",
    "recomputed",
)


def table(loads: Sequence[Loaded]) -> str:
    """Return a Markdown table: of stock SGLang the setting that counts, and the one with most."""
    ordered = sorted(loads, key=lambda one: (one["traffic"], one["load"]))
    return markdown_table(_COLUMNS, [line for one in ordered for line in _lines(one)])


def _lines(loaded: Loaded) -> list[list[str]]:
    rows: dict[str, list[Loaded]] = {}
    for one in loaded["rows"]:
        rows.setdefault(one["system"], []).append(one)
    stock = [name for name in rows if name.startswith(STOCK)]
    counts = loaded["stock_that_counts"]
    most = max(stock, key=lambda name: rows[name][0]["offline_tokens_per_s"])
    shown = [name for name in rows if name not in stock or name in (counts, most)]
    head = f"{loaded['traffic']}, {loaded['load']:.0%}"
    return [
        [head, name, *_cells(rows[name], rows, most, counts, loaded["bound_tokens_per_s"])]
        for name in shown
    ]


def _cells(
    runs: Sequence[Loaded],
    rows: Mapping[str, Sequence[Loaded]],
    most: str,
    counts: str,
    bounds: Sequence[float],
) -> list[str]:
    """Ratios are taken within a repeat: each has other requests."""

    def mean(key: str) -> float:
        return float(statistics.mean(one[key] for one in runs))

    def ratio(key: str, base: str) -> str:
        of_base = {one["repeat"]: one[key] for one in rows[base]}
        both = [one for one in runs if one["repeat"] in of_base]
        values = [one[key] / of_base[one["repeat"]] for one in both if of_base[one["repeat"]]]
        return f"{statistics.mean(values):.2f}" if values else "–"

    def share(key: str) -> str:
        return "–" if is_alone or key not in runs[0] else f"{mean(key):.1%}"

    is_alone = runs is rows[PLAIN]
    offline = ["–", "–", "–"]
    if not is_alone:
        shares = [
            one["offline_tokens_per_s"] / bounds[one["repeat"]]
            for one in runs
            if bounds[one["repeat"]]
        ]
        of_bound = f"{statistics.mean(shares):.2f}" if shares else "–"
        per_s = mean("offline_tokens_per_s")
        offline = [f"{per_s:,.0f}", ratio("offline_tokens_per_s", most), of_bound]
    kept = [
        "–" if is_alone else f"{statistics.mean(one['attained'][kind] for one in runs):.1%}"
        for kind in ("1.2 × alone", "given")
    ]
    return [
        f"{mean('ttft_p50_ms'):.0f}, {mean('ttft_p99_ms'):.0f}",
        ratio("ttft_p99_ms", PLAIN),
        f"{mean('itl_p50_ms'):.1f}, {mean('itl_p99_ms'):.1f}",
        ratio("itl_p99_ms", PLAIN),
        *kept,
        *offline,
        f"{mean('host_ms_per_step'):.1f}",
        ratio("host_ms_per_step", counts),
        f"{mean('suspended'):.0f}",
        f"{mean('preemptions_per_online_request'):.2f}",
        *(share(key) for key in ("from_prefixes", "recomputed")),
    ]


def plot(loads: Sequence[Loaded], path: Path) -> None:
    """Draw, for each load, P99 TTFT and P99 gap against offline tokens/s of all systems.

    Of the first requests, which all of them got.
    """
    import matplotlib.pyplot as plt

    traffics = sorted({one["traffic"] for one in loads})
    shares = sorted({one["load"] for one in loads})
    measures = (("ttft_p99_ms", "P99 TTFT, ms"), ("itl_p99_ms", "P99 gap, ms"))
    rows = len(shares) * len(measures)
    figure, axes = plt.subplots(
        rows, len(traffics), figsize=(3.1 * len(traffics), 2 * rows + 1), squeeze=False
    )
    for axis in axes.flat:
        axis.set_axis_off()
    shown: dict[str, Any] = {}
    for one in loads:
        column, above = traffics.index(one["traffic"]), shares.index(one["load"]) * len(measures)
        for row, (key, label) in enumerate(measures, above):
            axis = axes[row][column]
            axis.set_axis_on()
            axis.axhline(_first(one, PLAIN, key), color="k", linestyle="--", label=PLAIN)
            for name, style in _styles(one).items():
                tokens_per_s = _first(one, name, "offline_tokens_per_s")
                axis.plot(tokens_per_s, _first(one, name, key), style, label=name)
            axis.set_xlim(0, 1.1 * axis.dataLim.xmax)
            axis.set_ylim(0, 1.1 * axis.dataLim.ymax)
            axis.locator_params(axis="x", nbins=4)
            axis.grid(alpha=0.3)
            axis.set_ylabel(label, fontsize=9)
            handles, names = axis.get_legend_handles_labels()
            shown |= dict(zip(names, handles, strict=True))
        axes[above][column].set_title(f"{one['traffic']}, {one['load']:.0%}", fontsize=10)
        axes[above + 1][column].set_xlabel("offline tokens/s", fontsize=9)
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=4, fontsize=9)
    figure.suptitle(f"{loads[0]['emulated']}: no GPU was measured", fontsize=12)
    figure.tight_layout(rect=(0, 0.7 / (2 * rows + 1), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none"}):  # Text instead of outlines: a third of the size.
        figure.savefig(path)
    plt.close(figure)


def _styles(loaded: Loaded) -> dict[str, str]:
    """Return the systems with offline work, ours filled and stock SGLang's settings crossed."""
    names = dict.fromkeys(one["system"] for one in loaded["rows"] if one["system"] != PLAIN)
    ours = [name for name in names if not name.startswith(STOCK)]
    stock = [name for name in names if name.startswith(STOCK)]
    filled, crossed = ("C3o", "C1s", "C2^", "C4v", "C5d"), ("C0x", "C0+", "C0*", "C0|", "C0_")
    return {
        **dict(zip(ours, filled, strict=False)),
        **dict(zip(stock, crossed, strict=False)),
    }


def _first(loaded: Loaded, name: str, key: str) -> float:
    return float(next(o[key] for o in loaded["rows"] if (o["system"], o["repeat"]) == (name, 0)))
