"""Latencies of requests, gathered from records of steps."""

from __future__ import annotations

from sglang_coserve.core.step import StepResult
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms
from srt.monitoring.records import decode, info, prompt, record


def test_gaps_and_first_tokens_are_counted() -> None:
    latencies = LatencyHistograms()
    for _ in range(2):  # The name comes again.
        online, offline = info("a"), info("b", offline=True)
        latencies.ended(record(1.0, 2.0, prompt(online, 2.0, cached=2), prompt(offline, None)))
        for last_s, at_s in ((2.0, 2.5), (2.5, 3.5)):
            latencies.ended(record(last_s, at_s, decode(online, last_s, at_s)))
    online_ttft, online_gaps = latencies.ttft["online"], latencies.gaps["online"]
    assert (sum(online_ttft.counts), online_ttft.sum_s) == (2, 3.0)
    assert (sum(online_gaps.counts), online_gaps.sum_s) == (4, 3.0)
    assert latencies.queued["online"].sum_s == 1.0
    assert latencies.queued["offline"].sum_s == 1.0
    assert sum(latencies.ttft["offline"].counts) == 0
    assert latencies.cached_tokens == {"online": 4, "offline": 0}


def test_a_request_whose_first_step_was_dropped_has_begun_once() -> None:
    latencies, offline = LatencyHistograms(), info("a", offline=True)
    lost = StepResult(0, 1.0, dropped=("a",))
    latencies.ended(record(1.0, 1.5, prompt(offline, None), result=lost))
    latencies.ended(record(2.0, 2.5, prompt(offline, 2.5, reception=None)))
    assert sum(latencies.queued["offline"].counts) == 1
    assert latencies.ttft["offline"].sum_s == 2.0
