"""What the demo measured: a table, ``report.json`` and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_coserve.metrics import (
    Outcome,
    RequestTimeline,
    SloTargets,
    Summary,
    attainment,
    latency_report,
)

__all__ = ["DemoResult", "as_json", "as_table", "plot", "write_json"]


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """What became of the offline file. Token counts are of finished lines."""

    ok: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    """From the first line sent to the last record, or to the end of the demo."""

    is_complete: bool
    """False when the time ran out before the file."""

    finished_at: Sequence[tuple[float, int]]
    """Seconds into the demo and tokens, prompt and completion, done by then."""

    @property
    def tokens_per_s(self) -> float:
        """Prompt and completion tokens of finished lines per second."""
        return (self.prompt_tokens + self.completion_tokens) / self.elapsed_s


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both classes, from the same run."""

    online: Sequence[RequestTimeline]
    offline: OfflineResult
    targets: SloTargets


def as_json(result: DemoResult) -> dict[str, Any]:
    """Return the report as plain JSON values; latencies in milliseconds."""
    online = latency_report(result.online)
    offline = result.offline
    return {
        "online": {
            "n": len(result.online),
            "finished": online.finished,
            "failed": sum(t.outcome is Outcome.FAILED for t in result.online),
            "ttft_ms": _milliseconds(online.ttft),
            "tpot_ms": _milliseconds(online.tpot),
            "slo": {
                "ttft_ms": _ms(result.targets.ttft_s),
                "tpot_ms": _ms(result.targets.tpot_s),
                "attainment": attainment(result.online, result.targets),
            },
        },
        "offline": {
            "ok": offline.ok,
            "failed": offline.failed,
            "complete": offline.is_complete,
            "prompt_tokens": offline.prompt_tokens,
            "completion_tokens": offline.completion_tokens,
            "elapsed_s": round(offline.elapsed_s, 3),
            "tokens_per_s": round(offline.tokens_per_s, 1),
        },
    }


def write_json(result: DemoResult, path: Path) -> None:
    """Write ``as_json`` to ``path``."""
    path.write_text(json.dumps(as_json(result), indent=2) + "\n")


def as_table(result: DemoResult) -> Table:
    """Return the one table that the demo prints."""
    report = as_json(result)
    online, offline = report["online"], report["offline"]
    table = Table(title="Online and offline requests on one engine", title_justify="left")
    table.add_column("")
    for name in ("mean", "P50", "P99"):
        table.add_column(name, justify="right")
    for label, key in (("online TTFT (ms)", "ttft_ms"), ("online TPOT (ms)", "tpot_ms")):
        values = (online[key][name] for name in ("mean", "p50", "p99"))
        table.add_row(label, *("–" if value is None else f"{value:.1f}" for value in values))
    table.add_section()
    table.add_row("online requests", f"{online['finished']} of {online['n']} finished", "", "")
    if online["slo"]["attainment"] is not None and _has_target(result.targets):
        table.add_row("online within SLO", f"{online['slo']['attainment']:.1%}", "", "")
    more = "" if offline["complete"] else ", more to do"
    table.add_row("offline lines", f"{offline['ok']} ok, {offline['failed']} failed{more}", "", "")
    table.add_row("offline tokens/s", f"{offline['tokens_per_s']:.0f}", "", "")
    return table


def plot(result: DemoResult, path: Path) -> None:
    """Draw online latency and both classes' tokens per second over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (latency, rate) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), dpi=120)
    timed = [t for t in result.online if t.ttft_s is not None]
    latency.plot(
        [t.arrival_s for t in timed],
        [(t.ttft_s or 0) * 1e3 for t in timed],
        "o",
        ms=4,
        color="tab:blue",
        label="TTFT of a request, at its arrival",
    )
    paced = [t for t in timed if t.tpot_s is not None]
    latency.plot(
        [t.arrival_s for t in paced],
        [(t.tpot_s or 0) * 1e3 for t in paced],
        "x",
        ms=4,
        color="tab:orange",
        label="its mean TPOT",
    )
    if result.targets.ttft_s is not None:
        latency.axhline(result.targets.ttft_s * 1e3, color="tab:blue", lw=1, ls="--")
    if result.targets.tpot_s is not None:
        latency.axhline(result.targets.tpot_s * 1e3, color="tab:orange", lw=1, ls="--")
    latency.set_ylabel("online latency (ms)")
    _leave_room_for_legend(latency)

    end_s = max([2.0, *(s for s, _ in result.offline.finished_at), *(t.arrival_s for t in timed)])
    _plot_rates(rate, result, end_s)
    rate.set_ylabel("tokens per second")
    rate.set_xlabel("seconds")
    rate.set_xlim(0, end_s)
    _leave_room_for_legend(rate)
    figure.suptitle("Online and offline requests on one engine")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _leave_room_for_legend(axes: Any) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    axes.legend(loc="upper right", ncols=2, frameon=False)


def _plot_rates(axes: Any, result: DemoResult, end_s: float) -> None:
    """Prompt and output tokens per second in bins of two seconds, when they were done."""
    bin_s = 2.0
    edges = [i * bin_s for i in range(int(end_s / bin_s) + 2)]
    online = [0.0] * (len(edges) - 1)
    for timeline in result.online:
        for i, time_s in enumerate(timeline.token_times_s):
            tokens = 1 + (timeline.prompt_tokens if i == 0 else 0)
            index = int(time_s / bin_s)
            if index < len(online):
                online[index] += tokens / bin_s
    offline = [0.0] * len(online)
    previous = 0
    for time_s, tokens_done in result.offline.finished_at:
        offline[min(int(time_s / bin_s), len(offline) - 1)] += (tokens_done - previous) / bin_s
        previous = tokens_done
    axes.stairs(online, edges, fill=True, alpha=0.9, color="tab:blue", label="online")
    stacked = [a + b for a, b in zip(online, offline, strict=True)]
    axes.stairs(
        stacked,
        edges,
        baseline=online,
        fill=True,
        alpha=0.6,
        color="tab:green",
        label="offline (when a line finishes)",
    )


def _milliseconds(summary: Summary) -> dict[str, float | None]:
    values = summary.to_dict()
    return {name: values[name] for name in ("mean", "p50", "p99")}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _has_target(targets: SloTargets) -> bool:
    return targets.ttft_s is not None or targets.tpot_s is not None
