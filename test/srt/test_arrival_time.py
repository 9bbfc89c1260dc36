"""What the scheduler is told of a request's arrival."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.marks.request_marks import arrival_s
from sglang_coserve.srt.tokenizer.client_presence import ArrivalTimeStats, OutputDelay

NOW_S = 1e6


def at_the_scheduler(stats: ArrivalTimeStats) -> Any:
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    return SchedulerReqTimeStats.new_from_obj(pickle.loads(pickle.dumps(stats)))


def new_request(delay: OutputDelay, created_s: float) -> ArrivalTimeStats:
    stats = delay.make_stats()
    stats.set_created_time(created_s)
    return stats


def state_of(stats: ArrivalTimeStats, *, streams: bool = True) -> SimpleNamespace:
    return SimpleNamespace(time_stats=stats, obj=SimpleNamespace(stream=streams))


def first_token(delay: OutputDelay, created_s: float, sent_s: float, seen_s: float) -> None:
    """A request whose first token the scheduler sent and the HTTP server saw then."""
    stats = new_request(delay, created_s)
    waiting = delay.without_token(["gone", "r"], {"r": state_of(stats)})
    # As SGLang does since 0.5.22; before, it set both to what is the later one here.
    stats.set_first_token_time(sent_s)
    stats.set_last_time(seen_s)
    scheduler_times = [SimpleNamespace(prefill_finished_time=time_s) for time_s in (0.0, sent_s)]
    delay.observe(waiting, scheduler_times)


def test_a_request_arrived_when_the_server_got_it() -> None:
    stats = at_the_scheduler(new_request(OutputDelay(), 10.0))
    assert arrival_s(SimpleNamespace(time_stats=stats), NOW_S) == pytest.approx(10.0, abs=0.01)


def test_the_way_of_first_tokens_makes_requests_arrive_earlier() -> None:
    delay = OutputDelay()
    for _ in range(9):  # A fourth of them are timed.
        first_token(delay, 10.0, sent_s=11.0, seen_s=11.5)
    assert delay.usual_s == pytest.approx(0.5)
    stats = at_the_scheduler(new_request(delay, 20.0))
    assert stats.created_time == pytest.approx(19.5, abs=0.01)


def test_the_delay_of_the_warm_up_is_not_taken_for_the_usual_one() -> None:
    delay = OutputDelay()
    first_token(delay, 10.0, sent_s=11.0, seen_s=11.5)
    assert delay.usual_s == 0.0
    for _ in range(8):
        first_token(delay, 10.0, sent_s=11.0, seen_s=11.1)
    assert delay.usual_s == pytest.approx(0.1, abs=0.01)


def test_the_delay_follows_what_is_usual() -> None:
    delay = OutputDelay()
    for _ in range(100):
        first_token(delay, 10.0, sent_s=11.0, seen_s=11.5)
    for _ in range(100):
        first_token(delay, 10.0, sent_s=11.0, seen_s=11.1)
    assert delay.usual_s == pytest.approx(0.1, abs=0.01)


def test_only_some_requests_are_timed() -> None:
    """The scheduler sends its times with every token of those."""
    delay = OutputDelay()
    states = [at_the_scheduler(new_request(delay, 10.0)) for _ in range(8)]
    assert [state.has_timing_data for state in states] == 2 * [True, False, False, False]


def test_the_first_tokens_of_who_does_not_stream_are_kept_by_the_scheduler() -> None:
    delay = OutputDelay()
    states = {"r": state_of(new_request(delay, 10.0), streams=False)}
    assert not delay.without_token(["r"], states)


def test_outputs_without_times_tell_nothing() -> None:
    delay = OutputDelay()
    stats = new_request(delay, 10.0)
    waiting = delay.without_token(["r"], {"r": state_of(stats)})
    delay.observe(waiting, None)
    assert delay.usual_s == 0.0
    stats.set_first_token_time(11.0)
    assert not delay.without_token(["r"], {"r": state_of(stats)})
