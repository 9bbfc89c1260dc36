"""With many online requests waiting, a pass looks only at those that it may take."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from core.scheduler.scenarios import NO_CACHE, online, queued, scheduler, snapshot
from sglang_coserve.core.request import RequestState
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.snapshots import WaitingRequests

_MANY = 5000


class Waiting:
    """A waiting request, as far as a pass looks at it; counts how often it is looked at."""

    def __init__(self, number: int, looks: Counter[str]) -> None:
        self._rid = f"r{number}"
        self._number = number
        self._looks = looks
        self.origin_input_ids = [0] * 100
        self.sampling_params = SamplingParams(max_new_tokens=4)

    def __getattr__(self, name: str) -> None:
        """No other feature is used."""

    @property
    def rid(self) -> str:
        self._looks["rid"] += 1
        return self._rid

    @property
    def output_ids(self) -> list[int]:
        self._looks["output"] += 1
        return []

    @property
    def time_stats(self) -> Any:
        self._looks["time"] += 1
        return SimpleNamespace(wait_queue_entry_time=float(self._number))


@pytest.fixture
def looks() -> Counter[str]:
    return Counter()


@pytest.fixture
def queue(looks: Counter[str]) -> list[Any]:
    return [Waiting(number, looks) for number in range(_MANY)]


def test_a_plan_describes_the_requests_that_fit_a_step(
    queue: list[Any], looks: Counter[str]
) -> None:
    requests = EngineRequests()
    for req in queue:
        requests.add(req, 0.0)
    looks.clear()
    waiting = WaitingRequests(requests, queue, lambda _: 0)
    seen = replace(snapshot(max_batch_tokens=1000), waiting=waiting)
    plan = scheduler("coserve").plan(seen, NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills][:2] == ["r0", "r1"]
    assert 0 < looks["output"] < 20
    assert [request.info.rid for request in waiting[-2:]] == ["r4998", "r4999"]


@pytest.mark.parametrize("free_kv_tokens", [100_000, 50])
def test_a_plan_beside_decodes_does_not_look_through_a_queue_that_may_wait(
    queue: list[Any], looks: Counter[str], free_kv_tokens: int
) -> None:
    requests = EngineRequests()
    for req in queue:
        requests.add(req, 0.0)
    looks.clear()
    decodes = [online(state=RequestState.DECODING) for _ in range(8)]
    seen = snapshot(*decodes, max_batch_tokens=1000, free_kv_tokens=free_kv_tokens)
    seen = replace(seen, waiting=WaitingRequests(requests, queue, lambda _: 0))
    targets = SloTargets(ttft_s=1e6, tpot_s=0.1)  # A step of prompts takes longer.
    plan = scheduler("coserve", queued(), targets=targets).plan(seen, NO_CACHE)
    assert not plan.skips_decodes
    assert plan.batch.decode_requests == len(decodes)
    assert 0 < looks["output"] < 30


def test_the_queue_is_searched_no_further_than_what_was_chosen(
    queue: list[Any], looks: Counter[str]
) -> None:
    scheduler = SimpleNamespace(waiting_queue=list(queue))
    queues = EngineQueues(scheduler)
    queues.offer(["r9", "r3"], [])
    assert scheduler.waiting_queue == [queue[9], queue[3]]
    scheduler.waiting_queue.remove(queue[3])  # Admitted.
    assert queues.withdraw() == []
    assert scheduler.waiting_queue == [*queue[:3], *queue[4:]]
    assert looks.total() < 100


def test_an_abort_looks_at_no_other_request_that_waits(
    queue: list[Any], looks: Counter[str]
) -> None:
    scheduler = SimpleNamespace(waiting_queue=queue)
    queues, req = EngineQueues(scheduler), queue[3000]
    with queues.showing_only(req):
        assert scheduler.waiting_queue == [req]
        scheduler.waiting_queue = []
    assert len(queues.waiting) == _MANY - 1
    with queues.showing_only(req):
        assert not scheduler.waiting_queue
    assert len(queues.waiting) == _MANY - 1
    assert not looks
