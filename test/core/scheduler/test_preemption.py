"""ConServe's Algorithm 2: abort the batch in flight, or wait for its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.scheduler.scenarios import MODEL
from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.preemption import Decision, Reason, decide

ONLINE = BatchStats.of(decodes=[100])
MIXED = ONLINE.with_prefill(1000, 0)
"""Takes 111 ms, of which 10 ms without the offline prompt."""
ARRIVED = BatchStats.of(prefills=[(200, 0)])
"""Takes 30 ms."""


def decision(elapsed_s: float, ttft_left_s: float | None, **changes: object) -> Decision:
    arguments = {"in_flight": MIXED, "in_flight_online": ONLINE, "safepoint_s": 0.0} | changes
    safepoint_s = arguments.pop("safepoint_s")
    return decide(
        MODEL,
        elapsed_s=elapsed_s,
        arrived=ARRIVED,
        ttft_left_s=ttft_left_s,
        safepoint_s=safepoint_s,
        **arguments,
    )


def test_a_batch_that_would_make_it_late_is_aborted() -> None:
    assert decision(0.0, 0.1) == Decision(True, Reason.LATE, decision(0.0, 0.1).first_token_s)


def test_a_batch_that_ends_in_time_goes_on() -> None:
    answer = decision(0.0, 0.2)
    assert (answer.abort, answer.reason) == (False, Reason.IN_TIME)
    assert answer.first_token_s == MODEL.predict(MIXED) + MODEL.predict(ARRIVED)


def test_a_batch_that_keeps_an_arrival_longer_than_planned_is_aborted() -> None:
    """It ends in 51 ms; its first token would be in time either way."""
    for wait_s, reason in ((0.05, Reason.LONG_WAIT), (0.052, Reason.IN_TIME)):
        answer = decision(0.06, 0.2, arrival_wait_s=wait_s)
        assert (answer.abort, answer.reason) == (reason is Reason.LONG_WAIT, reason)


def test_what_has_passed_counts() -> None:
    assert not decision(0.06, 0.1).abort


def test_online_work_alone_is_never_aborted() -> None:
    assert decision(0.0, 0.0, in_flight=ONLINE).reason is Reason.NO_OFFLINE_WORK


def test_without_a_target_nothing_is_aborted() -> None:
    assert decision(0.0, None).reason is Reason.NO_TARGET


def test_a_batch_that_is_nearly_done_is_not_thrown_away() -> None:
    """2 ms are left, and the next safepoint is 3 ms away."""
    elapsed_s = MODEL.predict(MIXED) - 0.002
    answer = decision(elapsed_s, 0.01, safepoint_s=0.003)
    assert (answer.abort, answer.reason) == (False, Reason.LATE_ANYWAY)
    assert decision(elapsed_s, 0.01, safepoint_s=0.001).abort


def test_an_overdue_batch_has_nothing_left_to_wait_for() -> None:
    answer = decision(9.0, 0.01)
    assert not answer.abort
    assert answer.first_token_s == MODEL.predict(ARRIVED)


@given(
    elapsed_s=st.floats(0, 0.2),
    ttft_left_s=st.floats(-1, 1),
    safepoint_s=st.floats(0, 0.05),
    more=st.integers(1, 5000),
)
def test_abort_is_the_papers_condition_and_of_use(
    elapsed_s: float, ttft_left_s: float, safepoint_s: float, more: int
) -> None:
    in_flight = ONLINE.with_prefill(more, 0)
    answer = decision(elapsed_s, ttft_left_s, safepoint_s=safepoint_s, in_flight=in_flight)
    remaining_s = max(MODEL.predict(in_flight) - elapsed_s, 0)
    papers = remaining_s + MODEL.predict(ARRIVED) > ttft_left_s
    saved_s = remaining_s * (1 - MODEL.predict(ONLINE) / MODEL.predict(in_flight))
    assert answer.abort == (papers and saved_s > safepoint_s)
    assert answer.first_token_s == remaining_s + MODEL.predict(ARRIVED)
