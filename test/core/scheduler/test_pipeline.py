"""Plans and their results where the steps of several micro-batches are under way together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.scheduler.policy_exceptions import LATENCY_POLICIES
from core.scheduler.scenarios import MODEL, NO_CACHE, offline, online, queued, scheduler, snapshot
from sglang_coserve.core.learned_model import pipelined
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import EngineSnapshot, Request
from sglang_coserve.core.step import StepResult
from sglang_coserve.core.step_stats import StepStats

DECODING = RequestState.DECODING


def batch(tokens: int) -> StepStats:
    return StepStats.of([(tokens, 0)])


def predict(stats: StepStats) -> float:
    return float(stats.prefill_tokens)


def around(
    requests: Sequence[Request], *own: Request, free_kv_tokens: int = 100_000
) -> EngineSnapshot:
    """An engine with ``requests`` in another micro-batch."""
    return replace(snapshot(*own, free_kv_tokens=free_kv_tokens), elsewhere=tuple(requests))


# --- How long a step takes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "own", "after", "seconds", "is_slowest"),
    [
        ([], 8, [], 8, True),
        ([0], 8, [0], 8, True),
        ([8], 8, [8], 8, True),
        ([10], 8, [2], 9, False),
        ([10], 8, [20], 15, False),
        ([4, 6], 3, [0, 9], (6 + 6 + 9) / 3, False),
        ([1, 1], 3, [2, 2], 3, True),
    ],
)
def test_all_batches_move_on_at_the_pace_of_the_slowest(
    before: list[int], own: int, after: list[int], seconds: float, is_slowest: bool
) -> None:
    beside = [batch(tokens) if tokens else StepStats() for tokens in (*before, *after)]
    assert pipelined(predict, batch(own), beside) == (pytest.approx(seconds), is_slowest)


def test_a_step_behind_a_slower_one_says_nothing_of_its_own_batch() -> None:
    """Predicted well with its neighbours, it leaves the model alone; the slowest refines it."""
    brain = scheduler("coserve", refine=True)
    quick, slow = batch(10), batch(1000)
    expected_s = (MODEL.predict(slow) + MODEL.predict(slow)) / 2
    for step in range(32):
        brain.update(StepResult(None, float(step), expected_s, quick, overlapping=(slow, slow)))
    assert brain.prediction_error.mape == pytest.approx(0)
    assert brain.model.predict(quick) == pytest.approx(MODEL.predict(quick))
    for step in range(32, 64):
        brain.update(
            StepResult(None, float(step), 2 * expected_s, slow, overlapping=(quick, quick))
        )
    assert brain.model.predict(slow) > 1.5 * MODEL.predict(slow)


# --- Online requests in other micro-batches -----------------------------------------------


@pytest.mark.parametrize("policy", LATENCY_POLICIES)
def test_their_target_bounds_offline_work(policy: str) -> None:
    """It would take as long as it likes, but for them."""
    brain = scheduler(policy, queued(8000))
    strict = [online(100, DECODING, tpot_s=0.05)]
    plan = brain.plan(around(strict), NO_CACHE)
    assert not plan.batch.is_empty
    assert plan.predicted_s <= 0.05
    assert brain.plan(around([]), NO_CACHE).predicted_s > 0.05


def test_they_find_kv_for_their_next_tokens() -> None:
    """Offline requests here give way for them: their own micro-batch could retract none."""
    brain = scheduler("coserve")
    mine = [offline(100) for _ in range(4)]
    theirs = [online(100, DECODING) for _ in range(3)]
    assert not brain.plan(around(theirs, *mine, free_kv_tokens=7), NO_CACHE).retract
    assert len(brain.plan(around(theirs, *mine, free_kv_tokens=2), NO_CACHE).retract) == 1
    assert brain.plan(around(theirs, free_kv_tokens=0), NO_CACHE).is_idle


def test_a_prompt_gets_the_kv_of_offline_requests_of_both_micro_batches() -> None:
    """Neither has enough; the one whose turn it is begins."""
    brain = scheduler("coserve")
    prompt, mine, theirs = online(150), offline(100), offline(100)
    first = brain.plan(around([theirs], prompt, mine, free_kv_tokens=10), NO_CACHE)
    assert [retraction.rid for retraction in first.retract] == [mine.info.rid]
    assert not first.prefills
    second = brain.plan(around([], prompt, theirs, free_kv_tokens=110), NO_CACHE)
    assert [chunk.rid for chunk in second.prefills] == [prompt.info.rid]
    enough = brain.plan(around([offline(30)], prompt, mine, free_kv_tokens=10), NO_CACHE)
    assert not enough.retract, "all of them together are too few"


def test_offline_requests_elsewhere_count_for_the_most_that_may_run() -> None:
    brain = scheduler("coserve", queued(50), max_offline_requests=2)
    assert brain.plan(around([offline()], offline()), NO_CACHE).prefills == ()
    assert len(brain.plan(around([], offline()), NO_CACHE).prefills) == 1
