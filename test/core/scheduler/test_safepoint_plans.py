"""What safepoints change in a plan: longer offline iterations, and none beside a late arrival."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from core.scheduler.scenarios import MODEL, NO_CACHE, online, queued, scheduler, snapshot
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.preemption import Reason, decide
from sglang_coserve.core.request import RequestState
from sglang_coserve.metrics import SloTargets

DECODING = RequestState.DECODING


def predicted_s(share: float, *rows: object, **config: object) -> float:
    core = scheduler("coserve", queued(8000), **config)
    seen = replace(snapshot(*rows), arrival_wait_share=share)  # type: ignore[arg-type]
    return core.plan(seen, NO_CACHE).predicted_s


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_an_iteration_that_can_be_aborted_may_be_longer(share: float) -> None:
    assert predicted_s(share, arrival_wait_s=0.05) == pytest.approx(0.05 / share, rel=0.01)


@pytest.mark.parametrize("state", [DECODING, RequestState.WAITING])
def test_an_iteration_with_online_rows_that_start_over_may_not(state: RequestState) -> None:
    rows = [online(100, state)]
    whole = predicted_s(1.0, *rows, arrival_wait_s=0.05)
    assert predicted_s(0.25, *rows, arrival_wait_s=0.05) == whole


def test_an_iteration_with_online_decodes_that_go_on_may_be_longer() -> None:
    core = scheduler("coserve", queued(8000), arrival_wait_s=0.02)
    for state, longest_s in ((DECODING, 0.08), (RequestState.WAITING, 0.02)):
        seen = snapshot(online(50, state))
        plan = core.plan(replace(seen, mixed_arrival_wait_share=0.25), NO_CACHE)
        assert plan.predicted_s == pytest.approx(longest_s, rel=0.01)
        assert plan.arrival_wait_s == 0.02


def test_only_a_policy_that_bounds_an_arrivals_wait_lets_it_abort_for_more() -> None:
    """ConServe's own rule knows the TTFT target only."""
    core = scheduler("conserve", queued(8000), arrival_wait_s=0.02)
    assert core.plan(snapshot(online(100, DECODING)), NO_CACHE).arrival_wait_s == math.inf


def test_without_a_target_nothing_bounds_it_either_way() -> None:
    targets = SloTargets(ttft_s=None, tpot_s=None)
    assert predicted_s(0.25, targets=targets) == predicted_s(1.0, targets=targets)


def test_a_late_arrival_has_the_iteration_after_an_abort_to_itself() -> None:
    core = scheduler("coserve", queued(8000), targets=SloTargets(ttft_s=0.05, tpot_s=None))
    late = online(300, arrival_s=-0.03)
    plan = core.plan(replace(snapshot(late), arrival_wait_share=0.25), NO_CACHE)
    assert [chunk.rid for chunk in plan.prefills] == [late.info.rid]


def test_online_rows_that_start_over_count_in_full() -> None:
    """50 ms are left of the batch, and its online part alone would take as long."""
    rest = BatchStats.of(prefills=[(400, 0)])
    whole = rest.with_prefill(1000, 0)
    elapsed_s = MODEL.predict(whole) - MODEL.predict(rest)
    arguments = (MODEL, whole, rest, elapsed_s, BatchStats.of(prefills=[(10, 0)]), 0.01)
    assert decide(*arguments).reason is Reason.LATE
    assert decide(*arguments, restarts_online=True).reason is Reason.LATE_ANYWAY
