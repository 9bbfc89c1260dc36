"""The results of simulated runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from sglang_coserve.simulator.observer import LoadCurve


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

    def to_dict(self) -> dict[str, float | int]:
        """Return the fields by name."""
        return asdict(self)


LABEL: Final = "simulated"
"""Marks all output of a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What the requests of a run got. Latencies and rates are defined in
    ``sglang_coserve.metrics``."""

    targets: SloTargets
    interval_s: float
    """Rates are over (0, interval]; later arrivals were not served."""

    is_complete: bool
    """False if the run was stopped early; ``interval_s`` is then the real end."""

    online: tuple[RequestTimeline, ...]
    offline: tuple[RequestTimeline, ...]

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
            "label": LABEL,
            "is_complete": self.is_complete,
            "interval_s": self.interval_s,
            "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
            "online": {
                "latency": latency_report(self.online).to_dict(),
                "throughput": self.online_throughput.to_dict(),
                "attainment": attainment(self.online, targets),
                "token_attainment": token_attainment(self.online, targets),
                "goodput_per_s": goodput_per_s(self.online, targets, 0.0, self.interval_s),
            },
            "offline": {
                "latency": latency_report(self.offline).to_dict(),
                "throughput": self.offline_throughput.to_dict(),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult(RunResult):
    """The run of one policy."""

    policy: str
    end_s: float
    """End of the run: after the interval if online requests were still running."""

    counters: Counters
    recomputed_tokens: int
    reloaded_tokens: int
    kv_capacity_tokens: int
    curve: LoadCurve

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the timelines and the curve, for JSON."""
        return {
            "policy": self.policy,
            **RunResult.to_dict(self),
            "end_s": self.end_s,
            "engine": {
                **self.counters.to_dict(),
                "recomputed_tokens": self.recomputed_tokens,
                "reloaded_tokens": self.reloaded_tokens,
                "kv_capacity_tokens": self.kv_capacity_tokens,
            },
        }


def write_results(results: Sequence[RunResult], path: Path, settings: Mapping[str, object]) -> None:
    """Write what ``to_dict`` of each run returns to a JSON file, with the settings.

    Raises:
        OSError: the file cannot be written.
    """
    report = {
        "label": LABEL,
        "settings": dict(settings),
        "results": [result.to_dict() for result in results],
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
