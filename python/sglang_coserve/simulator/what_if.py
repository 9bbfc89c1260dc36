"""Recorded traffic under other settings, beside the same simulated as it was."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sglang_coserve.core.control.slo import Slo, format_slo
from sglang_coserve.core.policies import make_policy
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import LatencyReport, latency_report
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.options import BASELINES
from sglang_coserve.simulator.recorded_traffic import RecordedTraffic
from sglang_coserve.simulator.report import aligned
from sglang_coserve.simulator.result import LABEL, SimulationResult
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate

__all__ = ["RUNS", "Change", "TrafficOutcome", "WhatIfComparison", "compare_change", "parse_share"]

RUNS: Final = 5
"""Simulations of each setting, which differ in what steps take by chance. On which steps a P99
falls is chance, too: in 16 simulations of the same 524 gaps it was 21.7 to 37.8 ms
(``docs/simulator.md``)."""

_SHARE: Final = re.compile(r"([+-]\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be different; nothing by default."""

    policy: str | None = None
    slos: tuple[Slo, ...] = ()
    more_offline: float = 0.0
    """A part of the offline requests that comes in addition; negative: that is left out."""

    def __str__(self) -> str:
        parts = [
            *([f"policy {self.policy}"] if self.policy else ()),
            *map(format_slo, self.slos),
            *([f"{self.more_offline:+.3g} × offline requests"] if self.more_offline else ()),
        ]
        return ", ".join(parts) or "as recorded"


@dataclass(frozen=True, slots=True)
class TrafficOutcome:
    """What became of the traffic."""

    label: str
    online: LatencyReport
    """Of all runs together."""

    offline_tokens: float
    """Of a run, on average."""

    single: tuple[LatencyReport, ...] = ()
    """Of each simulated run."""

    @property
    def ttft_s(self) -> float | None:
        """P99 TTFT."""
        return self.online.ttft.p99_s

    @property
    def itl_s(self) -> float | None:
        """P99 ITL."""
        return self.online.itl.p99_s

    def span(self) -> str:
        """Return how far P99 TTFT and P99 ITL are apart in single runs; empty without any."""
        if not self.single:
            return ""
        figures = {
            "TTFT": [report.ttft.p99_s for report in self.single],
            "ITL": [report.itl.p99_s for report in self.single],
        }
        parts = []
        for name, values in figures.items():
            known = [value for value in values if value is not None]
            if known:
                parts.append(f"P99 {name} {_ms(min(known))} to {_ms(max(known))} ms")
        return f"Single runs, {self.label.removeprefix(LABEL + ': ')}: {', '.join(parts)}."


@dataclass(frozen=True, slots=True)
class WhatIfComparison:
    """The recording, the same simulated, and the change simulated."""

    recorded: TrafficOutcome
    simulated: TrafficOutcome
    changed: TrafficOutcome | None

    def table(self) -> str:
        """Return all as text."""
        outcomes = [each for each in (self.recorded, self.simulated, self.changed) if each]
        heading = ("", "TTFT P50 ms", "TTFT P99 ms", "ITL P50 ms", "ITL P99 ms", "offline tokens")
        return "\n".join(aligned([heading, *map(_row, outcomes)]))

    def sentence(self) -> str:
        """Return the difference, and how far simulating is off where it can be checked."""
        real, simulated, changed = self.recorded, self.simulated, self.changed
        off = (
            f"Simulated as recorded, P99 TTFT is off by {_off(real.ttft_s, simulated.ttft_s)}, "
            f"P99 ITL by {_off(real.itl_s, simulated.itl_s)} and offline tokens by "
            f"{_off(real.offline_tokens, simulated.offline_tokens)}."
        )
        spans = [each.span() for each in (simulated, changed) if each is not None]
        off = " ".join([off, *filter(None, spans)])
        if changed is None:
            return off
        difference = changed.offline_tokens - simulated.offline_tokens
        return (
            f"({LABEL}) {abs(difference):,.0f} {'more' if difference >= 0 else 'fewer'} offline "
            f"tokens, P99 TTFT {_ms(simulated.ttft_s)} → {_ms(changed.ttft_s)} ms, "
            f"P99 ITL {_ms(simulated.itl_s)} → {_ms(changed.itl_s)} ms. {off}"
        )


def compare_change(
    traffic: RecordedTraffic,
    change: Change,
    on_progress: Callable[[str, float], bool] = lambda _name, _seconds: False,
    *,
    runs: int = RUNS,
) -> WhatIfComparison | None:
    """Simulate the traffic as it was, and as it would be; None if that was broken off.

    Args:
        traffic: The traffic.
        change: What is to be different.
        on_progress: Called now and then with what is simulated and the simulated time; True ends
            it.
        runs: How often each is simulated, with other random times of its steps.

    Raises:
        ConfigError: no policy has this name, or ``runs`` is below 1.
    """
    if runs < 1:
        raise ConfigError(f"--runs {runs}: at least 1 is needed")
    outcomes: list[TrafficOutcome] = []
    changes = [Change()] if change == Change() else [Change(), change]
    for each in changes:
        results = []
        for seed in range(runs):
            progress = partial(on_progress, f"{each}, {seed + 1} of {runs}")
            result = _simulate(traffic, each, seed, progress)
            if not result.is_complete:
                return None
            results.append(result)
        outcomes.append(_together(f"{LABEL}: {each}", results))
    recorded = TrafficOutcome(
        "recorded (measured)", latency_report(traffic.timelines), traffic.offline_tokens
    )
    return WhatIfComparison(recorded, outcomes[0], outcomes[1] if len(outcomes) > 1 else None)


def parse_share(text: str) -> float:
    """Read ``+20%`` or ``-50%``.

    Raises:
        ConfigError: anything else, or less than -100%.
    """
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else math.nan
    if not share >= -1:
        raise ConfigError(
            f"--offline {text!r}: write +20% for a fifth more, or -20%, down to -100%"
        )
    return share


def _together(label: str, results: Sequence[SimulationResult]) -> TrafficOutcome:
    tokens = [each.offline_throughput.total_tokens_per_s * each.interval_s for each in results]
    return TrafficOutcome(
        label,
        latency_report([timeline for result in results for timeline in result.online]),
        sum(tokens) / len(tokens),
        tuple([latency_report(result.online) for result in results]) if len(results) > 1 else (),
    )


def _simulate(
    traffic: RecordedTraffic, change: Change, seed: int, on_progress: Callable[[float], bool]
) -> SimulationResult:
    recorded, engine = traffic.setup, traffic.engine
    policy = change.policy or recorded.policy
    safepoint = None
    if engine.stop_share < 1 and policy not in BASELINES:
        safepoint = SafepointConfig(
            round(1 / engine.stop_share), interval_layers=1, resume_s=engine.resume_s
        )
    setup = SimulationSetup(
        model=recorded.profile.latency_model,
        true_model=traffic.true_model,
        executor=ExecutorConfig(
            kv_capacity_tokens=recorded.engine.kv_tokens,
            page_tokens=engine.page_tokens,
            max_running_requests=recorded.engine.max_requests,
            max_batch_tokens=recorded.engine.chunk_tokens,
            prefix_cache=engine.keeps_prefixes,
            safepoint=safepoint,
            noise_cv=traffic.noise_cv,
            seed=seed,
        ),
        slos=change.slos or recorded.slos,
        scheduler=recorded.config,
    )
    workload = Workload(
        online=traffic.online_requests,
        offline=lambda: traffic.offline_requests(change.more_offline),
        interval_s=traffic.interval_s,
    )
    made = make_policy(policy, recorded.config)
    return simulate(workload, setup, made, on_progress=on_progress)


def _row(outcome: TrafficOutcome) -> Sequence[str]:
    online = outcome.online
    values = (online.ttft.p50_s, online.ttft.p99_s, online.itl.p50_s, online.itl.p99_s)
    return (outcome.label, *map(_ms, values), f"{outcome.offline_tokens:,.0f}")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.4g}"


def _off(measured: float | None, simulated: float | None) -> str:
    if not measured or simulated is None:
        return "an unknown part"
    return f"{simulated / measured - 1:+.0%}"
