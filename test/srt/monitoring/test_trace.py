"""The last minute of a real server as a file for Perfetto."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from srt.batch_server.deployment import ADMIN_KEY, API_KEY
from srt.monitoring.watched import LINES, ONLINE_REQUESTS, Watched


def of(watched: Watched, phase: str) -> list[dict[str, Any]]:
    """The events of the trace of a phase."""
    return [event for event in watched.trace if event["ph"] == phase]


def test_steps_follow_each_other_and_name_who_was_in_them(watched: Watched) -> None:
    steps = sorted(of(watched, "X"), key=lambda step: step["ts"])
    assert len(steps) > 100
    assert all(step["dur"] >= 0 for step in steps)
    # Rounded to nanoseconds.
    assert all(after["ts"] >= step["ts"] + step["dur"] - 0.01 for step, after in pairwise(steps))
    assert {step["name"].split(",")[0] for step in steps} <= {"extend", "decode", "mixed", "other"}
    for step in steps:
        counts, args = step["args"]["requests"], step["args"]
        for kind in ("online", "offline"):
            assert len(args.get(kind, ())) == min(counts[kind], 32)
    assert any(step["args"]["requests"]["offline"] for step in steps)
    assert any(step["args"]["requests"]["online"] for step in steps)
    assert any("bound_by" in step["args"].get("plan", {}) for step in steps)


def test_suspended_steps_went_on(watched: Watched) -> None:
    parts = [step for step in of(watched, "X") if "from_layer" in step["args"]]
    stops = [step for step in parts if ", suspended" in step["name"]]
    goes_on = [step for step in parts if ", resumed" in step["name"]]
    assert len(stops) >= len(goes_on)
    assert all(step["args"]["from_layer"] > 0 for step in goes_on)


def test_every_request_has_its_span(watched: Watched) -> None:
    begun = {event["id"]: event for event in of(watched, "b")}
    ended = {event["id"] for event in of(watched, "e")}
    assert set(begun) == ended
    kinds = [event["cat"] for event in begun.values()]
    assert kinds.count("offline") == LINES
    assert kinds.count("online") >= ONLINE_REQUESTS
    firsts = [event["id"] for event in of(watched, "n") if event["name"] == "first_token"]
    assert sorted(firsts) == sorted(begun)
    named = {event["args"]["batch"] for event in begun.values() if event["cat"] == "offline"}
    assert named == {watched.batch_id}


def test_it_is_the_operators_alone(watched: Watched) -> None:
    for key in (API_KEY, None, "another"):
        assert watched.get("/coserve/trace", key).status_code == 401
    assert watched.get("/coserve/trace?seconds=0", ADMIN_KEY).status_code in (400, 422)
    assert "from_layer" not in watched.get("/coserve/status").text


def test_only_the_seconds_that_are_asked_for_are_there(watched: Watched) -> None:
    assert watched.deployment.status()["replicas"]
    few = json.loads(watched.get("/coserve/trace?seconds=0.001", ADMIN_KEY).text)
    assert [event["ph"] for event in few] == ["M"]
    assert len(watched.trace) > len(few)
