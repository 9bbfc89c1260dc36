"""What the ConServe experiments share: workloads of Table 1 and §6.2, targets, figures.

No prompts share a prefix, and the engine of the paper keeps nothing of an evicted
request on the device, so these experiments run without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness import (
    Lengths,
    gamma_arriving,
    mixed,
    offline_backlog,
    p99_itl_ms,
    p99_ttft_ms,
)

from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator import SimulationResult, Workload

__all__ = [
    "BURSTGPT",
    "CHECKPOINT_BYTE_PER_S",
    "CHUNK_TOKENS",
    "DATASETS",
    "FIGURES",
    "SAFEPOINT_LAYERS",
    "SYNTHETIC",
    "figures",
    "offline_per_s",
    "own_targets",
    "workload",
]

SYNTHETIC = Lengths.fixed(4096, 256)
BURSTGPT = Lengths(2747, 3446, 267, 481)
DATASETS = {
    "DuReader": Lengths(21776, 29306, 166, 754),
    "MultiNews": Lengths(6916, 12084, 394, 788),
    "VCSUM": Lengths(18803, 32768, 337, 510),
}
CHECKPOINT_BYTE_PER_S = 37e9
"""§6.5, of one H100."""

SAFEPOINT_LAYERS = 4
"""§6.5."""

CHUNK_TOKENS = 8192
"""The baselines' token budget. The text does not state it; this one comes nearest to the P99
TBT of 375 ms that §6.5 gives for Sarathi-P."""


def workload(
    rate_per_s: float,
    seconds: float,
    *,
    cv: float = 0.5,
    online: Lengths = SYNTHETIC,
    offline: Sequence[Lengths] = tuple(DATASETS.values()),
) -> Workload:
    """Return Gamma arrivals beside an offline backlog."""
    return Workload(
        online=gamma_arriving(rate_per_s, cv, online, seconds),
        offline=offline_backlog(lambda: mixed(offline, seed=2)),
        backlog_depth=64,
        interval_s=seconds,
    )


def own_targets(alone: SimulationResult, scale: float = 1.0) -> SloTargets:
    """Return the P99 latencies of *Online-Only*, scaled: how the paper sets the SLO."""
    return SloTargets(scale * p99_ttft_ms(alone) / 1e3, scale * p99_itl_ms(alone) / 1e3)


def offline_per_s(result: SimulationResult) -> float:
    """Return prompt and output tokens a second of the offline requests."""
    return result.offline_throughput.total_tokens_per_s


FIGURES = ("P99 TTFT ms", "P99 TBT ms", "offline tok/s", "recomputed %", "evictions", "suspensions")


def figures(result: SimulationResult) -> tuple[object, ...]:
    """Return the cells below ``FIGURES``."""
    counters = result.counters
    computed = counters.online_tokens + counters.offline_tokens
    return (
        p99_ttft_ms(result),
        p99_itl_ms(result),
        offline_per_s(result),
        100 * result.recomputed_tokens / computed,
        counters.evictions,
        counters.suspensions,
    )
