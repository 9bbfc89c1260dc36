"""Streams beside offline work keep half of their speed (simulated)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from sglang_coserve.core.control.objective import Objective
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.simulator.assemble import SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.run import SimulationSetup
from simulator.engines import online

STREAMS = 8
SPARED = 2
"""The first gap of a stream may hold the prompts of the others."""


def served(objective: Objective, *, overlap: bool, offline: str) -> tuple[list[list[float]], int]:
    """Gaps of streams that all begin at once, and the tokens of offline requests meanwhile."""
    setup = SimulationSetup(
        SimulatedMachine.named("llama-3.1-8b", "h100").roofline(),
        ExecutorConfig(kv_capacity_tokens=400_000, overlap=overlap),
        slos=objective.slos,
        scheduler=SchedulerConfig(stream_slowdown=objective.stream_slowdown),
    )
    streams = [online(f"s{number}", 200, 300 + 20 * number) for number in range(STREAMS)]
    backlog = offline_requests(offline, max_context_tokens=100_000)()
    engine = setup.make_engine(make_policy("coserve"), TrafficSource([streams], backlog, 64))
    while not all(stream.is_complete for stream in streams):
        assert engine.step(math.inf)
    gaps_s = [[after - at for at, after in pairwise(one.token_times_s)] for one in streams]
    return gaps_s, engine.counters.offline_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("online_slowdown", "stream_slowdown"),
    [(None, None), (None, 3.0), (100.0, 0.5), (100.0, 1.0), (100.0, 3.0)],
)
def test_no_gap_exceeds_the_pace_while_no_prompt_comes(
    online_slowdown: float | None, stream_slowdown: float | None, overlap: bool
) -> None:
    """Gaps are twice as long as alone by default, and shorter where arrivals may not wait."""
    objective = Objective.of("coserve", (), online_slowdown, stream_slowdown)
    alone, _ = served(objective, overlap=overlap, offline="none")
    beside, tokens = served(objective, overlap=overlap, offline="2048x128")
    most = 1 + (1.0 if stream_slowdown is None else stream_slowdown)
    for alone_s, beside_s in zip(alone, beside, strict=True):
        pairs = list(zip(alone_s, beside_s, strict=True))[SPARED:]
        assert max(gap_s / one_s for one_s, gap_s in pairs) <= most * 1.02
    assert tokens > 10_000
    # A step of 30 ms has 95% of the highest throughput already, so it gets no longer.
    if online_slowdown is not None and most <= 2:
        mean = sum(map(sum, beside)) / sum(map(sum, alone))
        assert mean > 1 + 0.8 * (most - 1), "offline work uses the time that it may have"
