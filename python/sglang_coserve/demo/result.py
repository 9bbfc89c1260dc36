"""What the demo measured: requests of each system, their latencies, and ``report.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sglang_coserve.demo.cpu_use import CpuUse
from sglang_coserve.demo.servers import ALONE, OURS, STOCK
from sglang_coserve.metrics import (
    LatencyReport,
    Outcome,
    RequestTimeline,
    SloTargets,
    Summary,
    attainment,
    latency_report,
    throughput,
)


class Metric(NamedTuple):
    """A latency of online requests, of which two percentiles are compared."""

    key: str
    """Field of ``LatencyReport``."""

    short: str
    """Head of a column."""

    words: str
    """Name in a sentence."""


TTFT: Final = Metric("ttft", "TTFT", "first tokens")
GAP: Final = Metric("itl", "gap", "gaps between tokens")
TPOT: Final = Metric("tpot", "TPOT", "time per token of a request")
METRICS: Final = (TTFT, GAP, TPOT)

PERCENTILES: Final = ("P50", "P99")

Column = tuple[Metric, str]
"""A latency and its percentile."""

Latencies = Mapping[Column, float | None]
"""Latencies in milliseconds; None without a value."""

COLUMNS: Final[tuple[Column, ...]] = tuple((m, p) for m in METRICS for p in PERCENTILES)


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

    cpu: CpuUse | None = None
    """In the window; None if it was not measured."""

    @property
    def offline_tokens_per_s(self) -> float:
        """Prompt and output tokens of the offline load while the online one ran."""
        return throughput(self.offline or (), 0.0, self.offline_s).total_tokens_per_s

    @property
    def finished(self) -> int:
        """Online requests that finished."""
        return sum(t.outcome is Outcome.FINISHED for t in self.online)

    @property
    def tokens_per_message(self) -> float:
        """Online tokens ÷ messages that brought some; 0 without any."""
        messages = sum(len(set(t.token_times_s)) for t in self.online)
        return sum(t.output_tokens for t in self.online) / max(messages, 1)

    def latencies_ms(self) -> Latencies:
        """Return the percentiles that are compared."""
        found = latency_report(self.online)
        return {
            (metric, name): _summary(found, metric).to_dict()[name.lower()]
            for metric, name in COLUMNS
        }


def _summary(found: LatencyReport, metric: Metric) -> Summary:
    summary: Summary = getattr(found, metric.key)
    return summary


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

    @property
    def alone(self) -> SystemResult | None:
        """Online requests without offline work; None if only ours was measured."""
        return self.find(ALONE.name)

    @property
    def stock(self) -> SystemResult | None:
        """Stock SGLang; None if only ours was measured."""
        return self.find(STOCK.name)

    @property
    def kind(self) -> str:
        """What tables and pictures say of the kind of the figures."""
        return "on this CPU" if self.emulated is None else f"{self.emulated}, no GPU"


def as_json(result: DemoResult, sentence: str) -> dict[str, Any]:
    """Return the report as plain JSON values; latencies in milliseconds.

    ``online`` and ``offline`` are ours; ``systems`` has the same of each. ``emulated`` is the
    model that only took a GPU's time, or null.
    """
    return {
        **_system_json(result.ours, result.targets),
        "emulated": result.emulated,
        "systems": {system.name: _system_json(system, result.targets) for system in result.systems},
        "sentence": sentence,
    }


def _system_json(system: SystemResult, targets: SloTargets) -> dict[str, Any]:
    online = latency_report(system.online)
    offline = system.offline
    return {
        "online": {
            "n": len(system.online),
            "finished": online.finished,
            "failed": sum(t.outcome is Outcome.FAILED for t in system.online),
            "tokens_per_message": round(system.tokens_per_message, 3),
            **{f"{m.key}_ms": _milliseconds(_summary(online, m)) for m in METRICS},
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
        "cores": None
        if system.cpu is None
        else {role: round(cores, 3) for role, cores in sorted(system.cpu.by_role.items())},
    }


def _milliseconds(summary: Summary) -> dict[str, float | None]:
    values = summary.to_dict()
    return {name: values[name] for name in ("mean", "p50", "p99", "max")}
