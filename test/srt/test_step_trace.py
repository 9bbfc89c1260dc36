"""What is kept of steps: the ring of the last ones, which stays small, and how long tokens took."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms
from sglang_coserve.srt.monitoring.step_trace import StepTrace, trace_events
from sglang_coserve.srt.steps.request_ledger import RequestLedger


def request(rid: str) -> Req:
    return Req(rid, "", [1, 2, 3], SamplingParams(max_new_tokens=4), eos_token_ids=set())


def batch(*reqs: Req, mode: ForwardMode = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(
        reqs=list(reqs), forward_mode=mode, prefix_lens=[0] * len(reqs), decoding_reqs=None
    )


def lane(held: Any = None, layer: int = 0) -> Any:
    suspended = None if held is None else SimpleNamespace(batch=held, layer=layer)
    return SimpleNamespace(suspended=suspended)


def events(trace: StepTrace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace_events(trace.since(0.0), process=1)]


def slices(trace: StepTrace) -> list[dict[str, Any]]:
    return [event for event in events(trace) if event["ph"] == "X"]


def test_a_suspended_step_is_two_slices_with_their_layers() -> None:
    ledger, trace = RequestLedger(None), StepTrace()
    req = request("a")
    ledger.add(req, 0.5)
    ran = batch(req)
    trace.launched(ran, 1.0, lane(), ledger)
    ledger.launched(ran)
    trace.ended(1.5, ran.reqs, ForwardKind.EXTEND, stopped_at=4)
    trace.launched(ran, 2.0, lane(ran, 4), ledger)
    trace.ended(2.25, ran.reqs, ForwardKind.EXTEND, [True])
    trace.forget("a", 2.5)
    first, second = slices(trace)
    assert (first["name"], first["ts"], first["dur"]) == ("extend, suspended", 1e6, 5e5)
    assert first["args"]["layers"] == {"from": 0, "before": 4}
    assert (second["name"], second["ts"], second["dur"]) == ("extend, resumed", 2e6, 2.5e5)
    assert second["args"]["layers"] == {"from": 4, "before": None}
    assert [event["ph"] for event in events(trace)] == ["b", "X", "X", "n", "e"]


def decoded(trace: StepTrace, launched_s: float, ended_s: float, *reqs: Req) -> None:
    trace.launched(batch(*reqs, mode=ForwardMode.DECODE), launched_s, lane(), RequestLedger(None))
    trace.ended(ended_s, reqs, ForwardKind.DECODE, [True] * len(reqs))


def test_under_overlap_a_step_begins_when_the_one_before_it_has_ended() -> None:
    trace = StepTrace()
    for at_s in (1.0, 1.1):
        trace.launched(batch(mode=ForwardMode.DECODE), at_s, lane(), RequestLedger(None))
    for at_s in (2.0, 3.0):
        trace.ended(at_s, [request("a")], ForwardKind.DECODE, [True])
    assert [(one["ts"], one["dur"]) for one in slices(trace)] == [(1e6, 1e6), (2e6, 1e6)]


def test_old_steps_make_room() -> None:
    trace = StepTrace()
    reqs = [request(str(n)) for n in range(40)]
    for number in range(1 << 15):
        decoded(trace, float(number), number + 0.5, *reqs)
    records = trace.since(0.0)
    assert len(records) == 1 << 14
    (last,) = trace_events(records[-1:], process=1)
    assert json.loads(last)["args"]["rows"] == {"online": 40, "offline": 0}
    assert len(json.loads(last)["args"]["online"]) == 32
    assert len(trace.since(float((1 << 15) - 1))) == 1


def test_gaps_and_first_tokens_are_counted() -> None:
    """Of a request that is suspended, that has tokens after its end, and whose name comes again."""
    latencies = LatencyHistograms()
    trace = StepTrace(latencies)
    for _ in range(2):
        ledger, req = RequestLedger(None), request("a")
        ledger.add(req, 0.5)
        ran = batch(req)
        ran.prefix_lens = [2]
        trace.launched(ran, 1.0, lane(), ledger)
        ledger.launched(ran)
        trace.ended(1.25, ran.reqs, ForwardKind.EXTEND, stopped_at=4)
        trace.launched(ran, 1.5, lane(ran, 4), ledger)
        trace.ended(2.0, ran.reqs, ForwardKind.EXTEND, [True])
        for before_s, at_s in ((2.0, 2.5), (2.5, 3.5)):
            decoded(trace, before_s, at_s, req)
        trace.forget("a", 3.5)
        decoded(trace, 3.5, 4.0, req)  # Under overlap scheduling.
    assert (sum(latencies.ttft["online"].counts), latencies.ttft["online"].sum_s) == (2, 3.0)
    assert (sum(latencies.gaps["online"].counts), latencies.gaps["online"].sum_s) == (4, 3.0)
    assert latencies.queued["online"].sum_s == 1.0
    assert latencies.cached_tokens["online"] == 4
