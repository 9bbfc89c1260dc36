"""Tables and pictures of the loads in a folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emulated_bench.contenders import PLAIN, STOCK
from sglang_coserve.tables import markdown_table

__all__ = ["plot", "table"]

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
    ]


def plot(loads: Sequence[Loaded], path: Path) -> None:
    """Draw P99 TTFT and P99 gap ÷ alone, and offline tokens/s ÷ bound, for each traffic."""
    import matplotlib.pyplot as plt

    kinds = [*dict.fromkeys(one["traffic"] for one in loads)]
    figures = (
        ("ttft_p99_ms", "P99 TTFT, ms"),
        ("itl_p99_ms", "P99 gap, ms"),
        ("offline_tokens_per_s", "offline tokens/s"),
    )
    figure, axes = plt.subplots(
        len(kinds), len(figures), figsize=(13, 3.1 * len(kinds)), squeeze=False, sharex=True
    )
    for line, kind in zip(axes, kinds, strict=True):
        of_kind = sorted((one for one in loads if one["traffic"] == kind), key=lambda o: o["load"])
        for axis, (key, label) in zip(line, figures, strict=True):
            for name, style in _series(of_kind):
                points = [
                    (100 * one["load"], value)
                    for one in of_kind
                    if (value := _value(one, name, key)) is not None
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), style, label=name, markersize=5)
            if key == "offline_tokens_per_s":
                bounds = [statistics.mean(one["bound_tokens_per_s"]) for one in of_kind]
                shares = [100 * one["load"] for one in of_kind]
                axis.plot(shares, bounds, "k:", label="bound")
            axis.set_ylim(bottom=0)
            axis.set_title(f"{kind}: {label}", fontsize=9)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("online load, % of what plain SGLang serves")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    more, names = axes[0][0].get_legend_handles_labels()
    shown = {**dict(zip(names, more, strict=True)), **dict(zip(labels, handles, strict=True))}
    figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Emulated: {loads[0]['emulated']}. No GPU was measured.", fontsize=11)
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _series(loads: Sequence[Loaded]) -> list[tuple[str, str]]:
    ours = dict.fromkeys(
        one["system"] for load in loads for one in load["rows"] if one["system"].startswith("ours")
    )
    styles = ("C3o-", "C1s-", "C2^-", "C4v-", "C5d-")
    return [(PLAIN, "k.--"), (STOCK, "C0x-"), *zip(ours, styles, strict=False)]


def _value(loaded: Loaded, name: str, key: str) -> float | None:
    """Return the mean over repeats; ``STOCK`` is the setting that counts."""
    wanted = loaded["stock_that_counts"] if name == STOCK else name
    values = [one[key] for one in loaded["rows"] if one["system"] == wanted]
    if not values or (name == PLAIN and key == "offline_tokens_per_s"):
        return None
    return float(statistics.mean(values))
