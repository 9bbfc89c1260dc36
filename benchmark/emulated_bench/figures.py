"""From what a run brought to its figures, and what was possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bound_bench.upper_bound import Capacity, OfflineShape, cached_tokens, offline_bound, required
from interference_bench.load import Load
from interference_bench.outcome import RunOutcome
from interference_bench.report import figures, in_ms, percentiles_ms
from sglang_coserve.core.control.baseline import Baseline, BaselineRequest, EngineSize
from sglang_coserve.metrics import SloTargets, attainment, latency_report
from sglang_coserve.srt.emulation.model_directory import flag_defaults
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.workload.trace import TraceRequest

_LATE_SHARE = 0.01
"""Of the requests, whose targets are P99s."""

_ENDED_SHARE = 0.9
"""Of requests that came at once: the last ones end in batches that are not full."""


def full_rate_per_s(emulation: Emulation, requests: Sequence[TraceRequest]) -> float:
    """Return the rate at which requests end that all come at once, in SGLang's own order.

    By the latency model, on an engine that has nothing else to do, and keeps every prefix.
    """
    baseline: Baseline[BaselineRequest] = Baseline(EngineSize(*_limits(emulation)))
    seen: set[int] = set()
    alone = []
    for request in requests:
        tokens = request.prompt_tokens - cached_tokens(request, seen)
        one = BaselineRequest(
            arrival_s=0.0, prompt_left_tokens=tokens, known_tokens=request.output_tokens
        )
        alone.append(one)
        baseline.arrived(one)
        baseline.ended(one)
    baseline.advance(emulation.latency_model().predict, math.inf)
    count = int(_ENDED_SHARE * len(requests))
    return count / sorted(one.last_s for one in alone)[count - 1]


def row(outcome: RunOutcome, targets: Mapping[str, SloTargets]) -> dict[str, Any]:
    """Return the figures of one run; ``targets`` by what the share that keeps them is called."""
    latencies = latency_report(outcome.online)
    return {
        **figures(outcome),
        **percentiles_ms("tpot", latencies.tpot),
        "e2e_p50_ms": in_ms(latencies.e2e.p50_s),
        "normalized_ms": in_ms(latencies.normalized.mean_s),
        "seconds": outcome.seconds,
        "steps": outcome.num_steps,
        "host_ms_per_step": 1e3 * outcome.host_s / max(1, outcome.num_steps),
        "suspended": outcome.num_suspended,
        "retracted": outcome.num_retracted,
        "preemptions_per_online_request": (outcome.num_suspended + outcome.num_retracted)
        / max(1, len(outcome.online)),
        "online_from_cache": outcome.online_from_cache,
        "from_prefixes": outcome.from_prefixes,
        "recomputed": outcome.recomputed,
        "attained": {name: attainment(outcome.online, kept) for name, kept in targets.items()},
    }


def bound_per_s(
    emulation: Emulation, requests: Sequence[TraceRequest], load: Load, targets: SloTargets
) -> float:
    """Return the most offline tokens/s beside this online load if it went on for ever."""
    capacity = Capacity(*_limits(emulation))
    offline = OfflineShape(load.offline_prompt_tokens, load.offline_output_tokens)
    online = required(requests, targets, late_share=_LATE_SHARE)
    return offline_bound(emulation.latency_model(), capacity, offline, online, load.seconds)


def _limits(emulation: Emulation) -> tuple[int, int, int]:
    """Return the most tokens of a batch, requests, and tokens of KV."""
    flags = flag_defaults(emulation)
    names = ("chunked_prefill_size", "max_running_requests", "max_total_tokens")
    batch_tokens, requests, kv_tokens = (int(flags[name]) for name in names)
    return batch_tokens, requests, kv_tokens
