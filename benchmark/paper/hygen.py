"""HyGen Fig. 6 and 15: prefix sharing maximization (PSM), and what is left beside online load.

Llama-2-7B on an A100 of 40 GB, Azure's conversation trace sampled to a rate (§5.1).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from paper.experiment import Cell, Findings
from paper.testbed import (
    Lengths,
    Requests,
    Testbed,
    azure_online,
    offline_backlog,
    offline_per_s,
    p99_itl_ms,
)
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policies.hygen import HygenPolicy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.run import Workload, simulate
from sglang_coserve.workload.trace import TraceRequest

TESTBED: Final = Testbed(model="llama-2-7b", hardware="a100", kv_capacity_tokens=42_000)
"""KV of 40 GB: 90% less 13.5 GB of weights, at 512 KiB a token."""

OFFLINE: Final = Lengths(2000, 4000, 128, 256)
SUBJECTS, SHARED_TOKENS, QUESTION_TOKENS = 57, 512, (64, 192)


def mmlu_like() -> Requests:
    """Return 100,000 shuffled questions of 57 subjects, each with the subject's five examples."""
    rng = random.Random(3)
    trace = [
        TraceRequest(
            index, 0.0, SHARED_TOKENS + rng.randint(*QUESTION_TOKENS), 2, (rng.randrange(SUBJECTS),)
        )
        for index in range(100_000)
    ]
    return partial(from_trace, trace, RequestClass.OFFLINE)


def fig6(seconds: float) -> Iterator[Findings]:
    """Prefix sharing maximization (PSM) on MMLU-like offline requests.

    The paper computed its figure too: it deducts from each prompt what it shares with the one
    before it. So PSM is compared with arrival order under that rule (here: no prefix cache, for
    neighbours hardly ever share), and, beyond the paper, with arrival order under a real one.
    """
    orders = {
        "arrival order, nothing shared": (False, 0.0),
        "arrival order, prefix cache": (True, 0.0),
        "PSM with freshness (0.95)": (True, 0.95),
        "PSM": (True, 1.0),
    }
    rows: list[tuple[Cell, ...]] = []
    gains = []
    for qps in (0.5, 1.0, 2.0):
        online = azure_online(qps, seconds)
        load = Workload(online, mmlu_like(), 5_000, interval_s=seconds)
        alone = simulate(load, TESTBED.with_targets(), OnlineOnlyPolicy())
        targets = SloTargets(tpot_s=1.5 * p99_itl_ms(alone) / 1e3)
        per_s: list[float] = []
        for name, (is_shared, utility) in orders.items():
            setup = replace(TESTBED, prefix_cache=is_shared).with_targets(targets)
            result = simulate(load, setup, HygenPolicy(utility_ratio=utility))
            per_s.append(result.offline_throughput.requests_per_s)
            gain = per_s[-1] / per_s[0]
            rows.append((f"{qps:g} QPS, {name}", per_s[-1], f"{gain:.2f}x", p99_itl_ms(result)))
        gains.append(gain)
    yield Findings(
        "Fig. 6",
        ("online, order", "offline req/s", "gain", "P99 TBT ms"),
        rows,
        [("offline throughput by PSM, up to", "4x", f"{max(gains):.2f}x")],
    )


def fig15(seconds: float) -> Iterator[Findings]:
    """Offline throughput over the online load, with two bounds on the P99 gap.

    The paper's is relative to online requests alone. The other one is the same at every load.
    """
    rows: list[tuple[Cell, ...]] = []
    for qps in (0.5, 1.0, 2.0, 3.0, 4.0):
        load = Workload(
            azure_online(qps, seconds), offline_backlog(partial(OFFLINE.draws, 7)), 256, seconds
        )
        alone_ms = p99_itl_ms(simulate(load, TESTBED.with_targets(), OnlineOnlyPolicy()))
        for name, limit_ms in (("+5%", 1.05 * alone_ms), ("40 ms", 40.0)):
            targets = SloTargets(tpot_s=limit_ms / 1e3)
            result = simulate(load, TESTBED.with_targets(targets), HygenPolicy())
            rows.append(
                (f"{qps:g} QPS, {name}", limit_ms, p99_itl_ms(result), offline_per_s(result))
            )
    yield Findings("Fig. 15", ("load, bound", "bound ms", "P99 TBT ms", "offline tok/s"), rows)
