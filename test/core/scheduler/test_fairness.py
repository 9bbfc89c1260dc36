"""The Virtual Token Counter: whoever was served least is next."""

from __future__ import annotations

from core.scheduler.scenarios import NO_CACHE, online, ran, scheduler, snapshot
from sglang_coserve.core.fairness import VirtualTokenCounter
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import OnlineOrder
from sglang_coserve.core.snapshot import Request
from sglang_coserve.core.step import PrefillChunk, ServedRequest, StepResult
from sglang_coserve.metrics import SloTargets


def fair() -> Scheduler:
    """One prompt of 100 tokens a step, without targets."""
    return scheduler(
        "coserve", targets=SloTargets(), online_order=OnlineOrder.VTC, iteration_budget_s=10.0
    )


def prompts(user: str, count: int, tokens: int = 100) -> list[Request]:
    return [online(tokens, user=user, rid=f"{user}-{number}") for number in range(count)]


def served(brain: Scheduler, *waiting: Request, tokens: int = 100) -> list[str]:
    """Run one step; return who is served."""
    seen = snapshot(*waiting, max_batch_tokens=tokens)
    plan = brain.plan(seen, NO_CACHE)
    ran(brain, plan, seen)
    return [chunk.rid for chunk in plan.prefills]


def test_users_take_turns_though_one_sent_far_more() -> None:
    requests = [*prompts("greedy", 5), *prompts("modest", 2)]
    brain, order = fair(), []
    while requests:
        (rid,) = served(brain, *requests)
        order.append(rid)
        requests = [request for request in requests if request.info.rid != rid]
    assert order == [
        "greedy-0",
        "modest-0",
        "greedy-1",
        "modest-1",
        "greedy-2",
        "greedy-3",
        "greedy-4",
    ]


def test_turns_are_taken_within_an_iteration_too() -> None:
    requests = [*prompts("greedy", 3), *prompts("modest", 1)]
    assert served(fair(), *requests, tokens=400) == ["greedy-0", "modest-0", "greedy-1", "greedy-2"]


def test_short_prompts_get_more_turns() -> None:
    requests = [*prompts("long", 2, 300), *prompts("short", 3, 100)]
    assert served(fair(), *requests, tokens=900) == [
        "long-0",
        "short-0",
        "short-1",
        "short-2",
        "long-1",
    ]


def test_output_counts_twice() -> None:
    """Ten decodes of one user weigh as much as 20 tokens of prompt."""
    brain = fair()
    decodes = [online(10, RequestState.DECODING, user="talks") for _ in range(10)]
    seen = snapshot(*decodes)
    ran(brain, brain.plan(seen, NO_CACHE), seen)
    requests = [*prompts("talks", 1), *prompts("quiet", 2, 15)]
    # The quiet user has 0, then 17 of 20 that the other already got.
    assert served(brain, *requests, tokens=130) == ["quiet-0", "quiet-1", "talks-0"]


def test_idling_saves_up_nothing() -> None:
    brain = fair()
    requests = prompts("steady", 10)
    for _ in range(6):
        requests = requests[len(served(brain, *requests)) :]
    back = prompts("back", 4)
    first, second, third = (served(brain, *requests, *back)[0] for _ in range(3))
    assert "back-0" in (first, second), "it has its turn"
    assert {first, second, third} & {request.info.rid for request in requests}, (
        "but not all of them"
    )


def test_a_plan_that_is_dropped_counts_for_nobody() -> None:
    brain = fair()
    requests = [*prompts("a", 1), *prompts("b", 1)]
    for _ in range(3):
        plan = brain.plan(snapshot(*requests, max_batch_tokens=100), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == ["a-0"]


def test_requests_without_a_user_share_one_counter() -> None:
    requests = [online(100, rid="x"), online(100, rid="y"), *prompts("named", 1)]
    assert served(fair(), *requests, tokens=300) == ["x", "named-0", "y"]


def test_users_who_name_themselves_take_no_memory_without_bound() -> None:
    """Those who were served least are forgotten; who comes back has no advantage of it."""
    counter = VirtualTokenCounter()

    def serve(user: str, tokens: int) -> None:
        request = online(tokens, user=user)
        chunk = PrefillChunk(request.info.rid, tokens)
        served = (ServedRequest(request.info, None, None),)
        counter.served(StepResult(None, 0.0, chunks=(chunk,), served=served))

    serve("flood", 1_000_000)
    for number in range(40_000):
        serve(f"once-{number}", 100)
    assert len(counter.counters) <= 1 << 14
    assert counter.counters["flood"] == 1_000_000
    serve("once-0", 1)
    assert counter.counters["once-0"] > 100
