"""The results of simulated runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from sglang_coserve.metrics import (
    RequestTimeline,
    SloTargets,
    Throughput,
    attainment,
    goodput_per_s,
    latency_report,
    throughput,
    token_attainment,
)


@dataclass(slots=True)
class Counters:
    """Totals of a run so far."""

    iterations: int = 0
    busy_s: float = 0.0
    """Time in steps; otherwise the device was idle."""

    online_tokens: int = 0
    """Tokens computed for online requests, including recomputed ones."""

    offline_tokens: int = 0
    retractions: int = 0
    pauses: int = 0
    suspensions: int = 0
    """How often a step was suspended at a safepoint."""

    drops: int = 0
    """Suspended steps that were dropped to free their memory."""


LABEL: Final = "simulated"
"""Marks all output of a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The run of one policy. Latencies and rates are defined in ``sglang_coserve.metrics``."""

    policy: str
    targets: SloTargets
    interval_s: float
    """Rates are over (0, interval]; later arrivals were not served."""

    end_s: float
    """End of the run: after the interval if online requests were still running."""

    is_complete: bool
    """False if the run was stopped early; ``interval_s`` is then the real end."""

    online: tuple[RequestTimeline, ...]
    offline: tuple[RequestTimeline, ...]
    counters: Counters
    recomputed_tokens: int
    reloaded_tokens: int
    kv_capacity_tokens: int

    @property
    def online_throughput(self) -> Throughput:
        """Rates of the online requests."""
        return throughput(self.online, 0.0, self.interval_s)

    @property
    def offline_throughput(self) -> Throughput:
        """Rates of the offline requests."""
        return throughput(self.offline, 0.0, self.interval_s)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the timelines, for JSON."""
        targets = self.targets
        return {
            "policy": self.policy,
            "label": LABEL,
            "is_complete": self.is_complete,
            "interval_s": self.interval_s,
            "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
            "online": {
                "latency": latency_report(self.online).to_dict(),
                "throughput": asdict(self.online_throughput),
                "attainment": attainment(self.online, targets),
                "token_attainment": token_attainment(self.online, targets),
                "goodput_per_s": goodput_per_s(self.online, targets, 0.0, self.interval_s),
            },
            "offline": {
                "latency": latency_report(self.offline).to_dict(),
                "throughput": asdict(self.offline_throughput),
            },
            "end_s": self.end_s,
            "engine": {
                **asdict(self.counters),
                "recomputed_tokens": self.recomputed_tokens,
                "reloaded_tokens": self.reloaded_tokens,
                "kv_capacity_tokens": self.kv_capacity_tokens,
            },
        }
