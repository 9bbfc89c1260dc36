"""The ring of the last steps: as documents, as Perfetto's events, and as the story of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_coserve.core.step import StepResult
from sglang_coserve.srt.monitoring import step_ring
from sglang_coserve.srt.monitoring.step_ring import StepRing
from sglang_coserve.srt.monitoring.step_trace import trace_events
from sglang_coserve.srt.steps.step_record import StepRecord, Suspension
from srt.monitoring.records import decode, info, prompt, record


def ring(*records: StepRecord) -> StepRing:
    kept = StepRing()
    for each in records:
        kept.add(each)
    return kept


def events(*records: StepRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace_events(ring(*records).between(0.0, 1e9), process=1)]


def slices(*records: StepRecord) -> list[dict[str, Any]]:
    return [event for event in events(*records) if event["ph"] == "X"]


def test_a_suspended_step_is_a_slice_for_each_part() -> None:
    offline = info("a", offline=True)
    stop = Suspension(layer=4, stopped_s=1.5, resumed_s=2.0)
    ran = record(1.0, 2.25, prompt(offline, 2.25, is_last=True), suspensions=(stop,))
    first, second = slices(ran)
    assert (first["name"], first["ts"], first["dur"]) == ("extend, suspended", 1e6, 5e5)
    assert (second["name"], second["ts"], second["dur"]) == ("extend, resumed", 2e6, 2.5e5)
    assert (first["args"]["from_layer"], second["args"]["from_layer"]) == (0, 4)
    assert [event["ph"] for event in events(ran)] == ["b", "X", "X", "n", "e"]


def test_the_span_of_an_aborted_request_ends_before_the_next_step() -> None:
    gone, other = info("gone"), info("other")
    ran = record(1.0, 2.0, prompt(gone, 2.0), prompt(other, 2.0))
    after = record(2.5, 2.75, decode(other, 2.0, 2.75), left=(gone,))
    (end,) = (event for event in events(ran, after) if event["ph"] == "e")
    assert (end["id"], end["ts"]) == ("gone", 2.5e6)


def test_a_dropped_step_ends_where_it_stopped() -> None:
    offline, stop = info("a", offline=True), Suspension(layer=4, stopped_s=1.5, resumed_s=2.0)
    lost = StepResult(0, 1.0, 0.5, dropped=("a",))
    beside = record(1.6, 1.8, decode(info("b"), 1.0, 1.8), number=1)
    dropped = record(1.0, 2.0, prompt(offline, None), suspensions=(stop,), result=lost)
    other, part = slices(beside, dropped)
    assert (other["ts"], part["ts"], part["dur"]) == (1.6e6, 1e6, 5e5)
    assert part["name"] == "extend, suspended"


def test_under_overlap_a_step_begins_when_the_step_before_it_has_ended() -> None:
    online = info("a")
    steps = [record(1.0, 2.0, decode(online, 0.9, 2.0)), record(1.1, 3.0, decode(online, 2.0, 3.0))]
    assert [(one["ts"], one["dur"]) for one in slices(*steps)] == [(1e6, 1e6), (2e6, 1e6)]


def test_old_steps_make_room_and_documents_name_few_requests() -> None:
    kept = StepRing()
    decodes = [decode(info(str(number)), 0.0, 1.0) for number in range(40)]
    for number in range(step_ring.MOST_STEPS + 100):
        kept.add(record(float(number), number + 0.5, *decodes))
    documents = kept.between(0.0, 1e9)
    assert len(documents) == step_ring.MOST_STEPS
    assert documents[-1]["requests"] == {"online": 40, "offline": 0}
    assert len(documents[-1]["online"]) == 32
    assert len(kept.between(documents[-1]["ended_s"], 1e9)) == 1
    json.dumps(documents)


def test_the_longest_of_the_last_steps_come_in_order() -> None:
    online = info("a")
    times = [(0.0, 9.0), (9.0, 9.1), (9.1, 12.0), (12.0, 12.2), (12.2, 14.0)]
    steps = [record(begin, end, decode(online, begin, end)) for begin, end in times]
    found = ring(*steps).longest_since(9.05, 2)
    assert [step["ended_s"] for step in found["steps"]] == [12.0, 14.0]
    assert found["steps_left_out"] == 2


def test_the_steps_of_a_request_tell_what_it_waited_for() -> None:
    mine, other = info("mine", arrival_s=1.25), info("other", offline=True)
    kept = ring(
        record(0.0, 1.0, prompt(other, None)),  # Before the request came.
        record(1.0, 2.0, prompt(other, 2.0, reception=None)),
        record(2.0, 2.5, prompt(mine, None, tokens=2), number=1, paced_s=0.125),
        record(2.5, 3.0, prompt(mine, 3.0, tokens=1, reception=None), decode(other, 2.0, 3.0)),
        record(3.0, 4.0, decode(mine, 3.0, 4.0), decode(other, 3.0, 4.0)),
        record(4.0, 5.0, decode(other, 4.0, 5.0)),  # After its last token.
    )
    found = kept.of_request("mine")
    assert found is not None
    assert found["request"] == {
        "rid": "mine",
        "arrival_s": 1.25,
        "is_whole": True,
        "is_ended": False,
        "kept_from_s": None,
        "class": "online",
        "prompt_tokens": 3,
        "batch": None,
        "sent_s": 0.6,
        "compiled_from_s": None,
        "queued_s": 0.7,
    }
    steps = found["steps"]
    assert [step["role"] for step in steps] == ["waits", "prefill", "prefill", "decode"]
    assert [step.get("gap_s") for step in steps] == [None, None, 1.75, 1.0]
    assert [step["prompt_tokens_of_request"] for step in steps] == [0, 2, 1, 0]
    assert steps[1]["paced_s"] == 0.125
    assert steps[3]["plan"]["bound_by"] == "gap"
    assert steps[3]["requests"] == {"online": 1, "offline": 1}
    assert steps[3]["decodes"] == {"online": 1, "offline": 1}
    assert kept.of_request("nobody") is None


def test_steps_between_two_tokens_of_a_request_are_in_its_story() -> None:
    mine, other = info("mine"), info("other")
    kept = ring(
        record(1.0, 2.0, prompt(mine, 2.0)),
        record(2.0, 3.0, prompt(other, 3.0)),  # Prompts first: it does not decode.
        record(3.0, 4.0, decode(mine, 2.0, 4.0), decode(other, 3.0, 4.0)),
        record(4.0, 5.0, decode(mine, 4.0, 5.0)._replace(is_last=True)),
    )
    found = kept.of_request("mine")
    assert found is not None
    assert [step["role"] for step in found["steps"]] == ["prefill", "waits", "decode", "decode"]
    assert [step.get("gap_s") for step in found["steps"]] == [1.5, None, 2.0, 1.0]
    assert found["request"]["is_ended"]


def test_a_long_story_has_its_longest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ring, "_MOST_IN_STORY", 8)
    mine, other = info("mine", arrival_s=0.0), info("other")
    waits = [record(float(n), n + 0.5, decode(other, n - 1.0, n + 0.5)) for n in range(9)]
    tokens = [record(float(n), n + 1.0, decode(mine, n - 1.0, n + 1.0)) for n in range(12, 20)]
    late = record(22.0, 23.0, decode(mine, 20.0, 23.0))
    after = [record(float(n), n + 1.0, decode(other, n - 1.0, n + 1.0)) for n in range(23, 30)]
    first = [
        record(9.0, 9.1, prompt(mine, None)),
        record(9.1, 12.0, prompt(mine, 12.0, reception=None)),
    ]
    found = ring(*waits, *first, *tokens, late, *after).of_request("mine")
    assert found is not None
    roles = [step["role"] for step in found["steps"]]
    assert roles == ["waits", "waits", "prefill", "prefill", *["decode"] * 4]
    assert max(step.get("gap_s") or 0.0 for step in found["steps"][4:]) == 3.0
    assert found["left_out"] == {"before_first_token": 7, "after": 5}
    assert (found["tokens"], len(found["gaps_s"]), found["with_it"]) == (10, 9, 11)
    assert found["without_it"] == 9


def test_a_request_that_has_the_id_of_an_earlier_one() -> None:
    earlier, mine = info("mine", arrival_s=0.5), info("mine", arrival_s=3.5)
    kept = ring(
        record(1.0, 2.0, prompt(earlier, 2.0)),
        record(2.0, 3.0, decode(earlier, 2.0, 3.0)._replace(is_last=True)),
        record(4.0, 5.0, prompt(mine, 5.0), left=(earlier,)),
        record(5.0, 6.0, decode(mine, 5.0, 6.0)),
    )
    found = kept.of_request("mine")
    assert found is not None
    assert found["request"]["arrival_s"] == 3.5
    assert not found["request"]["is_ended"]
    assert [step["gap_s"] for step in found["steps"]] == [1.5, 1.0]


def test_it_says_from_when_on_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ring, "MOST_STEPS", 2)
    mine = info("mine", arrival_s=0.5)
    kept = ring(
        record(0.0, 1.0, decode(info("a"), 0.0, 1.0)),
        record(1.0, 2.0, decode(info("a"), 1.0, 2.0)),
        record(2.0, 3.0, prompt(mine, 3.0)),
    )
    found = kept.of_request("mine")
    assert found is not None
    assert found["request"]["is_whole"]
    assert found["request"]["kept_from_s"] == 1.0


def test_a_request_whose_beginning_is_gone_has_no_first_gap() -> None:
    mine = info("mine")
    kept = ring(record(3.0, 4.0, decode(mine, 3.0, 4.0)), record(4.0, 5.0, decode(mine, 4.0, 5.0)))
    found = kept.of_request("mine")
    assert found is not None
    assert not found["request"]["is_whole"]
    assert [step["gap_s"] for step in found["steps"]] == [None, 1.0]


def test_a_suspended_step_is_in_the_story_of_who_waits_for_it() -> None:
    offline, mine = info("offline", offline=True), info("mine", arrival_s=1.25)
    stop = Suspension(layer=2, stopped_s=1.5, resumed_s=2.0)
    suspended = record(1.0, 2.0, prompt(offline, None), suspensions=(stop,))
    kept = ring(record(1.6, 1.9, prompt(mine, 1.9), number=1))
    found = kept.of_request("mine", suspended)
    assert found is not None
    assert [step["role"] for step in found["steps"]] == ["prefill", "waits"]
    (step,) = (step for step in kept.between(0.0, 1e9, suspended) if step["suspensions"])
    assert step["suspensions"] == [{"layer": 2, "stopped_s": 1.5, "resumed_s": 2.0}]


def test_a_decode_without_a_token_is_no_token() -> None:
    mine = info("mine")
    lost = decode(mine, 2.0, 3.0)._replace(token_s=None)
    found = ring(
        record(1.0, 2.0, prompt(mine, 2.0)),
        record(2.0, 3.0, lost),
        record(3.0, 4.0, decode(mine, 2.0, 4.0)),
    ).of_request("mine")
    assert found is not None
    assert (found["tokens"], found["gaps_s"]) == (2, [2.0])


def test_a_drop_does_not_shorten_the_step_beside_it() -> None:
    offline, stop = info("a", offline=True), Suspension(layer=4, stopped_s=1.5, resumed_s=2.4)
    lost = StepResult(0, 1.0, 0.5, dropped=("a",))
    dropped = record(1.0, 2.4, prompt(offline, None), suspensions=(stop,), result=lost)
    beside = record(1.6, 2.5, decode(info("b"), 1.0, 2.5), number=1)
    _, other = slices(dropped, beside)
    assert (other["ts"], other["dur"]) == (1.6e6, 9e5)


def test_a_kept_step_has_no_rows() -> None:
    decodes = [decode(info(str(number)), 0.0, 1.0) for number in range(100)]
    (kept,) = ring(record(1.0, 2.0, *decodes))._steps
    assert (kept.record.requests, kept.record.result.served) == ((), ())
