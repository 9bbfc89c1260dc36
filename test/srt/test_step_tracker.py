"""Which step the time between two passes belongs to, and what is known of it when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step import PrefillChunk, ServedRequest, StepPlan, StepResult
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.compat import set_computed_tokens
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.snapshots import decoding_requests
from sglang_coserve.srt.steps.step_record import Reception, StepRecord, Suspension
from sglang_coserve.srt.steps.step_tracker import StepTracker, TrackedStep


def request(rid: str, tokens: int = 5) -> Req:
    params = SamplingParams(max_new_tokens=4)
    return Req(rid, "", list(range(tokens)), params, eos_token_ids=set())


def prefill(*reqs: Req) -> Any:
    lens = [len(req.origin_input_ids) for req in reqs]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=list(reqs),
        decoding_reqs=None,
        extend_lens=lens,
        prefix_lens=[0] * len(reqs),
        seq_lens_cpu=torch.tensor(lens),
    )


def decode(*reqs: Req) -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        reqs=list(reqs),
        decoding_reqs=None,
        seq_lens_cpu=torch.tensor([len(req.origin_input_ids) + 1 for req in reqs]),
    )


class Engine:
    """Passes at given times, each with a prefill. Results come at once, or later; in a pipeline
    just before the next turn of the micro-batch."""

    def __init__(self, micro_batches: int = 1) -> None:
        self.requests = EngineRequests()
        self.tracker = StepTracker(self.requests, is_overlapped=False, micro_batches=micro_batches)
        self.launched: list[Any] = []
        self._under_way: deque[Any] = deque([None] * (micro_batches - 1))

    def run(
        self,
        now_s: float,
        step: int | None = None,
        *,
        tokens: int | None = None,
        results: bool = True,
    ) -> list[StepRecord]:
        """One pass, with a prefill of one token more than the last one by default; return what it
        learned of earlier ones."""
        done = self.tracker.next_pass(now_s)
        batch, number = None, len(self.launched)
        if tokens != 0:
            req = request(f"r{number}", tokens or 1 + number)
            self.requests.add(req, now_s)
            batch = prefill(req)
        if step is not None:
            self.tracker.started(StepPlan(step=step))
        self.tracker.launched(batch)
        for batches in (self.launched, self._under_way):
            batches.append(batch)
        ended = self._under_way.popleft()
        if ended is not None and results:
            self.processed(ended)
        return done

    def processed(self, batch: Any) -> None:
        """Give each request of a batch a token."""
        processed(self.tracker, *batch.reqs)


def processed(tracker: StepTracker, *reqs: Req, now_s: float = 0.0) -> None:
    for req in reqs:
        req.output_ids.append(7)
    tracker.processed(reqs, now_s)


def times(records: list[StepRecord]) -> list[tuple[int | None, float | None]]:
    return [(record.result.step, record.result.seconds) for record in records]


def test_without_overlap_a_pass_shows_the_time_of_its_own_step() -> None:
    engine = Engine()
    assert engine.run(10.0, 0) == []
    assert times(engine.run(10.5, None)) == [(0, 0.5)]
    for number, place, began_s, ends_s in ((None, 1, 10.5, 11.0), (1, 2, 11.0, 11.25)):
        (record,) = engine.run(ends_s, 1)
        stats, chunks = StepStats.of([(place + 1, 0)]), (PrefillChunk(f"r{place}", place + 1),)
        served = ServedRequest(engine.requests[f"r{place}"].info, ends_s)
        assert record.result == StepResult(
            number, began_s, ends_s - began_s, stats, chunks, (served,)
        )


def results(records: Iterable[StepRecord]) -> list[StepResult]:
    return [record.result for record in records]


def sizes(result: StepResult) -> list[int]:
    return [batch.prefill_tokens for batch in result.overlapping]


def test_in_a_pipeline_a_step_lasts_until_its_micro_batch_has_its_turn_again() -> None:
    engine = Engine(2)
    assert engine.run(10.0, tokens=1) == []
    assert engine.run(10.5, tokens=2) == []
    (first,) = results(engine.run(11.0, tokens=3))
    assert (first.seconds, sizes(first), first.concurrency) == (1.0, [0, 2], 1.5)
    assert first.served[0].token_s == 11.0
    (second,) = results(engine.run(12.0, tokens=0))
    assert (second.seconds, sizes(second), second.concurrency) == (1.5, [1, 3], 2.0)
    (third,) = results(engine.run(12.25, tokens=0))
    assert (third.seconds, sizes(third)) == (1.25, [2, 0])
    assert engine.run(13.0, tokens=0) == []


def test_of_three_micro_batches_two_before_and_two_after_run_beside_a_step() -> None:
    engine = Engine(3)
    ran = results(one for now in range(8) for one in engine.run(float(now), tokens=now + 1))
    assert [result.seconds for result in ran] == [3.0] * 5
    assert [sizes(result) for result in ran][:3] == [[0, 0, 2, 3], [0, 1, 3, 4], [1, 2, 4, 5]]


def test_a_result_waits_for_its_tokens() -> None:
    """On a CPU the overlapped loop knows the time of a step one pass before its tokens."""
    engine = Engine()
    engine.run(10.0, 0, results=False)
    assert engine.run(10.5, 1, results=False) == []
    engine.processed(engine.launched[0])
    (record,) = engine.run(11.0, 2, results=False)
    assert times([record]) == [(0, 0.5)]
    assert record.result.served[0].token_s == 11.0


def test_batches_that_sglang_launched_without_a_pass_hold_up_no_results() -> None:
    engine = Engine()
    engine.run(10.0, 0)
    later = request("later")
    engine.requests.add(later, 10.2)
    engine.tracker.launched(prefill(later))
    processed(engine.tracker, later)
    assert times(engine.run(10.5, 1)) == [(0, None), (None, None)]
    assert times(engine.run(11.0, 2)) == [(1, 0.5)]


def test_a_step_of_which_nothing_ran_has_an_empty_result() -> None:
    engine = Engine()
    engine.run(1.0, 0, tokens=0)
    assert results(engine.run(2.0, tokens=0)) == [StepResult(0, 1.0)]


def suspended_step() -> tuple[StepTracker, TrackedStep]:
    """A tracker of which the first pass was suspended after 0.5 s, and that step."""
    engine = Engine()
    tracker, req = engine.tracker, request("a")
    engine.requests.add(req, 1.0)
    tracker.next_pass(1.0)
    tracker.started(StepPlan(step=0))
    tracker.launched(prefill(req))
    tracker.runs(1.0)
    step = tracker.suspended(2, 1.5)
    tracker.stopped()
    assert tracker.next_pass(1.5) == []
    return tracker, step


def test_a_suspended_step_has_the_time_of_its_parts() -> None:
    tracker, step = suspended_step()
    live = tracker._requests.get("a")
    req = live.req
    tracker.launched(prefill(request("other")))  # Of nobody's plan.
    processed(tracker)
    (other,) = tracker.next_pass(5.0)
    assert times([other]) == [(None, 3.5)]
    tracker.resumed(step)
    tracker.launched(prefill(req))
    tracker.runs(5.0)
    processed(tracker, req, now_s=5.2)
    (record,) = tracker.next_pass(5.25)
    result = record.result
    assert (result.step, result.started_s, result.seconds) == (0, 1.0, 0.75)
    assert result.suspensions == 1
    assert result.chunks == (PrefillChunk("a", 5),)
    assert [served.info.rid for served in result.served] == ["a"]
    assert record.suspensions == (Suspension(2, 1.5, 5.0),)
    assert (record.launched_s, record.ended_s, record.is_dropped) == (1.0, 5.2, False)


def test_of_a_suspended_step_that_is_dropped_the_time_is_known_and_nothing_ran() -> None:
    tracker, step = suspended_step()
    record = tracker.dropped(step, ["a"], 2.0)
    assert record.result == StepResult(0, 1.0, 0.5, dropped=("a",))
    assert (record.suspensions, record.is_dropped) == ((Suspension(2, 1.5, 2.0),), True)
    assert [(one.info.rid, one.reception, one.token_s) for one in record.requests] == [
        ("a", Reception(None, None, 1.0), None)
    ]
    tracker.launched(None)
    assert tracker.next_pass(2.0) == []


def test_a_record_has_the_requests_of_both_classes_and_their_tokens() -> None:
    engine = Engine()
    tracker, reqs = engine.tracker, [request("a"), request("b")]
    for req in reqs:
        engine.requests.add(req, 0.5)
    tracker.next_pass(1.0)
    tracker.launched(prefill(*reqs))
    tracker.runs(1.1, paced_s=0.25)
    reqs[0].output_ids.append(7)
    tracker.processed(reqs, 1.75)  # More of the other prompt is to be computed.
    (record,) = tracker.next_pass(2.0)
    came = Reception(None, None, 0.5)
    assert [(one.info.rid, one.token_s, one.last_s, one.reception) for one in record.requests] == [
        ("a", 1.75, None, came),
        ("b", None, None, came),
    ]
    assert [one.info.rid for one in record.first] == ["a"]
    assert (record.launched_s, record.paced_s, record.ended_s) == (1.1, 0.25, 1.75)
    assert record.result.served[0].token_s == 2.0  # All ranks know this time.
    engine.requests.forget("b")
    tracker.launched(decode(reqs[0]))
    processed(tracker, reqs[0], now_s=2.5)
    (record,) = tracker.next_pass(3.0)
    (row,) = record.requests
    assert (row.token_s, row.last_s, row.prompt_tokens, row.reception) == (2.5, 1.75, 0, None)
    assert (record.first, [info.rid for info in record.left]) == ((), ["b"])


def test_what_is_left_of_an_aborted_request_is_not_its_namesakes() -> None:
    """Under overlap scheduling a result may come after the end."""
    engine = Engine()
    aborted, namesake = request("a"), request("a")
    engine.requests.add(aborted, 1.0)
    engine.tracker.next_pass(1.0)
    engine.tracker.launched(prefill(aborted))
    engine.requests.forget("a")
    engine.requests.add(namesake, 1.5)
    processed(engine.tracker, aborted)
    (record,) = engine.tracker.next_pass(2.0)
    assert (record.result.served, record.result.chunks) == ((), (PrefillChunk("a", 5),))
    assert record.requests == ()
    left = engine.requests.live(namesake)
    assert left.last_token_s is None


def test_a_token_in_flight_is_counted_and_has_no_time() -> None:
    """Under overlap scheduling a pass is planned before the results of the last one are known."""
    requests, req = EngineRequests(), request("a")
    requests.add(req, 1.0)
    req.kv = SimpleNamespace()

    def last_token_s(computed_tokens: int) -> float | None:
        set_computed_tokens(req, computed_tokens)
        (seen,) = decoding_requests(requests, [req], RequestState.DECODING)
        assert seen.generated_tokens == computed_tokens + 1 - seen.info.prompt_tokens
        return seen.last_token_s

    assert last_token_s(5) is None
    req.output_ids.append(7)
    live = requests.live(req)
    live.last_token_s = 2.0
    assert last_token_s(5) == 2.0
    assert last_token_s(6) is None
