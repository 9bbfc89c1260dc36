"""How online users stand, in one sentence and in figures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_coserve.view.standing import standing


def slo(
    name: str = "ttft p99 <= 500ms",
    measured: float | None = 241.0,
    alone: float | None = 210.0,
    *,
    limit: float | None = 500.0,
    feasible: bool = True,
    values: int = 200,
) -> dict[str, Any]:
    return {
        "slo": name,
        "values": values,
        "measured_ms": measured,
        "online_alone_ms": alone,
        "limit_ms": limit,
        "met": measured is None or limit is None or measured <= limit,
        "feasible": feasible,
    }


def replica(
    *slos: dict[str, Any], requests: int = 200, attainment: float | None = 1.0, billed: int = 9
) -> Any:
    report = {
        "requests": requests,
        "attainment": attainment,
        "attainment_online_alone": None,
        "measured": list(slos),
    }
    return {"slo": report, "online": {"billed": billed, "delay_s": 0.1 * billed}}


def test_within_targets_says_what_offline_work_adds() -> None:
    found = standing([replica(slo())])
    assert found["level"] == "ok"
    assert found["text"] == (
        "Online users are within their targets; offline work adds 31 ms to P99 TTFT."
    )
    assert found["slos"][0]["added_ms"] == pytest.approx(31.0)


def test_a_missed_target_is_harm_if_it_would_be_met_alone() -> None:
    found = standing([replica(slo(measured=680.0))])
    assert found["level"] == "harmed"
    assert found["text"] == (
        "Online users are hurt by offline work: P99 TTFT is 680 ms, allowed are 500 ms, "
        "without offline work 210 ms."
    )


@pytest.mark.parametrize(
    ("name", "values", "level"),
    [
        ("ttft p99 <= 500ms", 99, "unknown"),
        ("ttft p99 <= 500ms", 100, "harmed"),
        ("ttft p90 <= 500ms", 10, "harmed"),
        ("ttft mean <= 500ms", 1, "harmed"),
    ],
)
def test_nobody_is_alarmed_by_fewer_values_than_a_percentile_needs(
    name: str, values: int, level: str
) -> None:
    found = standing([replica(slo(name, 680.0, values=values))])
    assert (found["level"], found["slos"][0]["known"]) == (level, level == "harmed")
    assert "is 680 ms, allowed are 500 ms" in found["text"]


def test_nobody_is_harmed_by_offline_work_that_has_not_run() -> None:
    """The first request of a server warms it up."""
    found = standing([replica(slo(measured=680.0), requests=1, billed=0)])
    assert found["level"] == "unknown"
    assert found["text"].startswith("No offline work has run beside online requests, and yet ")


def test_a_target_that_is_missed_alone_too_is_overload() -> None:
    found = standing([replica(slo(measured=900.0, alone=880.0, feasible=False))])
    assert found["level"] == "overloaded"
    assert "would be without offline work, too" in found["text"]


def test_harm_is_told_before_overload() -> None:
    overload = slo("tpot mean <= 10ms", 50.0, 40.0, limit=10.0, feasible=False)
    assert standing([replica(overload, slo(measured=680.0))])["level"] == "harmed"


def test_faster_than_predicted_alone_is_nothing_added() -> None:
    found = standing([replica(slo(measured=100.0))])
    assert found["slos"][0]["added_ms"] == 0.0


def test_without_a_baseline_nothing_is_said_of_what_was_added() -> None:
    found = standing([replica(slo(alone=None))])
    assert found["text"] == "Online users are within their targets."
    assert found["slos"][0]["added_ms"] is None


@pytest.mark.parametrize(
    ("replicas", "part"),
    [
        ([], "No online request"),
        ([replica(slo(measured=None), requests=0, attainment=None)], "No online request"),
        ([replica()], "give the server --online-slowdown"),
    ],
)
def test_what_is_not_known_is_said(replicas: list[Any], part: str) -> None:
    found = standing(replicas)
    assert found["level"] == "unknown"
    assert part in found["text"]


def test_of_several_replicas_the_worst_counts() -> None:
    good, bad = replica(slo(), requests=300), replica(slo(measured=680.0), requests=100)
    for replicas in ([good, bad], [bad, good]):
        found = standing(replicas)
        assert found["slos"][0]["measured_ms"] == 680.0
        assert found["requests"] == 400


def test_attainment_is_weighed_by_requests() -> None:
    found = standing([replica(requests=300), replica(requests=100, attainment=0.6)])
    assert found["attainment"] == pytest.approx(0.9)
