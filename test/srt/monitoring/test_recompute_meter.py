"""The recompute tax: tokens that are computed twice."""

from __future__ import annotations

from sglang_coserve.srt.monitoring.recompute_meter import RecomputeMeter
from sglang_coserve.srt.steps.engine_requests import EngineRequests, LiveRequest
from srt.kv_checkpoint.bare_cache import new_request
from srt.monitoring.records import decode, info, prompt, record


def live(tokens: int = 100) -> LiveRequest:
    requests = EngineRequests()
    requests.add(new_request("off", range(tokens), offline=True), 0.0)
    return requests["off"]


def test_tokens_count_as_recomputed_up_to_where_the_request_had_been() -> None:
    request = live()
    request.req.output_ids.append(7)
    assert request.note_prefill(0, 100) == 0
    for _ in range(20):
        request.req.output_ids.append(7)
    # It resumes from its first 96 tokens: of the 120 that had KV, 24 are computed again.
    request.req.output_ids.append(7)
    assert request.note_prefill(96, 25) == 24
    request.req.output_ids.append(7)
    # And again, in two chunks.
    assert request.note_prefill(64, 32) == 32
    request.req.output_ids.append(7)
    assert request.note_prefill(96, 27) == 26


def test_a_prompt_whose_prefill_was_interrupted_counts_once() -> None:
    request = live()
    assert request.note_prefill(0, 64) == 0
    request.req.output_ids.append(7)
    assert request.note_prefill(48, 52) == 16


def test_classes_are_counted_apart() -> None:
    meter = RecomputeMeter()
    online, offline = info("on"), info("off", offline=True)
    meter.ended(record(0.0, 1.0, prompt(online, 1.0, tokens=60), prompt(offline, 1.0, tokens=100)))
    meter.ended(record(1.0, 2.0, decode(online, 1.0, 2.0), decode(offline, 1.0, 2.0)))
    again = prompt(offline, 3.0, tokens=25, recomputed_tokens=24, reception=None)
    meter.ended(record(2.0, 3.0, again, decode(online, 2.0, 3.0)))
    state = meter.state()
    assert state["online"] == {"computed_tokens": 62, "recomputed_tokens": 0, "tax": 0.0}
    assert state["offline"]["computed_tokens"] == 126
    assert state["offline"]["recomputed_tokens"] == 24
