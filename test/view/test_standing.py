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


MISSED = slo(measured=680.0)
MISSED_ALONE_TOO = slo(measured=900.0, alone=880.0, feasible=False)
STANDINGS: dict[str, tuple[list[Any], str, str]] = {
    "ok": (
        [replica(slo())],
        "ok",
        "Online users are within their targets; offline work adds 31 ms to P99 TTFT.",
    ),
    "faster than predicted alone": (
        [replica(slo(measured=100.0))],
        "ok",
        "Online users are within their targets; offline work adds 0 ms to P99 TTFT.",
    ),
    "no baseline": ([replica(slo(alone=None))], "ok", "Online users are within their targets."),
    "missed, and met alone": (
        [replica(MISSED)],
        "harmed",
        "Online users are hurt by offline work: P99 TTFT is 680 ms, allowed are 500 ms, "
        "without offline work 210 ms.",
    ),
    "missed before any offline work ran": (
        [replica(MISSED, requests=1, billed=0)],
        "unknown",
        "No offline work has run beside online requests, and yet P99 TTFT is 680 ms, allowed are "
        "500 ms, without offline work 210 ms.",
    ),
    "missed alone, too": (
        [replica(MISSED_ALONE_TOO)],
        "overloaded",
        "Targets are missed, and would be without offline work, too: P99 TTFT is 900 ms, allowed "
        "are 500 ms, without offline work 880 ms.",
    ),
    "both": (
        [replica(MISSED_ALONE_TOO, slo("tpot mean <= 10ms", 50.0, 4.0, limit=10.0))],
        "harmed",
        "Online users are hurt by offline work: mean TPOT is 50 ms, allowed are 10 ms, without "
        "offline work 4 ms.",
    ),
    "no replica": ([], "unknown", "No online request has ended in the last 10 minutes."),
    "no request": (
        [replica(slo(measured=None), requests=0, attainment=None)],
        "unknown",
        "No online request has ended in the last 10 minutes.",
    ),
    "no target": (
        [replica()],
        "unknown",
        "Online users have no target: give the server --online-slowdown, --slo-ttft-ms, "
        "--slo-tpot-ms or --slo.",
    ),
}


@pytest.mark.parametrize("case", STANDINGS)
def test_it_is_one_level_and_one_sentence(case: str) -> None:
    replicas, level, text = STANDINGS[case]
    found = standing(replicas)
    assert (found["level"], found["text"]) == (level, text)


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


def test_of_several_replicas_the_worst_counts_and_attainment_is_weighed_by_requests() -> None:
    good = replica(slo(), requests=300)
    bad = replica(slo(measured=680.0), requests=100, attainment=0.6)
    for replicas in ([good, bad], [bad, good]):
        found = standing(replicas)
        assert found["slos"][0]["measured_ms"] == 680.0
        assert found["requests"] == 400
        assert found["attainment"] == pytest.approx(0.9)
