"""What HyGen's reviewers ask: fairness over a day, load near the peak, lengths, profiles.

A day of the offline queue alone; ``coserve`` with Llama-3.1-8B on an H100, at most 500 and 70 ms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from paper.conserve import DATASETS, FULL, GIVEN, rows, workload
from paper.experiment import Cell, Findings
from paper.testbed import mixed, offline_backlog
from sglang_coserve.core.offline_queue import OfflineQueue, OfflineQueueConfig, QueuedRequest
from sglang_coserve.core.offline_queue.request import pack_tokens
from sglang_coserve.core.policies.baselines import OnlineOnlyPolicy
from sglang_coserve.core.policies.coserve import CoservePolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.simulator.run import SimulationSetup, Workload, simulate

DAY_S: Final = 86_400
COLUMNS: Final = ("run", "P99 TTFT ms", "P99 TBT ms", "offline tok/s", "recomputed %", "retracted")

Runs = Mapping[str, tuple[Workload, SimulationSetup, type[Policy]]]


def questions(seconds: float) -> Iterator[Findings]:
    """One table for each question; the day has its own length."""
    orders: dict[str, tuple[float, int | None]] = {
        "arrival": (0.0, 64),
        "u = 0.95": (0.95, 64),
        "u = 1": (1.0, 64),
        "u = 1, no bound on overtakes": (1.0, None),
    }
    yield Findings(
        "A day: 57 prefixes, 10 of them rare",
        ("order", "wait P50 s", "P99", "longest", "longest, rare", "like the one before %"),
        [(name, *day(*order)) for name, order in orders.items()],
    )
    setup, other = FULL.with_targets(GIVEN), replace(FULL, hardware="a100").machine.roofline()
    wrong = replace(setup, model=other, true_model=setup.model)
    refined = replace(wrong, scheduler=SchedulerConfig(refine=True))
    busy = workload(3.0, seconds)
    limited = replace(
        busy, offline=offline_backlog(partial(mixed, tuple(DATASETS.values()), 2), 16_384)
    )
    rates = (3.0, 4.0, 4.5, 5.0)
    runs = {f"{rate:g} req/s": (workload(rate, seconds), setup, CoservePolicy) for rate in rates}
    alone = {f"{name}, alone": (*one[:2], OnlineOnlyPolicy) for name, one in runs.items()}
    tables: dict[str, Runs] = {
        "Load near the peak": {**alone, **runs},
        "Output lengths of offline requests, 3 req/s": {
            "the limit is the length": (busy, setup, CoservePolicy),
            "the limit is 16,384": (limited, setup, CoservePolicy),
        },
        "Profile, 3 req/s": {
            "this GPU's": (busy, setup, CoservePolicy),
            "an A100's, corrected while it serves": (busy, refined, CoservePolicy),
            "an A100's": (busy, wrong, CoservePolicy),
        },
    }
    for title, of_table in tables.items():
        results = {
            name: simulate(load, on, policy()) for name, (load, on, policy) in of_table.items()
        }
        yield Findings(title, COLUMNS, [row[:-1] for row in rows(results)])


def day(utility_ratio: float, max_overtakes: int | None) -> tuple[Cell, ...]:
    """Serve a request every 0.98 s; by day up to 1.5 a second come, by night half a one."""
    config = OfflineQueueConfig(utility_ratio=utility_ratio, max_overtakes=max_overtakes)
    rng, queue, at_s, now_s, last = random.Random(5), OfflineQueue(config), 0.0, 0.0, 0
    prefixes: list[int] = []
    waits: list[tuple[float, int]] = []
    num_alike = 0
    while now_s < DAY_S:
        while at_s <= now_s or not len(queue):
            now_s, rid = max(now_s, at_s), str(len(prefixes))
            prefixes.append(47 + rng.randrange(10) if rng.random() < 0.01 else rng.randrange(47))
            tokens = pack_tokens([*[prefixes[-1]] * 4, len(prefixes)])
            queue.add(QueuedRequest(rid, tokens, at_s, 1))
            at_s += rng.expovariate(1 + math.sin(math.tau * at_s / DAY_S) / 2)
        request = queue.peek(now_s)
        assert request is not None
        queue.take(request.rid)
        queue.remove(request.rid)
        prefix = prefixes[int(request.rid)]
        waits.append((now_s - request.arrival_s, prefix))
        num_alike += prefix == last
        last, now_s = prefix, now_s + 0.98
    waits.sort()
    p50, p99, longest = (waits[int(len(waits) * q)][0] for q in (0.5, 0.99, 1 - 1e-9))
    rare = max(wait_s for wait_s, prefix in waits if prefix >= 47)
    return p50, p99, longest, rare, 100 * num_alike / len(waits)
