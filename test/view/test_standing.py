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


NO_PERCENTILES = {"p50": None, "p99": None}


def streams(
    p50: float | None = None,
    p99: float | None = None,
    *,
    kept_share: float | None = None,
    limit: float | None = 2.0,
    count: int = 200,
) -> dict[str, Any]:
    return {
        "streams": count,
        "slowdown": {"p50": p50, "p99": p99},
        "limit": limit,
        "kept_share": kept_share,
        "met": kept_share is None or kept_share >= 0.99,
    }


def latency(p50_ms: float, alone_ms: float | None) -> dict[str, Any]:
    """A latency with a P99 of ten times its P50."""
    if alone_ms is None:
        alone = ratio = NO_PERCENTILES
    else:
        alone = {"p50": alone_ms, "p99": 10 * alone_ms}
        ratio = dict.fromkeys(alone, p50_ms / alone_ms)
    measured = {"p50": p50_ms, "p99": 10 * p50_ms}
    return {"values": 9, "measured_ms": measured, "online_alone_ms": alone, "ratio": ratio}


def replica(
    *slos: dict[str, Any],
    requests: int = 200,
    attainment: float | None = 1.0,
    billed: int = 9,
    pace: dict[str, Any] | None = None,
    **latencies: dict[str, Any],
) -> Any:
    report = {
        "requests": requests,
        "attainment": attainment,
        "attainment_online_alone": None,
        "measured": list(slos),
        "latencies": latencies,
        "streams": pace or streams(limit=None),
    }
    online = {"billed": billed, "delay_s": 0.1 * billed}
    return {"promise": "All is well.", "slo": report, "online": online}


def cached(share: float, *, alone: int = 50_000, is_promised: bool = True) -> dict[str, Any]:
    found = round(share * alone)
    return {
        "online_prompt_tokens": 2 * alone,
        "found": found,
        "found_alone": alone,
        "share": found / alone if alone else None,
        "protected_tokens": 9,
        "is_promised": is_promised,
    }


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


KEPT = streams(1.25, 1.6, kept_share=0.995)
BROKEN = streams(1.8, 2.5, kept_share=0.96)
DEFAULT_PROMISE: dict[str, tuple[Any, dict[str, Any] | None, str, str]] = {
    "all of it is kept": (
        replica(slo(), pace=KEPT),
        cached(0.98),
        "ok",
        "Online users are within their targets; offline work adds 31 ms to P99 TTFT; streams run "
        "at 80% of their speed alone (the slowest 1%: 62%); conversations find 98% of the cached "
        "tokens that they would find alone.",
    ),
    "streams are too slow": (
        replica(slo(), pace=BROKEN),
        cached(0.98),
        "harmed",
        "Online users are hurt by offline work: 4.0% of streams are below 50% of their speed alone "
        "(the slowest 1%: 40%).",
    ),
    "too few streams to judge": (
        replica(slo(), pace=BROKEN | {"streams": 99}),
        None,
        "unknown",
        "Too few requests to judge yet: 4.0% of streams are below 50% of their speed alone (the "
        "slowest 1%: 40%).",
    ),
    "streams are slow before any offline work ran": (
        replica(slo(), pace=BROKEN, billed=0),
        None,
        "unknown",
        "No offline work has run beside online requests, and yet 4.0% of streams are below 50% of "
        "their speed alone (the slowest 1%: 40%).",
    ),
    "conversations are evicted": (
        replica(slo(), pace=KEPT),
        cached(0.6),
        "harmed",
        "Online users are hurt by offline work: conversations find 60% of the cached tokens that "
        "they would find alone.",
    ),
    "every part is broken": (
        replica(MISSED, pace=BROKEN),
        cached(0.6),
        "harmed",
        "Online users are hurt by offline work: P99 TTFT is 680 ms, allowed are 500 ms, without "
        "offline work 210 ms; 4.0% of streams are below 50% of their speed alone (the slowest 1%: "
        "40%); conversations find 60% of the cached tokens that they would find alone.",
    ),
    "nothing is known of streams": (
        replica(slo(alone=None), pace=streams(count=0)),
        None,
        "ok",
        "Online users are within their targets.",
    ),
    "a policy that promises a pace alone": (
        replica(pace=KEPT),
        None,
        "ok",
        "Online users are within their targets; streams run at 80% of their speed alone (the "
        "slowest 1%: 62%).",
    ),
}


@pytest.mark.parametrize("case", DEFAULT_PROMISE)
def test_streams_and_conversations_are_judged_beside_first_tokens(case: str) -> None:
    served, cache, level, text = DEFAULT_PROMISE[case]
    found = standing([served], cache)
    assert (found["level"], found["text"]) == (level, text)


@pytest.mark.parametrize(
    "cache", [cached(0.6, is_promised=False), cached(0.6, alone=9_999), cached(0.0, alone=0), None]
)
def test_a_cache_is_judged_where_it_is_promised_and_enough_would_be_found(
    cache: dict[str, Any] | None,
) -> None:
    found = standing([replica(slo(), pace=KEPT)], cache)
    assert found["level"] == "ok"
    assert "conversations" not in found["text"]
    assert found["cache"] == cache


def test_streams_with_a_target_in_milliseconds_are_judged_by_the_target() -> None:
    tpot = slo("tpot p99 <= 50ms", 45.0, 12.0, limit=50.0)
    found = standing([replica(tpot, pace=streams(3.0, 3.75, limit=None))])
    assert (
        found["text"]
        == "Online users are within their targets; offline work adds 33 ms to P99 TPOT."
    )
    assert found["streams"]["slowdown"] == {"p50": 3.0, "p99": 3.75}


def test_of_several_replicas_the_slowest_streams_and_the_worst_latencies_are_shown() -> None:
    slow = replica(slo(), pace=BROKEN, ttft=latency(50, 40), tpot=latency(9, None))
    fast = replica(slo(), pace=KEPT, ttft=latency(60, 55), tpot=latency(8, None))
    for replicas in ([slow, fast], [fast, slow]):
        found = standing(replicas)
        assert found["promise"] == "All is well."
        assert found["streams"] == BROKEN
        assert found["latencies"] == {"ttft": latency(50, 40), "tpot": latency(9, None)}
    assert standing([])["promise"] is None
