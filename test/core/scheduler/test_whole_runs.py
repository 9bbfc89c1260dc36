"""Runs from the first arrival to the last token."""

from __future__ import annotations

from core.scheduler.scenarios import MODEL
from core.scheduler.tiny_engine import TinyEngine
from sglang_coserve.core.control.slo import deadlines
from sglang_coserve.core.offline_queue import (
    OfflineQueue,
    QueuedRequest,
    pack_tokens,
)
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

TARGETS = SloTargets(ttft_s=0.5, tpot_s=0.05)


def engine() -> TinyEngine:
    policy = make_policy("coserve")
    waiting = OfflineQueue(policy.queue_config())
    brain = Scheduler(policy, MODEL, deadlines(TARGETS), waiting, SchedulerConfig())
    return TinyEngine(brain, MODEL, kv_tokens=2000, page_tokens=16, slots=16, max_batch_tokens=512)


def arrive(
    engine: TinyEngine, request_class: RequestClass, prompt_tokens: int, new_tokens: int
) -> str:
    rid = f"{request_class.value}-{len(engine.requests)}"
    engine.arrive(RequestInfo(rid, request_class, prompt_tokens, new_tokens, engine.now_s))
    if request_class is RequestClass.OFFLINE:
        prompt = pack_tokens([0] * (prompt_tokens - 1) + [len(engine.requests)])
        engine.scheduler.add_offline(QueuedRequest(rid, prompt, engine.now_s, new_tokens))
    return rid


def test_a_burst_is_served_as_if_it_were_alone() -> None:
    """Offline work costs the online tokens nothing beyond their targets."""

    def token_times(num_offline: int) -> list[float]:
        served = engine()
        for _ in range(num_offline):
            arrive(served, RequestClass.OFFLINE, 100, 200)
        for _ in range(5):
            served.step()
        start_s = served.now_s
        rids = [arrive(served, RequestClass.ONLINE, 100, 10) for _ in range(4)]
        gaps = []
        while not served.ended.keys() >= {*rids}:
            before_s = served.now_s
            served.step()
            gaps.append(served.now_s - before_s)
        assert gaps[0] <= TARGETS.ttft_s  # type: ignore[operator]
        assert max(gaps[1:]) <= TARGETS.tpot_s  # type: ignore[operator]
        return [served.now_s - start_s]

    assert token_times(0) < token_times(6)
