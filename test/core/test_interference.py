"""Online requests in the engine and alone, until both are known."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from sglang_coserve.core.control.allowance import Targets
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.cache_comparison import CacheComparison
from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.control.slo import parse_slo
from sglang_coserve.core.control.slo_monitor import SloReport
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.offline_queue import pack_tokens
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.core.step import JobTokens

STEP_S = 0.125
SLOS = ("ttft p99 <= 300ms", "tpot p99 <= 200ms", "tbt p99 <= 200ms")


MODEL = PolynomialModel.of(iteration_s=STEP_S)
"""Every step takes as long."""

predict = MODEL.predict


def followed(*, has_baseline: bool = True, micro_batches: int = 1) -> Interference:
    size = EngineSize(chunk_tokens=100, max_requests=8, kv_tokens=1000, micro_batches=micro_batches)
    slos = [parse_slo(text) for text in SLOS]
    return Interference(slos, MODEL if has_baseline else None, size)


def info(rid: str = "a", request_class: RequestClass = RequestClass.ONLINE) -> RequestInfo:
    return RequestInfo(rid, request_class, 10, 64, arrival_s=0.0)


def serve(found: Interference, *token_times_s: float, rid: str = "a") -> None:
    found.arrived(info(rid))
    for now_s in token_times_s:
        found.produced(rid, now_s)
    found.ended(rid, Ending.COMPLETE)


def measured_and_alone(report: SloReport) -> list[tuple[float | None, float | None]]:
    return [(s.measured_s, s.alone_s) for s in report.standings]


def test_a_request_is_judged_beside_what_it_would_have_got_alone() -> None:
    found = followed()
    serve(found, 0.5, 1.0, 1.25)
    assert found.monitor.report(2.0).requests == 0
    found.advance(predict, 2.0)
    report = found.monitor.report(2.0)
    assert measured_and_alone(report) == [(0.5, STEP_S), (0.375, STEP_S), (0.4975, STEP_S)]
    assert (report.attainment, report.attainment_alone) == (0.0, 1.0)
    assert len(found) == 0


def test_without_a_baseline_it_is_judged_at_once_and_nothing_said_of_alone() -> None:
    found = followed(has_baseline=False)
    serve(found, 0.5, 1.0)
    report = found.monitor.report(2.0)
    assert (report.attainment, report.attainment_alone) == (0.0, None)
    assert measured_and_alone(report)[0] == (0.5, None)
    assert len(found) == 0


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_request_may_come_again_after_it_was_taken_back(tokens: int) -> None:
    found = followed()
    found.arrived(info())
    for number in range(tokens):
        found.produced("a", 0.5 + number)
    found.ended("a", Ending.ABORTED)
    serve(found, 0.5, 1.0)
    found.advance(predict, 9.0)
    assert found.monitor.report(9.0).requests == 1
    assert len(found) == 0


def test_what_has_finished_is_not_forgotten_before_it_is_judged() -> None:
    found = followed()
    serve(found, 0.5)
    found.ended("a", Ending.ABORTED)
    found.advance(predict, 1.0)
    assert found.monitor.report(1.0).requests == 1


def test_a_rid_that_is_used_again_is_another_request() -> None:
    """Also before the baseline is through with the one before."""
    found = followed()
    serve(found, 0.5)
    serve(found, 0.5, 1.0)
    assert len(found) == 2
    found.arrived(info())
    for now_s in (2.0, 2.5):
        found.produced("a", now_s)
    found.advance(predict, 3.0)
    assert found.monitor.report(3.0).requests == 2
    assert len(found) == 1


def test_a_request_that_the_baseline_gave_up_is_judged_by_what_was_measured() -> None:
    found = followed()
    found.arrived(info("slow"))
    for now_s in (1.0, 62.0):
        found.advance(predict, now_s)
    found.produced("slow", 81.0)
    found.ended("slow", Ending.COMPLETE)
    report = found.monitor.report(82.0)
    assert (report.requests, report.attainment, report.attainment_alone) == (1, 0.0, None)
    assert len(found) == 0


def test_a_baseline_that_falls_behind_keeps_nobody_for_longer_than_five_minutes() -> None:
    """Its model is wrong: it serves a request in 125 ms where the engine takes 50."""
    found = followed()
    for number in range(12_000):
        now_s = 0.05 * number
        found.arrived(info(str(number))._replace(prompt_tokens=100, arrival_s=now_s))
        found.produced(str(number), now_s + 0.05)
        found.ended(str(number), Ending.COMPLETE)
        found.advance(predict, now_s + 0.05)
    assert len(found) <= 301 / 0.05
    assert found.monitor.report(600.0).attainment == 1.0


def test_a_refused_request_has_missed() -> None:
    found = followed()
    found.arrived(info())
    found.ended("a", Ending.REFUSED)
    found.advance(predict, 2.0)
    assert found.monitor.report(2.0).attainment == 0.0
    assert len(found) == 0


def test_offline_requests_are_not_followed() -> None:
    found = followed()
    found.arrived(info("b", RequestClass.OFFLINE))
    found.produced("b", 1.0)
    found.ended("b", Ending.COMPLETE)
    assert len(found) == 0


def test_the_allowance_learns_what_the_baseline_had() -> None:
    found = followed()
    serve(found, 0.5, 0.75, 1.0)
    # The TTFT target is 300 ms. At first every step is taken to last 125 ms.
    assert found.allowance.arrival_s == pytest.approx(0.15)
    assert found.allowance.stall_s == pytest.approx(0.125)
    found.advance(lambda _: 0.18, 9.0)
    assert found.allowance.arrival_s == pytest.approx(0.12, rel=0.02)
    assert found.allowance.stall_s == pytest.approx(0.18, rel=0.02)


def test_without_a_baseline_nothing_is_bounded() -> None:
    found = followed(has_baseline=False)
    serve(found, 0.5, 0.75, 1.0)
    assert (found.allowance.arrival_s, found.allowance.targets) == (math.inf, Targets())
    assert found.bill is None


def test_the_baseline_has_an_engine_for_each_micro_batch() -> None:
    """Two prompts of ten tokens run at once; the third finds no room in the chunk of the first."""
    found = followed(micro_batches=2)
    for rid, prompt_tokens in (("a", 100), ("b", 100), ("c", 100)):
        found.arrived(info(rid)._replace(prompt_tokens=prompt_tokens))
        found.produced(rid, 1.0)
        found.ended(rid, Ending.COMPLETE)
    found.advance(predict, 9.0)
    (ttft, _, _) = found.monitor.report(9.0).standings
    assert ttft.values == 3
    assert ttft.alone_s == pytest.approx(STEP_S + 0.98 * STEP_S)  # The third's, but for the P99.
    assert len(found) == 0


@pytest.mark.parametrize("target_s", [5e-324 / 1e3, 5e-324, 1e-313, 1e-309, 1e-6, 1e308])
@pytest.mark.parametrize("has_baseline", [True, False])
def test_no_own_target_is_too_small_or_too_large_to_judge_by(
    target_s: float, has_baseline: bool
) -> None:
    found = followed(has_baseline=has_baseline)
    found.arrived(info()._replace(ttft_target_s=target_s, tpot_target_s=target_s))
    for now_s in (0.5, 0.75, 1.0):
        found.produced("a", now_s)
    found.ended("a", Ending.COMPLETE)
    found.advance(predict, 2.0)
    assert len(found) == 0
    assert found.allowance.arrival_s > 0


TURN, NEXT_TURN = pack_tokens(range(40)), pack_tokens(range(60))
"""Prompts of a conversation, of 40 and 60 tokens."""


def turn(
    found: Interference, rid: str, prompt: bytes, now_s: float, *, computed: tuple[int, ...]
) -> None:
    """Serve a request with one token of output; the engine computes its prompt in these chunks."""
    found.arrived(info(rid)._replace(prompt_tokens=len(prompt) // 8, arrival_s=now_s), prompt)
    for tokens in computed:
        found.computed(rid, tokens)
    found.produced(rid, now_s + 0.25)


def sums(cache: CacheComparison) -> tuple[int, int, int]:
    return cache.prompt_tokens, cache.found_tokens, cache.found_alone_tokens


def test_the_cache_is_compared_once_both_engines_have_a_first_token() -> None:
    """The first turn is cached alone; the engine finds half of it."""
    found = followed()
    turn(found, "a", TURN, 0.0, computed=(40,))
    found.advance(predict, 1.0)
    found.ended("a", Ending.COMPLETE)
    found.advance(predict, 2.0)
    assert sums(found.cache) == (40, 0, 0)
    turn(found, "b", NEXT_TURN, 2.0, computed=(30, 10))
    assert sums(found.cache) == (40, 0, 0), "the baseline has not begun the second turn"
    found.advance(predict, 3.0)
    assert sums(found.cache) == (100, 20, 40)


def test_a_baseline_that_is_ahead_counts_with_the_engines_first_token() -> None:
    found = followed()
    found.arrived(info("a")._replace(prompt_tokens=40), TURN)
    found.advance(predict, 1.0)
    assert sums(found.cache) == (0, 0, 0)
    found.computed("a", 40)
    found.produced("a", 1.5)
    found.produced("a", 1.75)
    assert sums(found.cache) == (40, 0, 0)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_leaves_before_a_first_token_counts_in_no_sum(is_first: bool) -> None:
    """Aborted, or drained, in the engine before its first token or the baseline's."""
    found = followed()
    found.arrived(info("a")._replace(prompt_tokens=40), TURN)
    found.computed("a", 40)
    if is_first:
        found.produced("a", 0.25)
    else:
        found.advance(predict, 1.0)
    found.ended("a", Ending.ABORTED)
    found.advance(predict, 2.0)
    assert sums(found.cache) == (0, 0, 0)


def test_a_prompt_that_was_computed_twice_found_nothing() -> None:
    """Its request was retracted half-way, and others took its KV."""
    found = followed()
    turn(found, "a", TURN, 0.0, computed=(30, 40))
    found.advance(predict, 1.0)
    assert sums(found.cache) == (40, 0, 0)


def test_requests_with_unknown_tokens_count_in_no_sum() -> None:
    found = followed()
    found.arrived(info("a")._replace(prompt_tokens=40))
    found.advance(predict, 0.125)
    found.produced("a", 0.25)
    found.ended("a", Ending.COMPLETE, NEXT_TURN)
    found.advance(predict, 1.0)
    assert sums(found.cache) == (0, 0, 0)


def test_without_a_baseline_no_cache_is_compared() -> None:
    found = followed(has_baseline=False)
    turn(found, "a", TURN, 0.0, computed=())
    assert found.kv is None
    assert sums(found.cache) == (0, 0, 0)


@pytest.mark.parametrize(
    ("slos", "limit"),
    [((), 1.5), (("ttft p99 <= 300ms",), 1.5), (("tbt p99 <= 200ms",), None)],
)
def test_streams_are_judged_by_the_pace_unless_a_target_replaces_it(
    slos: tuple[str, ...], limit: float | None
) -> None:
    found = Interference([parse_slo(text) for text in slos], MODEL, stream_slowdown=0.5)
    serve(found, 0.5, 1.0, 1.25)
    found.advance(predict, 2.0)
    streams = found.monitor.report(2.0).streams
    assert streams.limit == limit
    assert streams.slowdown == pytest.approx((3.0, 3.0))


def test_thousands_of_waiting_requests_keep_little_of_what_many_jobs_did() -> None:
    found = followed()
    jobs = [JobTokens(f"batch_{number}", 1) for number in range(256)]
    found.arrived(info("first"))
    tracemalloc.start()
    try:
        for number in range(10_000):
            found.worked(1.0, jobs)
            found.arrived(info(str(number)))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 10_001
    # About 10 MB of these are the requests.
    assert held_bytes < 25e6


def test_thousands_of_waiting_requests_are_billed_for_the_work_of_their_time() -> None:
    found = followed()
    bill = found.bill
    assert bill is not None
    for number in range(3000):
        found.arrived(info(str(number)))
        found.worked(0.001, [JobTokens(f"batch_{number // 100}", 1)])
    found.produced("2999", 100.0)
    for number in range(2999):
        found.ended(str(number), Ending.ABORTED)
    found.ended("2999", Ending.COMPLETE)
    found.advance(predict, 1000.0)
    # The last batch alone worked while this one waited.
    assert bill.report().jobs == {"batch_29": pytest.approx(100.0 - STEP_S)}
