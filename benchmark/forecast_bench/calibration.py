"""How often batches were complete before their P95, and how far off P50 was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from forecast_bench.batches import random_batches
from forecast_bench.feed import Feed, Judged
from sglang_coserve.batch.forecast_errors import FinishEstimate
from sglang_coserve.core.offline_rate import expected_tokens_per_s
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.workload import fit_to_context, read_trace, scale_rate, window

__all__ = ["calibrate", "summary"]


def calibrate(
    trace: Path,
    *,
    online_rate: float,
    mean_gap_s: float,
    until_s: float,
    seed: int,
    ttft_ms: float,
    tpot_ms: float,
) -> list[Judged]:
    """Serve a trace and batches beside it under ``coserve``; return the batches, as they end."""
    options = SimulationOptions(
        trace=trace,
        slo_ttft_ms=ttft_ms,
        slo_tpot_ms=tpot_ms,
        policy="coserve",
        noise=0.05,
        seed=seed,
    )
    setup = options.setup("coserve")
    in_time = window(scale_rate(read_trace(trace), online_rate), 0.0, until_s)
    online, _ = fit_to_context(in_time, options.max_context_tokens)
    executor = setup.executor
    feed = Feed(
        from_trace(online, RequestClass.ONLINE, seed=seed),
        random_batches(seed, mean_gap_s, until_s),
        expected_tokens_per_s(
            setup.model,
            kv_tokens=executor.kv_capacity_tokens,
            max_requests=executor.max_running_requests,
            chunk_tokens=executor.max_batch_tokens,
        ),
    )
    scheduler = setup.make_scheduler(make_policy("coserve"))
    engine = SimEngine(scheduler, SimulatedExecutor(executor, setup.model), feed, (feed,))
    feed.now_s = partial(getattr, engine, "now_s")
    while engine.step():
        pass
    return feed.judged


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the figures of one run; shares and errors are fractions."""
    return {
        "batches": len(judged),
        "median_duration_s": round(median(each.actual_s for each in judged), 2),
        "by_hour": _figures(judged, lambda each: each.finish),
        "by_last_minute": _figures(judged, lambda each: each.by_last_minute),
    }


def _figures(judged: Sequence[Judged], of: Callable[[Judged], FinishEstimate]) -> dict[str, float]:
    held = [each.actual_s <= of(each).p95_s for each in judged]
    errors = [abs(each.actual_s - of(each).p50_s) / each.actual_s for each in judged]
    widths = [of(each).p95_s / of(each).p50_s for each in judged]
    before_p50 = [each.actual_s <= of(each).p50_s for each in judged]
    return {
        "before_p95": round(sum(held) / len(held), 4),
        "before_p50": round(sum(before_p50) / len(held), 4),
        "median_abs_error_p50": round(median(errors), 4),
        "median_p95_over_p50": round(median(widths), 3),
        "geometric_mean_ratio": round(
            math.exp(sum(math.log(e.actual_s / e.forecast_s) for e in judged) / len(judged)), 3
        ),
    }
