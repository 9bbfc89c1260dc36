"""The report of the demo: a table, a sentence, ``report.json`` and ``timeline.png``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from sglang_coserve.demo.servers import ALONE, OURS, STOCK
from sglang_coserve.metrics import (
    Outcome,
    RequestTimeline,
    SloTargets,
    Summary,
    attainment,
    latency_report,
    throughput,
)

_BIN_S: Final = 1.0
_TTFT, _GAP, _OFFLINE = "tab:blue", "tab:red", "tab:orange"

_ALIKE: Final = 0.1
"""Ratios that differ by less are called alike: windows are short, and a P99 is of few values."""

_UNFINISHED: Final = 0.1
"""Where a larger part of the requests did not finish, latencies are of the others alone."""


@dataclass(frozen=True, slots=True)
class SystemResult:
    """Both classes, from the same window of one system."""

    name: str
    label: str
    online: Sequence[RequestTimeline]
    offline: Sequence[RequestTimeline] | None
    """None without an offline load."""

    offline_s: float = 0.0
    """How long it ran beside the online one."""

    @property
    def offline_tokens_per_s(self) -> float:
        """Prompt and output tokens of the offline load while the online one ran."""
        return throughput(self.offline or (), 0.0, self.offline_s).total_tokens_per_s


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The systems in the order in which they ran; ours is among them."""

    systems: tuple[SystemResult, ...]
    targets: SloTargets
    """Of ours."""

    emulated: str | None = None
    """The model that only took a GPU's time; None: one that computed."""

    def find(self, name: str) -> SystemResult | None:
        """Return a system's result; None if it was not measured."""
        return next((system for system in self.systems if system.name == name), None)

    @property
    def ours(self) -> SystemResult:
        """Ours."""
        found = self.find(OURS.name)
        assert found is not None
        return found


def as_json(result: DemoResult) -> dict[str, Any]:
    """Return the report as plain JSON values; latencies in milliseconds.

    ``online`` and ``offline`` are ours; ``systems`` has the same of each. ``emulated`` is the
    model that only took a GPU's time, or null.
    """
    return {
        **_system_json(result.ours, result.targets),
        "emulated": result.emulated,
        "systems": {system.name: _system_json(system, result.targets) for system in result.systems},
        "sentence": sentence(result),
    }


def _system_json(system: SystemResult, targets: SloTargets) -> dict[str, Any]:
    online = latency_report(system.online)
    offline = system.offline
    return {
        "online": {
            "n": len(system.online),
            "finished": online.finished,
            "failed": sum(t.outcome is Outcome.FAILED for t in system.online),
            "ttft_ms": _milliseconds(online.ttft),
            "tpot_ms": _milliseconds(online.tpot),
            "itl_ms": _milliseconds(online.itl),
            "slo": {
                **dict(zip(("ttft_ms", "tpot_ms"), targets.in_ms(), strict=True)),
                "attainment": attainment(system.online, targets),
            },
        },
        "offline": None
        if offline is None
        else {
            "ok": sum(t.outcome is Outcome.FINISHED for t in offline),
            "failed": sum(t.outcome is Outcome.FAILED for t in offline),
            "elapsed_s": round(system.offline_s, 3),
            "tokens_per_s": round(system.offline_tokens_per_s, 1),
        },
    }


_ROWS: Final = (
    ("TTFT P50, ms", "ttft_ms", "p50"),
    ("TTFT P99, ms", "ttft_ms", "p99"),
    ("ITL P50, ms", "itl_ms", "p50"),
    ("ITL P99, ms", "itl_ms", "p99"),
)


def as_table(result: DemoResult) -> Table:
    """Return the one table that the demo prints: latencies, and how often those alone."""
    found = as_json(result)["systems"]
    systems = [found[system.name] for system in result.systems]
    alone = found.get(ALONE.name)
    title = "Online latencies (÷ alone), and offline work"
    if result.emulated is not None:
        title = f"{_caption(result.emulated)}\n{title}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for system in result.systems:
        table.add_column(system.label, justify="right")
    for title, key, name in _ROWS:
        base = None if alone is None else alone["online"][key][name]
        table.add_row(title, *(_latency(each["online"][key][name], base) for each in systems))
    finished = (f"{each['online']['finished']} of {each['online']['n']}" for each in systems)
    table.add_row("online finished", *finished)
    table.add_section()
    offline = [each["offline"] for each in systems]
    rates = ("–" if each is None else f"{each['tokens_per_s']:,.0f}" for each in offline)
    table.add_row("offline tokens/s", *rates)
    lines = ("–" if e is None else f"{e['ok']:,} ok, {e['failed']:,} failed" for e in offline)
    table.add_row("offline requests", *lines)
    return table


def _caption(emulated: str) -> str:
    """Return what tables and pictures say of figures that are emulated."""
    return f"{emulated}, no GPU"


def sentence(result: DemoResult) -> str:
    """Return the result as a sentence, also where it is not in our favour."""
    found = _sentence(result)
    return found if result.emulated is None else f"{_caption(result.emulated)}: {found}"


def _sentence(result: DemoResult) -> str:
    alone, stock = result.find(ALONE.name), result.find(STOCK.name)
    ours = result.ours
    if alone is None or stock is None:
        return (
            f"Beside {len(ours.online)} online requests, offline work got "
            f"{ours.offline_tokens_per_s:,.0f} tokens/s; without --quick it is compared."
        )
    unfinished = max(sum(_is_unfinished(t) for t in s.online) for s in result.systems)
    if unfinished > _UNFINISHED * len(ours.online):
        return (
            f"The machine is too slow or too busy for this trace: {unfinished} of "
            f"{len(ours.online)} online requests did not finish, so nothing can be compared."
        )
    harm, stock_harm = _ratios(ours, alone), _ratios(stock, alone)
    if harm is None or stock_harm is None:
        return "Too few tokens came to compare the systems: give it more --seconds."
    more = ours.offline_tokens_per_s / max(stock.offline_tokens_per_s, 1e-9)
    return (
        f"Offline work made P99 TTFT {harm[0]:.1f} × and P99 ITL {harm[1]:.1f} × what they are "
        f"alone; with stock SGLang {stock_harm[0]:.1f} × and {stock_harm[1]:.1f} ×: online users "
        f"were {_compared(max(harm), max(stock_harm), 'hurt')}, and offline work got "
        f"{_share(more)} ({ours.offline_tokens_per_s:,.0f} and {stock.offline_tokens_per_s:,.0f} "
        "tokens/s)."
    )


def _ratios(system: SystemResult, alone: SystemResult) -> tuple[float, float] | None:
    """Return P99 TTFT and P99 ITL, over those alone; None where one is not known."""
    found, base = latency_report(system.online), latency_report(alone.online)
    values = [found.ttft.p99_s, found.itl.p99_s, base.ttft.p99_s, base.itl.p99_s]
    known = [value for value in values if value]
    if len(known) < len(values):
        return None
    return known[0] / known[2], known[1] / known[3]


def _compared(ours: float, stock: float, how: str) -> str:
    if abs(ours / stock - 1) < _ALIKE:
        return f"{how} alike"
    return f"less {how}" if ours < stock else f"more {how}"


def _share(more: float) -> str:
    if abs(more - 1) < _ALIKE:
        return "as much"
    return f"{more:.1f} × as much" if more > 1 else f"{more:.0%} of that"


def _is_unfinished(timeline: RequestTimeline) -> bool:
    return timeline.outcome is not Outcome.FINISHED


def _latency(value: float | None, alone: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}"
    return f"{text} ({value / alone:.1f}×)" if alone else text


def _milliseconds(summary: Summary) -> dict[str, float | None]:
    values = summary.to_dict()
    return {name: values[name] for name in ("mean", "p50", "p99")}


def draw(result: DemoResult, path: Path) -> None:
    """Draw a panel for each system, all with the same axes; needs the extra ``plot``."""
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
        latency.yaxis.set_major_formatter("{x:g}")
        latency.grid(axis="y", alpha=0.3)
        rate.set_xlim(0, end_s + _BIN_S)
        rate.set_xlabel("seconds")
        rate.locator_params(axis="x", nbins=5, integer=True)
    for target_s, color in ((result.targets.ttft_s, _TTFT), (result.targets.tpot_s, _GAP)):
        if target_s is not None:
            for latency in axes[0]:
                latency.axhline(target_s * 1e3, color=color, lw=1, ls="--")
    axes[1][0].set_ylim(bottom=0)  # Of all, once everything is drawn.
    axes[0][0].set_ylabel("online latency, ms")
    axes[1][0].set_ylabel("offline\ntokens/s")
    title = None if result.emulated is None else _caption(result.emulated)
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
    """Output tokens per second as they come, and prompts with the first."""
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
