"""The report's figures, as SVG text. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sglang_coserve.metrics import RequestTimeline
from sglang_coserve.simulator.result import LABEL, SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CDF_POINTS: Final = 400
_CDF_SHOWN: Final = 0.995
"""Least share of each distribution that is inside of the frame."""

_ONLINE, _OFFLINE = "tab:blue", "tab:orange"

_LATENCIES: Final[dict[str, Callable[[Sequence[RequestTimeline]], list[float | None]]]] = {
    "TTFT": lambda timelines: [t.ttft_s for t in timelines],
    "TPOT": lambda timelines: [t.tpot_s for t in timelines],
    "ITL": lambda timelines: list(chain.from_iterable(t.itls_s for t in timelines)),
}


def latency_cdfs(results: Sequence[SimulationResult]) -> str:
    """Draw the cumulative distributions of the online latencies, one line per policy."""
    figure, axes = _figure(1, 3, height=3.2)
    targets = results[0].targets
    targets_s = {"TTFT": targets.ttft_s, "TPOT": targets.tpot_s}
    for axis, (name, of) in zip(axes, _LATENCIES.items(), strict=True):
        largest = 0.0
        for result in results:
            values = np.array([v for v in of(result.online) if v is not None]) * 1e3
            if values.size:
                share = np.linspace(0, 1, _CDF_POINTS)
                axis.plot(np.quantile(values, share), share, label=result.policy)
                largest = max(largest, float(np.quantile(values, _CDF_SHOWN)))
        if (target_s := targets_s.get(name)) is not None:
            axis.axvline(target_s * 1e3, color="black", linestyle=":", label="target")
            largest = max(largest, target_s * 1e3)
        axis.set(xlabel=f"online {name} (ms)", xlim=(0, 1.05 * largest or 1), ylim=(0, 1))
    axes[0].set_ylabel("share of requests (ITL: of tokens)")
    axes[0].legend(fontsize="small")
    return _svg(figure, "Online latencies")


def load_over_time(result: SimulationResult) -> str:
    """Draw one policy's tokens/s, KV use and queue lengths over time."""
    figure, axes = _figure(3, 1, height=6.0)
    bins, bin_s = result.curve.bins, result.curve.bin_s
    time_s = np.arange(len(bins)) * bin_s
    throughput, memory, queues = axes
    _stack(
        throughput,
        time_s,
        {
            "online": (_ONLINE, [b.online_tokens / bin_s for b in bins]),
            "offline": (_OFFLINE, [b.offline_tokens / bin_s for b in bins]),
        },
    )
    throughput.set_ylabel("tokens computed / s")
    percent = 100 / result.kv_capacity_tokens
    _stack(
        memory,
        time_s,
        {
            "held by requests": ("tab:green", [b.held_kv_tokens * percent for b in bins]),
            "prefix cache only": ("lightgray", [b.cached_kv_tokens * percent for b in bins]),
        },
    )
    memory.set(ylabel="KV slots (%)", ylim=(0, 100))
    for name, color, style, counts in (
        ("online running", _ONLINE, "-", [b.online_running for b in bins]),
        ("online waiting", _ONLINE, ":", [b.online_waiting for b in bins]),
        ("offline running", _OFFLINE, "-", [b.offline_running for b in bins]),
    ):
        queues.plot(time_s, counts, style, color=color, label=name)
    queues.set(ylabel="requests", xlabel="simulated time (s)")
    for axis in axes:
        axis.axvline(result.interval_s, color="black", linestyle=":")
        axis.legend(fontsize="small", loc="upper right")
    return _svg(figure, f"{result.policy}: load over time")


def _stack(axis: Axes, x: Any, layers: dict[str, tuple[str, list[float]]]) -> None:
    """Draw a stacked area plot; ``layers`` has the color and values by label."""
    colors, values = zip(*layers.values(), strict=True)
    axis.stackplot(x, *values, labels=layers.keys(), colors=colors, alpha=0.7)


def _figure(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=rows > 1)


def _svg(figure: Figure, title: str) -> str:
    from matplotlib import rc_context

    figure.suptitle(f"{title} ({LABEL})", fontsize="medium")
    text = io.StringIO()
    # These two settings make the output deterministic.
    with rc_context({"svg.hashsalt": LABEL}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
