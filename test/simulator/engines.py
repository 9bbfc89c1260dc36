"""Builders that let a simulator test read as a scenario."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.latency_model.linear import CONSERVE, LinearModel
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.offline_queue import OfflineQueue, pack_tokens
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets
from sglang_coserve.simulator.binding import TrafficSource
from sglang_coserve.simulator.engine import SimEngine
from sglang_coserve.simulator.executor import SimulatedExecutor
from sglang_coserve.simulator.executor_config import ExecutorConfig
from sglang_coserve.simulator.observer import SimulationObserver
from sglang_coserve.simulator.request import SimRequest

MS_PER_TOKEN = LinearModel.of(CONSERVE, compute_token_s=1e-3)
"""An step takes one millisecond a token, nothing else."""

_serials = itertools.count()


def sim_request(
    rid: str,
    request_class: RequestClass,
    prompt: int | list[int],
    output_tokens: int,
    arrival_s: float = 0.0,
) -> SimRequest:
    """A request with the given token ids, or with so many that no other has."""
    serial = next(_serials) if isinstance(prompt, int) else 0
    token_ids = [serial * 100_003 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    info = RequestInfo(rid, request_class, len(token_ids), output_tokens, arrival_s)
    return SimRequest(info, output_tokens, lambda: pack_tokens(token_ids), serial)


def online(
    rid: str, prompt: int | list[int], output_tokens: int, arrival_s: float = 0.0
) -> SimRequest:
    return sim_request(rid, RequestClass.ONLINE, prompt, output_tokens, arrival_s)


def offline(
    rid: str, prompt: int | list[int], output_tokens: int, arrival_s: float = 0.0
) -> SimRequest:
    return sim_request(rid, RequestClass.OFFLINE, prompt, output_tokens, arrival_s)


def engine_of(
    *requests: SimRequest,
    policy: str = "conserve",
    targets: SloTargets | None = None,
    config: ExecutorConfig | None = None,
    model: LatencyModel = MS_PER_TOKEN,
    scheduler_config: SchedulerConfig | None = None,
    observers: Sequence[SimulationObserver] = (),
) -> tuple[SimEngine, SimulatedExecutor]:
    """An engine, and its executor, before these requests arrive."""
    targets = targets or SloTargets()
    config = config or ExecutorConfig(kv_capacity_tokens=10_000, page_tokens=1)
    executor = SimulatedExecutor(config, model)
    chosen = make_policy(policy, scheduler_config)
    scheduler = Scheduler(
        chosen, model, deadlines(targets), OfflineQueue(chosen.queue_config(0)), scheduler_config
    )
    ordered = sorted(requests, key=lambda request: request.info.arrival_s)
    return SimEngine(scheduler, executor, TrafficSource([ordered]), observers), executor


def run_out(engine: SimEngine, executor: SimulatedExecutor) -> None:
    """Step until nothing is left, checking the invariants between the steps."""
    while engine.step():
        executor.check_invariants()
