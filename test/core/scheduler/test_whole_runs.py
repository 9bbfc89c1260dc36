"""Runs from the first arrival to the last token."""

from __future__ import annotations

import random

import pytest

from core.scheduler.scenarios import MODEL
from core.scheduler.tiny_engine import TinyEngine
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.offline_queue import (
    OfflineQueue,
    OfflineQueueConfig,
    QueuedRequest,
    pack_tokens,
)
from sglang_coserve.core.policies import POLICIES, make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import StepPlan
from sglang_coserve.metrics import SloTargets

TARGETS = SloTargets(ttft_s=0.5, tpot_s=0.05)


def engine_of(
    policy: str, queue: OfflineQueueConfig | None = None, **settings: object
) -> TinyEngine:
    made = make_policy(policy)
    config = SchedulerConfig(**settings)  # type: ignore[arg-type]
    waiting = OfflineQueue(queue or made.queue_config())
    brain = Scheduler(made, MODEL, deadlines(TARGETS), waiting, config)
    return TinyEngine(brain, MODEL, kv_tokens=2000, page_tokens=16, slots=16, max_batch_tokens=512)


def arrive(
    engine: TinyEngine,
    request_class: RequestClass,
    prompt_tokens: int,
    new_tokens: int,
    *,
    prefix: int = 0,
) -> str:
    rid = f"{request_class.value}-{len(engine.requests)}"
    engine.arrive(RequestInfo(rid, request_class, prompt_tokens, new_tokens, engine.now_s))
    if request_class is RequestClass.OFFLINE:
        prompt = pack_tokens([prefix] * (prompt_tokens - 1) + [len(engine.requests)])
        engine.scheduler.add_offline(QueuedRequest(rid, prompt, engine.now_s, new_tokens))
    return rid


def run_to_the_end(engine: TinyEngine, limit: int = 5000) -> None:
    for _ in range(limit):
        if len(engine.ended) == len(engine.requests):
            return
        engine.step()
    raise AssertionError(f"still running: {engine.requests.keys() - engine.ended.keys()}")


def busy_hour(policy: str, seed: int) -> list[StepPlan]:
    """Serve random traffic; return every plan."""
    rng = random.Random(seed)
    engine = engine_of(policy, seed=seed)
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            request_class = rng.choice(list(RequestClass))
            prompt_tokens, new_tokens = rng.randint(1, 600), rng.randint(1, 40)
            arrive(engine, request_class, prompt_tokens, new_tokens)
        engine.step()
    if policy != "online_only":
        run_to_the_end(engine)
    return engine.log


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_give_the_same_plans(policy: str) -> None:
    first = busy_hour(policy, seed=1)
    assert first == busy_hour(policy, seed=1)
    assert first != busy_hour(policy, seed=2)


def test_a_burst_is_served_as_if_it_were_alone() -> None:
    """Offline work costs the online tokens nothing beyond their targets."""

    def token_times(num_offline: int) -> list[float]:
        engine = engine_of("coserve")
        for _ in range(num_offline):
            arrive(engine, RequestClass.OFFLINE, 100, 200)
        for _ in range(5):
            engine.step()
        start_s = engine.now_s
        rids = [arrive(engine, RequestClass.ONLINE, 100, 10) for _ in range(4)]
        gaps = []
        while not engine.ended.keys() >= {*rids}:
            before_s = engine.now_s
            engine.step()
            gaps.append(engine.now_s - before_s)
        assert gaps[0] <= TARGETS.ttft_s  # type: ignore[operator]
        assert max(gaps[1:]) <= TARGETS.tpot_s  # type: ignore[operator]
        return [engine.now_s - start_s]

    assert token_times(0) < token_times(6)
